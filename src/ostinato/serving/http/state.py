"""``Served``: what the routes share. The model, its names, its limits."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

from ostinato.errors import ConfigError
from ostinato.quoting import shown
from ostinato.sampling_params import SamplingParams
from ostinato.serving.async_llm import AsyncLLM
from ostinato.serving.http.errors import ApiError
from ostinato.serving.http.limits import Admission
from ostinato.serving.http.server_config import ServerConfig
from ostinato.structured.params import StructuredOutputsParams

EMBEDDED_NAME = "SmolLM2-135M-Instruct"

_OTHER_FORM = {"logit_bias", "logprobs", "max_tokens", "structured_outputs"}
_SAME_NAMES = {field.name for field in fields(SamplingParams)} - _OTHER_FORM


class Served:
    """An ``AsyncLLM`` with the names and limits that a ``ServerConfig`` gives it."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        self.llm = llm
        self.config = config
        model = llm.config.model
        self.name = config.served_model_name or (EMBEDDED_NAME if model is None else str(model))
        if self.name in llm.adapters:
            raise ConfigError(
                f"an adapter and the model are both called {shown(self.name)}; rename the adapter, "
                "or set --served-model-name"
            )
        llm.max_prompt_tokens = config.max_prompt_tokens
        self.started = int(time.time())
        self.admission = Admission(llm.max_num_seqs + config.max_waiting)

    def adapter(self, model: str | None) -> str | None:
        """The adapter that a request's ``model`` names; None: it names the model, or nothing."""
        if model is None or model == self.name:
            return None
        if model in self.llm.adapters:
            return model
        raise ApiError(
            404,
            f"model {shown(model)} is not served here; /v1/models lists the models that are",
            param="model",
            code="model_not_found",
        )

    def check_task(self, task: str) -> None:
        if self.llm.task != task:
            raise ApiError(
                400,
                f"this model was loaded to {self.llm.task}, not to {task}; if it can do that, "
                f"start the server with --task {task}",
                param="model",
            )

    def params(
        self,
        body: Any,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        structure: StructuredOutputsParams | None = None,
    ) -> SamplingParams:
        """The sampling parameters of a request."""
        given = {
            name: value for name in _SAME_NAMES if (value := getattr(body, name, None)) is not None
        }
        bias = getattr(body, "logit_bias", None)
        if bias is not None:
            if not all(key.isascii() and key.isdecimal() and len(key) < 20 for key in bias):
                raise ApiError(400, "logit_bias maps token ids to numbers", param="logit_bias")
            given["logit_bias"] = {int(key): value for key, value in bias.items()}
        return SamplingParams(
            **given, max_tokens=max_tokens, logprobs=logprobs, structured_outputs=structure
        )

    def check_sequences(self, num_prompts: int, n: int) -> int:
        """The number of sequences of a request, within the limit."""
        num_sequences, most = num_prompts * n, self.config.max_sequences
        if not num_prompts:
            raise ApiError(400, "there are no prompts; give at least one", param="prompt")
        if num_sequences > most:
            raise ApiError(
                400,
                f"{num_prompts} prompts with n={n} make {num_sequences} sequences, but a request "
                f"may have at most {most} (--max-sequences); split it into several requests",
                param="n",
            )
        return num_sequences
