"""Lets ranks reach the same decision: before each step, and once at start-up.

Data-parallel ranks have different requests, yet must run the same size under the same mode, because
collectives inside the graphs wait for all of them. Each rank states what it would run
(``StepWish``), one all-reduce of three integers per rank distributes the wishes, and the pure
function ``agree`` turns them into the same ``StepAgreement`` everywhere. ``check_same`` refuses to
start if ranks hold different plans, configs or weights.

This module does not choose a rank's graph: that needs the plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ostinato.errors import BatchError, ConfigError
from ostinato.graphs.policy.descriptor import BatchShape, Choice
from ostinato.graphs.policy.modes import CUDAGraphMode

_MODES = (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
_WISH_WORDS = 3  # mode.rank + 1 (0: not written), num_tokens (0: no work), query_len (0: None)
_DIGEST_WORDS = 4  # SHA-256
_SHOWN_WORDS = 8  # the part of the text that an error shows: an entire SHA-256 in hex
_WORD_BYTES = 8


class Reducer(Protocol):
    """The part of a ``Comm`` that agreement needs. Ranks below are indices in this group."""

    @property
    def size(self) -> int: ...

    @property
    def index(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class StepWish:
    """What one rank would run: the mode that its own dispatch chose, and its unpadded tokens.

    ``query_len`` is set if the choice is a decode graph: other graphs do not depend on it. A rank
    without work has no tokens, and its mode is the highest it *could* run. That mode counts like
    any other, so ``idle()`` uses FULL: NONE would make all ranks eager.
    """

    mode: CUDAGraphMode
    num_tokens: int
    has_work: bool = True
    query_len: int | None = None

    def __post_init__(self) -> None:
        if not self.mode.is_valid_runtime_mode():
            raise BatchError(f"a wish's mode is NONE, PIECEWISE or FULL, got {self.mode.name}")
        if type(self.num_tokens) is not int or self.num_tokens < 0:
            raise BatchError(f"num_tokens must be a non-negative int, got {self.num_tokens!r}")
        if self.has_work != (self.num_tokens > 0):
            raise BatchError(
                f"StepWish has num_tokens={self.num_tokens} with has_work={self.has_work}; a rank "
                "has work exactly when it has tokens"
            )
        if self.query_len is not None and not self._decodes():
            raise BatchError(
                f"StepWish has query_len={self.query_len} with mode {self.mode.name} and "
                f"num_tokens={self.num_tokens}; only FULL decode batches have a query length, "
                "which must be positive and divide num_tokens"
            )

    def _decodes(self) -> bool:
        return (
            self.mode is CUDAGraphMode.FULL
            and type(self.query_len) is int
            and 1 <= self.query_len <= self.num_tokens
            and self.num_tokens % self.query_len == 0
        )

    @classmethod
    def of(cls, choice: Choice, shape: BatchShape) -> StepWish:
        """The wish of a rank whose dispatch returned ``choice`` for ``shape``."""
        query_len = shape.max_query_len if choice.descriptor.uniform else None
        return cls(choice.mode, shape.num_tokens, query_len=query_len)

    @classmethod
    def idle(cls, mode: CUDAGraphMode = CUDAGraphMode.FULL) -> StepWish:
        """The wish of a rank without work; ``mode`` is the highest it could run."""
        return cls(mode, 0, has_work=False)


@dataclass(frozen=True, kw_only=True)
class StepAgreement:
    """The result of combining all ranks' wishes. Equal on all ranks.

    ``mode`` is the lowest of all modes, and ``num_tokens`` the largest unpadded batch: all ranks
    run this mode's graph size for it, if there is one. ``tokens_by_rank`` are the unpadded batches;
    ``query_lens`` are the query lengths of ranks that wished for decode graphs, and ``is_decode``
    says whether all ranks with work did. If no rank has work there is no step, and all counts are
    0.
    """

    mode: CUDAGraphMode
    num_tokens: int
    tokens_by_rank: tuple[int, ...]
    query_lens: frozenset[int] = frozenset()
    is_decode: bool = False

    @property
    def has_work(self) -> bool:
        """Whether there is a step at all; otherwise every rank skips it."""
        return self.num_tokens > 0


def agree(wishes: Sequence[StepWish]) -> StepAgreement:
    """Combine the wishes: the lowest mode and the largest batch."""
    if not wishes:
        raise BatchError("agree() got no wishes; a group has at least one rank")
    by_rank = tuple(wish.num_tokens for wish in wishes)
    if not any(by_rank):
        return StepAgreement(mode=CUDAGraphMode.NONE, num_tokens=0, tokens_by_rank=by_rank)
    mode = min((wish.mode for wish in wishes), key=lambda mode: mode.rank)
    return StepAgreement(
        mode=mode,
        num_tokens=max(by_rank),
        tokens_by_rank=by_rank,
        query_lens=frozenset(wish.query_len for wish in wishes if wish.query_len is not None),
        is_decode=all(wish.query_len is not None for wish in wishes if wish.has_work),
    )


def encode(wish: StepWish, rank: int, size: int) -> list[int]:
    """``wish`` at ``rank``'s position, zeros elsewhere; the sum over ranks holds all wishes."""
    return _placed([wish.mode.rank + 1, wish.num_tokens, wish.query_len or 0], rank, size)


def decode(summed: Sequence[int]) -> tuple[StepWish, ...]:
    """Recover all ranks' wishes from the sum of their ``encode``; raise if that is invalid."""
    wishes = []
    for rank, row in enumerate(_rows(summed, _WISH_WORDS)):
        mode, num_tokens, query_len = row
        if not 1 <= mode <= len(_MODES):
            raise _misplaced(rank, row)
        try:
            wish = StepWish(_MODES[mode - 1], num_tokens, num_tokens > 0, query_len or None)
        except BatchError as error:
            raise _misplaced(rank, row) from error
        wishes.append(wish)
    return tuple(wishes)


@dataclass(frozen=True)
class Agreement:
    """Makes the agreement of each step. ``device`` is where the group reduces.

    On a GPU a step waits for the device; a group that reduces on the CPU (gloo) avoids that.
    """

    device: torch.device | str = "cpu"

    def step(self, comm: Reducer, wish: StepWish) -> StepAgreement:
        """What all ranks of ``comm`` run next. One all-reduce, which every rank must join."""
        own = encode(wish, comm.index, comm.size)
        return agree(decode(_summed(comm, own, self.device)))


def check_same(comm: Reducer, name: str, value: str, *, device: torch.device | str = "cpu") -> None:
    """Raise on every rank unless ``value`` is the same text on all of them.

    One all-reduce, which every rank must join. The text may have any length: its digest and its
    beginning are exchanged. ``name`` says in the error what differs ("plan", "weights").
    """
    text = value.encode("utf-8", "surrogatepass")
    shown = text[: _SHOWN_WORDS * _WORD_BYTES].ljust(_SHOWN_WORDS * _WORD_BYTES, b"\0")
    own = [1, *_to_words(hashlib.sha256(text).digest() + shown)]
    row_words = 1 + _DIGEST_WORDS + _SHOWN_WORDS
    summed = _summed(comm, _placed(own, comm.index, comm.size), device)
    ranks_by_value: dict[tuple[int, ...], list[int]] = {}
    for rank, row in enumerate(_rows(summed, row_words)):
        if row[0] != 1:
            raise _misplaced(rank, row[:1])
        ranks_by_value.setdefault(row[1:], []).append(rank)
    if len(ranks_by_value) > 1:
        held = "; ".join(_described(ranks, row) for row, ranks in ranks_by_value.items())
        raise ConfigError(
            f"ranks differ in {name}: {held}; this is rank {comm.index} of {comm.size}. Start all "
            "ranks with the same model, settings and version"
        )


def _described(ranks: list[int], row: tuple[int, ...]) -> str:
    """The ranks that hold a value, and its beginning; the digest distinguishes equal beginnings."""
    digest = _to_bytes(row[:_DIGEST_WORDS]).hex()[:8]
    shown = _to_bytes(row[_DIGEST_WORDS:]).rstrip(b"\0").decode("utf-8", "replace")
    subject = "rank" if len(ranks) == 1 else "ranks"
    verb = "has" if len(ranks) == 1 else "have"
    return f"{subject} {', '.join(map(str, ranks))} {verb} {shown!r} (sha256 {digest})"


def _summed(comm: Reducer, own: list[int], device: torch.device | str) -> list[int]:
    summed: list[int] = comm.all_reduce(
        torch.tensor(own, dtype=torch.int64, device=device)
    ).tolist()
    return summed


def _placed(words: list[int], rank: int, size: int) -> list[int]:
    if not 0 <= rank < size:
        raise ConfigError(f"rank {rank} is not in a group of {size}; ranks are 0 to {size - 1}")
    return [0] * (rank * len(words)) + words + [0] * ((size - rank - 1) * len(words))


def _rows(summed: Sequence[int], row_words: int) -> list[tuple[int, ...]]:
    if not summed or len(summed) % row_words:
        raise ConfigError(
            f"got {len(summed)} integers from the ranks, which is not {row_words} for each; all "
            "ranks must run the same version and take part in the same exchange"
        )
    return [tuple(summed[at : at + row_words]) for at in range(0, len(summed), row_words)]


def _misplaced(rank: int, got: Sequence[int]) -> ConfigError:
    return ConfigError(
        f"the entry of rank {rank} holds {list(got)} after the exchange: no rank or several ranks "
        "wrote it. Each rank of the group needs its own index, and all must join the same exchange"
    )


def _to_words(data: bytes) -> list[int]:
    return [
        int.from_bytes(data[at : at + _WORD_BYTES], "little", signed=True)
        for at in range(0, len(data), _WORD_BYTES)
    ]


def _to_bytes(words: Sequence[int]) -> bytes:
    return b"".join(word.to_bytes(_WORD_BYTES, "little", signed=True) for word in words)
