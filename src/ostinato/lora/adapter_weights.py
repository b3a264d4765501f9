"""The memory of adapters at fixed addresses: their matrices in slots, and which row has which.

The graphs of batches with adapters hold these addresses, so loading an adapter writes to a slot,
and a batch writes its rows; nothing is captured again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ostinato.graphs.capture.context import current_forward_context
from ostinato.lora.layer_kernels import with_adapters
from ostinato.models.native.decoder import Decoder
from ostinato.models.native.layer_kernels import AnyKernels
from ostinato.models.weight_slot import WeightSlot
from ostinato.ops.gemm.lora import NO_SLOT, NOT_ACTIVE, LoraRows, LoraWeights
from ostinato.ops.triton.launch import next_power_of_2

_SMALLEST_RANK = 16  # of tensor cores

Matrices = Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # A and scaled B, by the linear's name


@dataclass(frozen=True, kw_only=True)
class Target:
    """A linear of the checkpoint that adapters can change.

    It is the part number ``part`` of the GEMM ``gemm``, whose ``columns`` are this linear's
    results. ``row_order``: the rows of its checkpoint tensor in that order; None: as they are.
    """

    gemm: int
    part: int
    columns: slice
    inputs: int
    outputs: int
    row_order: tuple[range, ...] | None

    def ordered(self, b: torch.Tensor) -> torch.Tensor:
        """The rows of ``b`` [outputs, rank] in the order of the columns."""
        if self.row_order is None:
            return b
        return torch.cat([b[rows.start : rows.stop][:: rows.step] for rows in self.row_order])


class AdapterWeights:
    """Room for ``max_loras`` adapters of up to ``max_rank`` in a model's linears.

    ``targets`` are these linears by their names in adapters; one may have several. The model must
    have this object as its ``adapters`` while it runs batches that have some.
    """

    def __init__(
        self, model: Decoder, *, max_loras: int, max_rank: int, max_num_tokens: int
    ) -> None:
        self.max_loras = max_loras
        self.max_rank = max_rank
        self.device, self.dtype = model.device, model.dtype
        self.encoder_prefixes = model.encoder_prefixes
        self.targets: dict[str, Target] = {}
        self._rank = max(_SMALLEST_RANK, next_power_of_2(max_rank))
        # By the ids of the linears, not the linears, so that the model is freed when it is dropped.
        self._gemms: dict[int, LoraWeights] = {}
        for linear, slots in model.linear_slots():
            self._add_gemm(id(linear), slots, model.spellings)
        self._rows = LoraRows(
            torch.full((max_num_tokens,), NO_SLOT, dtype=torch.int32, device=self.device),
            torch.full((max_loras,), NOT_ACTIVE, dtype=torch.int32, device=self.device),
        )

    def _add_gemm(
        self, key: int, slots: Sequence[WeightSlot], spellings: Callable[[str], list[str]]
    ) -> None:
        weights = [slot for slot in slots if slot.name.endswith(".weight")]
        widths, start = tuple(slot.target.shape[0] for slot in weights), 0
        inputs = weights[0].target.shape[1]
        for part, slot in enumerate(weights):
            reordered = slot.parts is not None and slot.dim == 0
            target = Target(
                gemm=key,
                part=part,
                columns=slice(start, start + widths[part]),
                inputs=inputs,
                outputs=widths[part],
                row_order=slot.parts if reordered else None,
            )
            names = spellings(slot.name.removesuffix(".weight"))
            self.targets.update(dict.fromkeys(names, target))
            start += widths[part]
        a, b = (
            torch.zeros(self.max_loras, *shape, dtype=self.dtype, device=self.device)
            for shape in ((len(weights) * self._rank, inputs), (start, self._rank))
        )
        self._gemms[key] = LoraWeights(a, b, widths)

    @property
    def num_bytes(self) -> int:
        return sum(gemm.a.nbytes + gemm.b.nbytes for gemm in self._gemms.values())

    # --- adapters ------------------------------------------------------------------------------

    @torch.no_grad()
    def write(self, slot: int, matrices: Matrices) -> None:
        """Make ``slot`` the adapter with these ``matrices``.

        Enqueues copies on the current stream. No batch that uses the slot may be running elsewhere.
        """
        for gemm in self._gemms.values():
            gemm.a[slot].zero_()
            gemm.b[slot].zero_()
        for name, (a, b) in matrices.items():
            target, rank = self.targets[name], a.shape[0]
            gemm = self._gemms[target.gemm]
            first = target.part * self._rank
            gemm.a[slot, first : first + rank].copy_(a, non_blocking=True)
            gemm.b[slot, target.columns, :rank].copy_(b, non_blocking=True)

    # --- one batch -----------------------------------------------------------------------------

    def set_rows(self, slots: Sequence[int], query_lens: Sequence[int] | None = None) -> None:
        """Set the batch's adapters: a slot of each request, or NO_SLOT, and its number of tokens.

        ``query_lens`` None: one token each. Further tokens are padding.
        """
        used = sorted(set(slots) - {NO_SLOT})
        active = used + [NOT_ACTIVE] * (self.max_loras - len(used))
        rows = torch.tensor(slots, dtype=torch.int32)
        if query_lens is not None:
            rows = rows.repeat_interleave(torch.tensor(query_lens))
        # From pageable memory: staged before copy_ returns.
        self._rows.active.copy_(torch.tensor(active, dtype=torch.int32), non_blocking=True)
        self._rows.slots[: len(rows)].copy_(rows, non_blocking=True)
        self._rows.slots[len(rows) :].fill_(NO_SLOT)

    def adapted(self, run: AnyKernels, num_rows: int) -> AnyKernels:
        """``run`` for the number of active adapters that the forward context states."""
        context = current_forward_context()
        descriptor = None if context is None else context.batch_descriptor
        if descriptor is None or not descriptor.has_lora:
            return run
        slots, active = self._rows
        rows = LoraRows(slots[:num_rows], active[: descriptor.num_active_loras])
        return with_adapters(run, self._gemms, rows)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell torch that steps run on ``stream``, so that it reuses freed memory only after."""
        for _, tensor in self.named_tensors():
            tensor.record_stream(stream)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All memory that layers read, by name."""
        for number, tensor in enumerate(self._rows):
            yield f"rows {number}", tensor
        for number, gemm in enumerate(self._gemms.values()):
            yield f"A of GEMM {number}", gemm.a
            yield f"B of GEMM {number}", gemm.b
