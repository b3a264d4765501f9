"""The options of speculative decoding: a class for each source of drafts.

``LLM(speculative=...)`` takes an object of one of them, or its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.errors import ConfigError
from ostinato.graphs.policy.sizes import check_positive_int
from ostinato.options import check_seed, option, user_options
from ostinato.quoting import shown
from ostinato.speculative.speculation import Speculation

if TYPE_CHECKING:
    from ostinato.loading.load import LoadedModel
    from ostinato.models.base import CausalLM
    from ostinato.speculative.proposer import Proposer, ProposerContext

MAX_HISTORY = 2**28  # tokens, which take 1 GiB
MAX_MATCH = 2**20


def _check_match(min_match: int, max_match: int) -> None:
    check_positive_int("min_match", min_match)
    check_positive_int("max_match", max_match)
    if max_match > MAX_MATCH:
        raise ConfigError(f"max_match is at most {MAX_MATCH:,}, got {shown(max_match)}; lower it")
    if min_match > max_match:
        raise ConfigError(
            f"min_match {min_match} is above max_match {max_match}, so nothing could ever match"
        )


def _check_name(options: Speculation, model: object, what: str) -> None:
    if not isinstance(model, str | Path) or not str(model):
        name = type(options).__name__
        raise ConfigError(
            f"{name} needs the name of {what}, got {shown(model)}; write {name}(model=...)"
        )


@user_options(example="num_tokens")
@dataclass(frozen=True, kw_only=True)
class NgramDrafts(Speculation):
    """Drafts from the request's own tokens: what followed its last tokens the last time."""

    same_on_all_ranks = True
    min_match: int = option(1, "Last tokens that must be found again, at least.")
    max_match: int = option(4, "Last tokens to compare; the longest match counts.")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_match(self.min_match, self.max_match)

    def build(self, context: ProposerContext) -> Proposer:
        from ostinato.speculative.look_up import LookUpProposer

        return LookUpProposer(
            context, min_match=self.min_match, max_match=self.max_match, history_len=0
        )


@user_options(example="num_tokens")
@dataclass(frozen=True, kw_only=True)
class SuffixDrafts(Speculation):
    """Drafts from the request's own tokens and the output of past requests."""

    same_on_all_ranks = True
    min_match: int = option(1, "Last tokens that must be found again, at least.")
    max_match: int = option(32, "Last tokens to compare; the longest match counts.")
    history_len: int = option(65536, "Tokens of past output to search; the oldest are dropped.")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_match(self.min_match, self.max_match)
        check_positive_int("history_len", self.history_len)
        if self.history_len > MAX_HISTORY:
            raise ConfigError(f"history_len is at most {MAX_HISTORY}, got {self.history_len}")

    def build(self, context: ProposerContext) -> Proposer:
        from ostinato.speculative.look_up import LookUpProposer

        return LookUpProposer(
            context,
            min_match=self.min_match,
            max_match=self.max_match,
            history_len=self.history_len,
        )


@user_options(example="model")
@dataclass(frozen=True, kw_only=True)
class DraftModel(Speculation):
    """Drafts of a smaller model with the same tokens. It has a KV cache of its own."""

    model: str = option("", "Directory or hub name of a checkpoint, or the name of a shape.")
    random_weights: bool = option(False, "Seeded random weights for a named shape.")
    seed: int = option(0, "Seed of random weights.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)
        _check_name(self, self.model, "a model")

    def load(self, model: CausalLM, load: Callable[..., LoadedModel]) -> Speculation:
        from ostinato.speculative.draft_model import LoadedDraftModel

        loaded = load(str(self.model), random_weights=self.random_weights, seed=self.seed)
        return LoadedDraftModel(num_tokens=self.num_tokens, model=loaded.model)


@user_options(example="model")
@dataclass(frozen=True, kw_only=True)
class EagleDrafts(Speculation):
    """Drafts of an EAGLE-3 head, which reads hidden states of the model."""

    model: str = option("", "Directory or hub name of the head's checkpoint, in safetensors.")
    layers: Sequence[int] | None = option(
        None, "Layers of the model whose inputs it reads. None: 2, the middle one, and n - 3."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_name(self, self.model, "a head")
        layers: object = self.layers
        if layers is not None and (
            not isinstance(layers, Sequence)
            or isinstance(layers, str | bytes)
            or any(type(number) is not int or number < 0 for number in layers)
        ):
            raise ConfigError(f"layers must be a list of numbers of layers, got {shown(layers)}")

    def load(self, model: CausalLM, load: Callable[..., LoadedModel]) -> Speculation:
        from ostinato.loading.locate import find_model
        from ostinato.speculative.eagle import LoadedEagle
        from ostinato.speculative.eagle_head import EagleHead

        head = EagleHead(find_model(str(self.model), show_progress=False), model)
        count = len(model.attention_specs)
        layers = (2, count // 2, count - 3) if self.layers is None else tuple(self.layers)
        if len(set(layers)) != len(layers) or len(layers) != head.num_fused:
            raise ConfigError(
                f"the head reads {head.num_fused} different layers of the model's {count}, but "
                f"layers is {list(layers)}; write EagleDrafts(layers=...)"
            )
        return LoadedEagle(num_tokens=self.num_tokens, head=head, layers=layers)


@user_options(example="texts")
@dataclass(frozen=True, kw_only=True)
class ReplayedDrafts(Speculation):
    """Drafts that are right at a set rate, from outputs known in advance: for measurements."""

    same_on_all_ranks = True
    texts: Sequence[Sequence[int]] = option(
        (),
        "Token ids of prompts with the output that follows. A request replays the first text "
        "that begins with its prompt; without one its drafts are wrong.",
    )
    acceptance: float = option(1.0, "Probability of each draft to be that of the text.")
    seed: int = option(0, "Seed of the choice of wrong drafts.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)
        if not isinstance(self.acceptance, int | float) or not 0 <= self.acceptance <= 1:
            raise ConfigError(f"acceptance must be in [0, 1], got {shown(self.acceptance)}")
        texts: object = self.texts
        if isinstance(texts, str | bytes) or not isinstance(texts, Sequence):
            raise ConfigError(f"texts must be a list of lists of token ids, got {shown(texts)}")
        for text in texts:
            listed = isinstance(text, Sequence) and not isinstance(text, str | bytes)
            if not listed or any(type(token) is not int or token < 0 for token in text):
                raise ConfigError(f"texts must be lists of token ids, got {shown(text)}")

    def build(self, context: ProposerContext) -> Proposer:
        from ostinato.speculative.replayed import ReplayProposer

        return ReplayProposer(context, texts=self.texts, acceptance=self.acceptance, seed=self.seed)


METHODS: dict[str, type[Speculation]] = {"ngram": NgramDrafts, "suffix": SuffixDrafts}


def parse_speculation(value: object) -> Speculation | None:
    """Options as given by the user: an object, the name of a method, or None."""
    if value is None or isinstance(value, Speculation):
        return value
    if isinstance(value, str) and value in METHODS:
        return METHODS[value]()
    raise ConfigError(
        f"speculative must be {', '.join(map(repr, METHODS))}, or an object such as "
        f"NgramDrafts(num_tokens=4), got {shown(value)}"
    )
