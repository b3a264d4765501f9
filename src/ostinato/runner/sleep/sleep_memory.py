"""``SleepMemory``: the weights and the KV cache of a runner, where ``sleep`` can release them.

Both live in ``MappedMemory``, so that their addresses, which graphs hold, outlast a sleep. Weights
are moved there once, after loading and before anything is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod

import torch
from torch import nn

from ostinato.graphs.tree import tensors_in
from ostinato.models.base import CausalLM
from ostinato.runner.sleep.mapped_memory import MappedHostMemory, MappedMemory

_CHUNK = 256 * 2**20  # weights are moved, and kept in host memory, in pieces of about this size
_ALIGNMENT = 512  # as torch's CUDA allocator aligns


class SleepMemory:
    """Memory on ``device`` that is released and comes back, each on all ranks or on none.

    Both have two phases, of which only the first can fail. ``sleep`` and ``wake`` take a function
    that tells whether all ranks have succeeded, by whether this one has. In between, the memory
    must not be used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.empty(0, device=device).device  # with an index
        self._weights: list[MappedMemory] = []
        self._caches: list[MappedMemory] = []
        self._released: list[MappedMemory] = []
        self._kept: dict[MappedMemory, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return sum(each.bytes.numel() for each in (*self._weights, *self._caches))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of a KV cache: its values do not outlast a sleep, and are zeros after it."""
        num_bytes = prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.zeros(shape, dtype=dtype, device=self._device)
        memory = _map_memory(num_bytes, self._device)
        self._caches.append(memory)
        return memory.bytes[:num_bytes].view(dtype).view(*shape)

    @torch.inference_mode()
    def move_weights(self, models: Sequence[CausalLM]) -> None:
        """Move the parameters of ``models`` here, with everything that shares their memory.

        Every tensor object stays the same, and so do strides and sharing.
        """
        modules = [model.module for model in models]
        owned = {
            _storage_key(each)
            for module in modules
            for each in module.parameters()
            if each.device == self._device
        }
        sharing: dict[int, list[torch.Tensor]] = {key: [] for key in owned if key}
        for tensor in _tensors_of(modules):
            if _storage_key(tensor) in sharing:
                sharing[_storage_key(tensor)].append(tensor)
        for chunk in _chunks(list(sharing.values())):
            self._move(chunk)
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # or both copies of the model would have to fit

    def _move(self, groups: Sequence[list[torch.Tensor]]) -> None:
        sizes = [_aligned(each[0].untyped_storage().nbytes()) for each in groups]
        memory = _map_memory(sum(sizes), self._device)
        self._weights.append(memory)
        storage, start = memory.bytes.untyped_storage(), 0
        for tensors, size in zip(groups, sizes, strict=True):
            old = tensors[0].untyped_storage()
            values = torch.empty(0, dtype=torch.uint8, device=self._device).set_(old)
            memory.bytes[start : start + old.nbytes()].copy_(values)
            for tensor in tensors:
                offset = start // tensor.element_size() + tensor.storage_offset()
                tensor.set_(storage, offset, tensor.size(), tensor.stride())
            start += size

    # --- sleep ---------------------------------------------------------------------------------

    def sleep(
        self, *, keep_weights: bool, on_all_ranks: Callable[[bool], bool]
    ) -> MemoryError | None:
        """Release all of it; the weights are kept in host memory or discarded.

        Returns an error if the host memory of a rank has no room, and has then released nothing.
        """
        prepare = partial(self._prepare_release, keep_weights=keep_weights)
        error = _all_or_none(prepare, undo=self._forget_kept, on_all_ranks=on_all_ranks)
        if error is None:
            self._release(keep_weights=keep_weights)
        return error

    def _prepare_release(self, *, keep_weights: bool) -> None:
        """Copy the weights to host memory if they are kept, unless they are in host memory.

        May raise MemoryError, and then changes nothing.
        """
        kept: dict[MappedMemory, torch.Tensor] = {}
        if keep_weights and self._device.type == "cuda":
            try:
                for memory in self._weights:
                    host = torch.empty_like(memory.bytes, device="cpu", pin_memory=True)
                    kept[memory] = host.copy_(memory.bytes, non_blocking=True)
            except RuntimeError as error:
                raise MemoryError(f"host memory has no room for the weights: {error}") from error
        self._kept = kept

    def _forget_kept(self) -> None:
        """Drop what ``_prepare_release`` copied."""
        self._kept = {}

    def _release(self, *, keep_weights: bool) -> None:
        """Give the memory back, when all work on the device is done."""
        in_place = keep_weights and self._device.type != "cuda"
        released = [*self._caches, *(() if in_place else self._weights)]
        self._released = released  # even those that an interrupt leaves mapped: ``wake`` maps all
        for memory in released:
            memory.unmap()

    # --- wake ----------------------------------------------------------------------------------

    def wake(self, *, on_all_ranks: Callable[[bool], bool]) -> MemoryError | None:
        """Have all memory again, with zeros where nothing was kept.

        Returns an error if the device of a rank has no room, and has then changed nothing.
        """
        error = _all_or_none(self._map, undo=self._unmap, on_all_ranks=on_all_ranks)
        if error is None:
            self._refill()
        return error

    def _map(self) -> None:
        """Have all memory again, or none of it, if there is no room: MemoryError."""
        mapped: list[MappedMemory] = []
        try:
            for memory in self._released:
                memory.map()
                mapped.append(memory)
        except BaseException:
            for memory in mapped:
                memory.unmap()
            raise

    def _unmap(self) -> None:
        """Undo ``_map``."""
        for memory in self._released:
            memory.unmap()

    def _refill(self) -> None:
        """Write what was kept, behind all work on the current stream; elsewhere are zeros."""
        for memory, kept in self._kept.items():
            memory.bytes.copy_(kept, non_blocking=True)
        self._released, self._kept = [], {}  # torch reuses pinned memory when it was read


def _all_or_none(
    allocate: Callable[[], None],
    *,
    undo: Callable[[], None],
    on_all_ranks: Callable[[bool], bool],
) -> MemoryError | None:
    """Allocate on all ranks. If one has no room, ``undo`` it on the others."""
    error: MemoryError | None = None
    try:
        allocate()
    except MemoryError as raised:
        error = raised
    if not on_all_ranks(error is None) and error is None:
        undo()
        return MemoryError("another rank has no room")
    return error


def _map_memory(num_bytes: int, device: torch.device) -> MappedMemory:
    """At least ``num_bytes`` on ``device``, mapped. Raises MemoryError if there is no room."""
    if device.type != "cuda":
        return MappedHostMemory(num_bytes)
    from ostinato.runner.sleep.mapped_cuda_memory import MappedCudaMemory  # needs the bindings

    return MappedCudaMemory(num_bytes, device)


def _storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors_of(modules: Sequence[nn.Module]) -> Iterator[torch.Tensor]:
    """Every tensor that a module holds as parameter, buffer or attribute; each once."""
    seen: set[int] = set()
    for module in modules:
        for part in module.modules():
            for tensor in tensors_in(vars(part)):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor


def _chunks(groups: Sequence[list[torch.Tensor]]) -> Iterator[list[list[torch.Tensor]]]:
    chunk: list[list[torch.Tensor]] = []
    size = 0
    for tensors in groups:
        own = _aligned(tensors[0].untyped_storage().nbytes())
        if chunk and size + own > _CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(tensors)
        size += own
    if chunk:
        yield chunk


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
