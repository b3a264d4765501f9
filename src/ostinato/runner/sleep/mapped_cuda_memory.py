"""``MappedMemory`` on CUDA: addresses are reserved once, physical memory is mapped there.

CUDA's virtual memory management, by its Python bindings. A captured graph holds addresses only, so
it stays valid if the same ones are mapped again before it is replayed.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ostinato.errors import ConfigError
from ostinato.graphs.backends.cuda.device import capture_device
from ostinato.runner.sleep.mapped_memory import MappedMemory

try:
    from cuda.bindings import driver
except ImportError:
    driver = None


class MappedCudaMemory(MappedMemory):
    """Memory of one CUDA device, which has an index, outside torch's allocator.

    When the last tensor over it is gone, the device is synchronised and everything is given back.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        if driver is None:
            raise ConfigError(
                "enable_sleep_mode needs CUDA's Python bindings; install cuda-python, which CUDA "
                "builds of torch bring along"
            )
        self._device = device
        with torch.cuda.device(device):  # the driver calls need torch's context
            torch.cuda.current_stream()
            self._reserved = _Reserved(num_bytes, device)
            self._reserved.map()
            self.bytes = torch.as_tensor(self._reserved, device=device).zero_()

    def unmap(self) -> None:
        capture_device(self._device).synchronize()
        self._reserved.unmap()

    def map(self) -> None:
        with torch.cuda.device(self._device):
            self._reserved.map()
        self.bytes.zero_()


class _Reserved:
    """Reserved addresses. torch's storage keeps this object, not the one around it."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._properties = _on(device)
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        unit = _call(driver.cuMemGetAllocationGranularity, self._properties, least)
        self._size = -(-num_bytes // unit) * unit
        self._address = int(_call(driver.cuMemAddressReserve, self._size, 0, 0, 0))
        self._is_mapped = [False]
        shared = capture_device(device)
        free = weakref.finalize(
            self, _free, shared, device, self._address, self._size, self._is_mapped
        )
        free.atexit = False  # the process gives it back

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self._size,),
            "typestr": "|u1",
            "data": (self._address, False),
            "version": 3,
            "strides": None,
        }

    def map(self) -> None:
        if not self._is_mapped[0]:
            handle = _call(driver.cuMemCreate, self._size, self._properties, 0)
            try:
                _call(driver.cuMemMap, self._address, self._size, 0, handle, 0)
                self._is_mapped[0] = True
            finally:
                _call(driver.cuMemRelease, handle)  # the mapping keeps the memory
        access = driver.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _call(driver.cuMemSetAccess, self._address, self._size, [access], 1)

    def unmap(self) -> None:
        if self._is_mapped[0]:
            _call(driver.cuMemUnmap, self._address, self._size)
            self._is_mapped[0] = False


def _free(
    shared: Any, device: torch.device, address: int, size: int, is_mapped: list[bool]
) -> None:
    def give_back() -> None:
        torch.cuda.synchronize(device)  # work that uses it may still be queued
        if is_mapped[0]:
            _call(driver.cuMemUnmap, address, size)
        _call(driver.cuMemAddressFree, address, size)

    shared.dispose(give_back)


def _on(device: torch.device) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device.index
    return properties


def _call(function: Any, *arguments: Any) -> Any:
    status, *results = function(*arguments)
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise MemoryError(f"{function.__name__} found no memory on the device")
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{function.__name__} failed with {status.name}")
    return results[0] if results else None
