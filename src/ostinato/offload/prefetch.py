"""Prefetch offload: layers whose weights are in host memory, and the copies that bring them back.

Offloaded layers share a few *slots*: blocks of device memory that are as large as a layer. Their
parameters are views of a slot, so their addresses never change and graphs can hold them. Which
layer's weights a slot contains changes several times in a forward.

One rule makes every order of eager, PIECEWISE and FULL steps right: **a slot is scratch memory of
one forward.** A forward starts the copies for all it needs, each before use, and waits for all of
them; it assumes nothing about the slots at its start, and leaves no copy in flight at its end. The
alternative, to start the first copies of the *next* forward at the end of this one, would be no
faster: a graph cannot leave work behind, so it would wait for these copies before it ends. As it
is, they run while the resident layers at the start of the forward do.

On CUDA, copies run on a stream of their own. Three orders matter, and each is one event:

- A copy into a slot begins when all work that was enqueued before it has ended, and with it the
  last reader of that slot, in this forward or an earlier one (compute stream -> copy stream).
- A layer begins when its copy has ended (copy stream -> compute stream).
- Copies run one after another, in the order of the layers (copy stream).

*FULL.* In a capture the first wait makes the copy stream part of it (fork). Every copy is waited
for by its layer, in the same capture, so the last wait is the join, and ``join_after_forward`` has
nothing left to do. Events are recorded again in every forward before they are waited for, so none
from inside a capture is waited for outside, nor the reverse. If a forward raises in a capture,
``over`` joins the streams, or CUDA would consider the capture broken.

*PIECEWISE.* Both ends of a copy are eager breaks: they run between the pieces, at capture and at
every replay, so that a copy can overlap several pieces.

*Interrupted steps.* A step that raises may leave copies in flight. Later copies of eager steps
queue up behind them on the copy stream. Those in a graph do not, so ``sync_prev_onload`` makes
every capture and replay wait for the copy stream.

Kernels that read weights before their predecessor has ended (programmatic dependent launch) are
safe: the first kernel after the wait cannot start before the copy has ended, and those after it
cannot start before the first.

On the CPU there are no streams: a copy is an operator, which graphs record and repeat.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import torch

from ostinato.graphs.backends.cuda.device import StreamLease, capture_device
from ostinato.graphs.capture.segments import eager_break
from ostinato.models.native.layer import DecoderLayer
from ostinato.offload.host_memory import host_memory
from ostinato.offload.offload_config import OffloadConfig
from ostinato.offload.packed_layer import PackedLayer

logger = logging.getLogger(__name__)


def offload_bytes(layers: Sequence[DecoderLayer], config: OffloadConfig) -> tuple[int, int]:
    """The bytes of host memory, and of slots on the device, for a model's ``layers``."""
    offloaded = config.layers_of(len(layers))
    sizes = [PackedLayer(layers[number]).num_bytes for number in offloaded]
    return sum(sizes), config.prefetch * max(sizes)


class LayerCopy:
    """The copy of one layer's weights from the host to its slot. ``stream`` None: on the CPU."""

    def __init__(
        self, host: torch.Tensor, slot: torch.Tensor, stream: torch.cuda.Stream | None
    ) -> None:
        self._host = host
        self.slot = slot
        self._stream = stream
        self._ended = None if stream is None else torch.cuda.Event()

    def start(self) -> None:
        """Overwrite the slot, after all work enqueued so far on the current stream."""
        if self._stream is None or self._ended is None:
            self.slot.copy_(self._host)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.slot.device))
        with torch.cuda.stream(self._stream):
            self.slot.copy_(self._host, non_blocking=True)
        self._ended.record(self._stream)

    def wait(self) -> None:
        """Make later work on the current stream wait for the copy."""
        if self._ended is not None:
            torch.cuda.current_stream(self.slot.device).wait_event(self._ended)


@eager_break
def _start(copies: Sequence[LayerCopy]) -> None:
    for copy in copies:
        copy.start()


@eager_break
def _wait(copy: LayerCopy) -> None:
    copy.wait()


class PrefetchOffloader:
    """Keeps the weights of ``layers``, by number, in host memory, with ``num_slots`` on ``device``.

    The decoder calls ``place`` for each of its layers, then weights are loaded, then
    ``bind_slots`` is called once; from then on the layers run inside ``over``. A pool's
    ``WeightOffloader``.
    """

    def __init__(self, layers: Sequence[int], num_slots: int, device: torch.device) -> None:
        self._numbers = frozenset(layers)
        self._num_slots = num_slots
        self._device = device
        self._placed: list[tuple[DecoderLayer, PackedLayer, torch.Tensor]] = []
        self._copies: dict[DecoderLayer, LayerCopy] = {}
        self._slot_of: dict[DecoderLayer, int] = {}
        self._lease: StreamLease | None = None
        self.slots: list[torch.Tensor] = []  # flat bytes

    # --- memory --------------------------------------------------------------------------------

    def place(self, layer: DecoderLayer) -> None:
        """Move the parameters of a new layer to host memory, without values, if it is offloaded."""
        if layer.spec.layer in self._numbers:
            packed = PackedLayer(layer)
            host = host_memory(packed.num_bytes, self._device)
            packed.bind(host)
            self._placed.append((layer, packed, host))

    def bind_slots(self) -> None:
        """Make the parameters views of the slots. Their values in host memory are final."""
        largest = max(packed.num_bytes for _, packed, _ in self._placed)
        self.slots = [
            torch.empty(largest, dtype=torch.uint8, device=self._device)
            for _ in range(self._num_slots)
        ]
        stream = None
        if self._device.type == "cuda":
            self._lease = capture_device(self.slots[0].device).lease_stream()
            stream = self._lease.stream
        for number, (layer, packed, host) in enumerate(self._placed):
            index = number % self._num_slots
            slot = self.slots[index][: packed.num_bytes]
            packed.bind(slot)
            self._slot_of[layer] = index
            self._copies[layer] = LayerCopy(host, slot, stream)
        logger.info(
            "%d layers are in host memory, %.3f GiB; %d slots on %s take %.3f GiB",
            len(self._placed),
            self.host_bytes / 2**30,
            self._num_slots,
            self._device,
            self.slot_bytes / 2**30,
        )

    @contextmanager
    def in_host_memory(self) -> Iterator[None]:
        """Inside, the parameters are the weights in host memory, which may be written.

        Waits until no copy reads them any more. Later forwards copy what is there then.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        with ExitStack() as stack:
            for _, packed, host in self._placed:
                stack.enter_context(packed.bound_to(host))
            yield

    @property
    def host(self) -> list[torch.Tensor]:
        """The weights of the offloaded layers, as flat bytes."""
        return [host for _, _, host in self._placed]

    @property
    def host_bytes(self) -> int:
        return sum(host.nbytes for host in self.host)

    @property
    def slot_bytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    # --- a forward -----------------------------------------------------------------------------

    def over(self, layers: Iterable[DecoderLayer]) -> Generator[DecoderLayer, None, None]:
        """The layers in order, each with its weights in place until the next one is asked for.

        Close the generator if not all of them were run.
        """
        in_order = list(layers)
        first, following = self._order(in_order)
        if first:
            _start(first)
        try:
            for layer in in_order:
                if layer in self._copies:
                    _wait(self._copies[layer])
                yield layer
                if layer in following:
                    _start([following[layer]])
        except BaseException:
            self._rejoin()
            raise

    def _order(
        self, layers: Sequence[DecoderLayer]
    ) -> tuple[list[LayerCopy], dict[DecoderLayer, LayerCopy]]:
        """The copies to start before all layers, and the copy to start after a layer.

        A slot is free for a layer when the layer before it in the same slot has run.
        """
        first: list[LayerCopy] = []
        following: dict[DecoderLayer, LayerCopy] = {}
        last_in: dict[int, DecoderLayer] = {}
        for layer in layers:
            if layer not in self._copies:
                continue
            slot = self._slot_of[layer]
            if slot in last_in:
                following[last_in[slot]] = self._copies[layer]
            else:
                first.append(self._copies[layer])
            last_in[slot] = layer
        return first, following

    def _rejoin(self) -> None:
        """End the copy stream's part in a capture whose forward has failed."""
        if self._lease is None:
            return
        stream = self._lease.stream
        with torch.cuda.stream(stream):
            captured = torch.cuda.is_current_stream_capturing()
        if captured:
            with suppress(RuntimeError):  # the capture may be broken already
                torch.cuda.current_stream(self._device).wait_stream(stream)

    # --- around graphs -------------------------------------------------------------------------

    def sync_prev_onload(self) -> None:
        """Make the current stream wait for copies that an interrupted step left in flight."""
        if self._lease is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._lease.stream)

    def join_after_forward(self) -> None:
        """Nothing to do: every layer has waited for its copy."""
