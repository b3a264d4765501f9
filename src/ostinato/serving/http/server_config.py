"""``ServerConfig``: where the server listens, who may ask, and how much."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ostinato.errors import ConfigError
from ostinato.options import option, user_options
from ostinato.quoting import shown

_LOOPBACK = re.compile(r"127(\.\d+){3}|::1|localhost")


@user_options(example="port")
@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The options of the HTTP server; those of the model are ``LLM``'s."""

    host: str = option(
        "127.0.0.1", "Address to listen on. 0.0.0.0: all, for other machines.", cli=str
    )
    port: int = option(8000, "Port to listen on; 0: any that is free.", cli=int)
    api_key: str | None = option(
        None,
        "Clients must send this key as a bearer token. Better in the environment, as "
        "OSTINATO_API_KEY: other users see a command line.",
        cli=str,
    )
    served_model_name: str | None = option(
        None, "The model's name for clients. None: as it was given to --model.", cli=str
    )
    max_waiting: int = option(
        256,
        "Sequences that may wait beside those that run (max_num_seqs). Requests beyond get 429.",
        cli=int,
    )
    max_sequences: int = option(128, "Most sequences of one request: its prompts times n.", cli=int)
    max_prompt_tokens: int | None = option(
        None, "Longest prompt. None: what max_model_len leaves room for.", cli=int
    )
    max_body_bytes: int = option(
        16 * 2**20, "Largest request body. Images are in it, as data URLs.", cli=int
    )
    request_timeout_s: float = option(
        600.0, "Longest time of one request, waiting included; after that it is aborted.", cli=float
    )
    shutdown_timeout_s: float = option(
        30.0,
        "After SIGTERM or Ctrl-C: how long unfinished requests may take, until they are aborted. "
        "The second signal ends the server at once.",
        cli=float,
    )

    otlp_traces_endpoint: str | None = option(
        None,
        "Send a trace of each request to this OpenTelemetry collector, such as "
        "http://127.0.0.1:4318/v1/traces. None: as the variables OTEL_EXPORTER_OTLP_* say.",
        cli=str,
    )

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError(f"host must be an address, such as 127.0.0.1, got {shown(self.host)}")
        if type(self.port) is not int or not 0 <= self.port < 2**16:
            raise ConfigError(f"port must be an integer from 0 to 65535, got {shown(self.port)}")
        key = self.api_key
        if key is not None and not (isinstance(key, str) and key.isascii() and key.isprintable()):
            raise ConfigError("api_key must be printable ASCII text; it is not shown here")
        if key is not None and (not key or key != key.strip()):
            raise ConfigError(
                "api_key, or OSTINATO_API_KEY, is empty or begins or ends with a space; leave it "
                "out to serve without a key"
            )
        if self.served_model_name == "":
            raise ConfigError("served_model_name is empty; leave it out, or give a name")
        for name in ("max_waiting", "max_sequences", "max_prompt_tokens", "max_body_bytes"):
            value, least = getattr(self, name), 0 if name == "max_waiting" else 1
            if value is None and name == "max_prompt_tokens":
                continue
            if type(value) is not int or value < least:
                raise ConfigError(
                    f"{name} must be an integer of at least {least}, got {shown(value)}"
                )
        for name in ("request_timeout_s", "shutdown_timeout_s"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < float("inf"):
                raise ConfigError(f"{name} must be a number of seconds, got {shown(value)}")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                "otlp_traces_endpoint must be an address such as "
                f"http://127.0.0.1:4318/v1/traces, got {shown(endpoint)}"
            )
        if not self.request_timeout_s:  # some programs take it for no limit
            raise ConfigError(
                "request_timeout_s is 0, in which no request is answered; give seconds"
            )

    @property
    def is_exposed(self) -> bool:
        """Whether other machines may connect, without a key."""
        return self.api_key is None and not is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own."""
    return _LOOPBACK.fullmatch(host) is not None
