"""``Speculation``: the base class of the options of every source of drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ostinato.errors import ConfigError
from ostinato.graphs.policy.sizes import check_positive_int
from ostinato.options import check_flags, option
from ostinato.quoting import shown

if TYPE_CHECKING:
    from ostinato.attention.base import AttentionSpec
    from ostinato.loading.load import LoadedModel
    from ostinato.models.base import CausalLM
    from ostinato.speculative.proposer import Proposer, ProposerContext

_NUM_TOKENS_HELP = (
    "Drafts per request and step. By batch size: {8: 4, 32: 2} means 4 in steps of up to 8 "
    "requests, 2 in steps of up to 32, and none in larger ones."
)


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Where drafts come from, and how many. Derive from it for drafts of your own.

    ``num_tokens``: drafts per request and step; or by batch size, as in {8: 4, 32: 2}: 4 in steps
    of up to 8 requests, 2 in steps of up to 32, and none in larger ones.
    """

    num_tokens: int | Mapping[int, int] = option(4, _NUM_TOKENS_HELP)

    # Whether drafts are the same on all ranks of a model that is split: they follow from the
    # request state and from what ``admit`` and ``learn`` tell.
    same_on_all_ranks: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_flags(self)
        counts = self.num_tokens
        if not isinstance(counts, Mapping):
            check_positive_int("num_tokens", counts)
            return
        if not counts:
            raise ConfigError("num_tokens is empty; give at least one batch size, as in {8: 4}")
        for num_reqs, count in counts.items():
            check_positive_int("a batch size in num_tokens", num_reqs)
            if type(count) is not int or count < 0:
                raise ConfigError(
                    f"num_tokens has {shown(count)} drafts for batches of up to {num_reqs} "
                    "requests; write an integer of at least 0"
                )

    @property
    def attention_specs(self) -> Sequence[AttentionSpec]:
        """Layers whose keys and values are cached for drafts, once it is loaded."""
        return ()

    @property
    def aux_hidden_state_layers(self) -> Sequence[int]:
        """Layers of the model whose inputs it reads, once it is loaded; 0 is the first."""
        return ()

    def load(self, model: CausalLM, load: Callable[..., LoadedModel]) -> Speculation:
        """Load weights for drafts of ``model``, if it has any.

        ``load(name, random_weights=..., seed=...)`` loads a model, with its dtype and device.
        """
        return self

    def build(self, context: ProposerContext) -> Proposer:
        """The proposer, with what it needs on the device of ``context``.

        Called on what ``load`` returns.
        """
        raise ConfigError(
            f"{type(self).__name__} has no build(), which makes its proposer; define it, or "
            "return from load() an object that has one"
        )

    def num_drafts(self, max_num_seqs: int) -> tuple[int, ...]:
        """Drafts per request, by the number of requests in a step, from 0 to ``max_num_seqs``."""
        counts = self.num_tokens
        if not isinstance(counts, Mapping):
            counts = {max_num_seqs: counts}
        sizes = sorted(counts)
        table = []
        for num_reqs in range(max_num_seqs + 1):
            size = next((size for size in sizes if num_reqs <= size), None)
            table.append(0 if size is None else counts[size])
        return tuple(table)
