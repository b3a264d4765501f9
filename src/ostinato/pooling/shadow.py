"""``verify`` for encoders: batches of packed sequences, run through graphs and eagerly.

They leave nothing behind but their hidden states, so the inputs are all there is to put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn

from ostinato.attention.packed import PackedBatch
from ostinato.graphs.capture.context import set_forward_context
from ostinato.graphs.manager import CudaGraphManager
from ostinato.graphs.policy.descriptor import BatchShape, Choice, Reason
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import PlanEntry
from ostinato.graphs.policy.verify import VerifyPolicy
from ostinato.graphs.trust.ledger.owners import module_memory
from ostinato.graphs.trust.shadow.call_log import CallLogging
from ostinato.graphs.trust.shadow.memory_names import name_among
from ostinato.graphs.trust.shadow.memory_part import MemoryPart
from ostinato.graphs.trust.shadow.report import Mismatch, VerifyReport
from ostinato.graphs.trust.shadow.schedule import ShadowSchedule
from ostinato.graphs.trust.shadow.shadow import Shadow, ShadowedStep
from ostinato.graphs.wrapper import CUDAGraphWrapper
from ostinato.models.base import Encoder

_SEED = 7
_AT_CAPTURE = "at capture"


class PackedShadow:
    """Compares batches of the ``forward`` of one model, whose ``inputs`` are ids, positions, types.

    ``vocab_size``: token ids below it are valid.
    """

    def __init__(
        self,
        policy: VerifyPolicy,
        manager: CudaGraphManager[int, torch.Tensor],
        forward: CUDAGraphWrapper[torch.Tensor],
        inputs: torch.Tensor,
        model: Encoder,
        vocab_size: int,
    ) -> None:
        self.report = VerifyReport()
        self.policy = policy
        self._schedule = ShadowSchedule(policy)
        self._manager = manager
        self._forward = forward
        self._inputs = inputs
        self._vocab_size = vocab_size
        self._shadow = Shadow(
            manager.pool, name_of=partial(_name_in, model.module), report=self.report
        )

    def takes(self, choice: Choice) -> bool:
        """Whether the batch that runs as chosen is compared; counts it."""
        return self._schedule.takes(
            None if choice.mode is CUDAGraphMode.NONE else choice.descriptor
        )

    def run(self, choice: Choice, batch: PackedBatch) -> torch.Tensor:
        """Run the batch in the inputs both ways; returns its hidden states."""
        step, hidden = self._step(choice, batch)
        self._note(self._shadow.run(step, f"step {self._schedule.num_steps}"), choice)
        return hidden[0]

    def _note(self, mismatch: Mismatch | None, choice: Choice) -> None:
        self._schedule.note(choice.descriptor, differs=mismatch is not None)
        if mismatch is not None:
            entry = PlanEntry(mode=choice.mode, descriptor=choice.descriptor)
            self._manager.dispatcher.mark_refused(entry, Reason.QUARANTINED)

    def _step(self, choice: Choice, batch: PackedBatch) -> tuple[ShadowedStep, list[torch.Tensor]]:
        """A batch that can run both ways, and its hidden states: those of its first replay, where
        ``Shadow.run`` leaves the right ones.
        """
        padded, num_tokens, first = choice.padded_num_tokens, batch.num_tokens, list[torch.Tensor]()
        inputs = self._inputs[:, :padded]

        def eager(
            *, other_padding: bool = False, logging: CallLogging | None = None
        ) -> Mapping[str, torch.Tensor]:
            if other_padding:
                padding = inputs[0, num_tokens:]
                padding.copy_((padding + 1) % self._vocab_size)
            with (
                set_forward_context(CUDAGraphMode.NONE, choice.descriptor, attn_metadata=batch),
                logging or nullcontext(),
            ):
                hidden = self._forward.unwrap()(*inputs)
            return {"the hidden states": hidden[:num_tokens]}

        def replay() -> Mapping[str, torch.Tensor]:
            with set_forward_context(choice.mode, choice.descriptor, attn_metadata=batch):
                hidden = self._forward(*inputs)[:num_tokens]
            if not first:
                first.append(hidden)
            return {"the hidden states": hidden}

        step = ShadowedStep(
            graph=f"{choice.mode.name} graph of {padded} tokens",
            tape=self._forward.concrete_cudagraph_entries[choice.descriptor].tape,
            eager=eager,
            replay=replay,
            parts=[MemoryPart(name="the inputs", tensor=inputs, compared=False)],
            rows={padded: slice(num_tokens)},
        )
        return step, first

    # --- at capture ----------------------------------------------------------------------------

    def try_graphs(self, first_position: int) -> None:
        """Compare every captured graph on two made-up batches: with most padding, with none."""
        sizes = self._manager.plan.mixed_sizes
        for smaller, size in zip((0, *sizes), sizes, strict=False):
            for num_tokens in sorted({smaller + 1, size}):
                choice = self._try(_lengths(num_tokens), first_position)
                if choice.mode is CUDAGraphMode.NONE:
                    break
        self._inputs.zero_()

    def _try(self, lengths: Sequence[int], first_position: int) -> Choice:
        batch = PackedBatch(lengths, self._inputs.device)
        shape = BatchShape(batch.num_tokens, len(lengths), batch.max_len, has_prompts=True)
        choice = self._manager.dispatch(shape)
        if choice.mode is CUDAGraphMode.NONE:
            return choice
        generator = torch.Generator(self._inputs.device).manual_seed(_SEED)
        self._inputs.zero_()
        ids, positions = self._inputs[0, : batch.num_tokens], self._inputs[1]
        ids.random_(0, self._vocab_size, generator=generator)
        for start, length in zip(_starts(lengths), lengths, strict=True):
            torch.arange(first_position, first_position + length, out=positions[start:][:length])
        step, _ = self._step(choice, batch)
        mismatch = self._shadow.run(step, _AT_CAPTURE)
        if mismatch is None and len(lengths) > 1:
            kept = slice(0, lengths[0])
            rows = {choice.padded_num_tokens: kept}
            change = self._other_tokens(ids[lengths[0] :])
            mismatch = self._shadow.check_row(step, change, rows, _AT_CAPTURE)
        self._note(mismatch, choice)
        return self._manager.dispatch(shape)

    @contextmanager
    def _other_tokens(self, ids: torch.Tensor) -> Iterator[None]:
        before = ids.clone()
        ids.copy_((before + 1) % self._vocab_size)
        try:
            yield
        finally:
            ids.copy_(before)


def _name_in(module: nn.Module, address: int) -> str | None:
    return name_among(module_memory(module), address)


def _lengths(num_tokens: int) -> list[int]:
    """Two sequences, unless there is one token."""
    half = num_tokens // 2
    return [half, num_tokens - half] if half else [num_tokens]


def _starts(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:number]) for number in range(len(lengths))]
