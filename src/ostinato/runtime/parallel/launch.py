"""How a world comes together: ranks that exist already, or ranks that are started here.

Under ``torchrun``, or where ``torch.distributed`` is initialised, the ranks exist and all run the
same script. In a plain process this one becomes rank 0 and starts the others with torch's elastic
multiprocessing. They run ``ostinato.runtime.parallel.worker`` and not the user's script, which so
needs no ``if __name__ == "__main__"``. Several nodes are torchrun's business.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    LogsDest,
    start_processes,
)

from ostinato.errors import ConfigError, RankFailedError
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.parallel.world import World

_HOST = "127.0.0.1"
_START_S = 300.0  # for all ranks to import torch and to find one another
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_INTERFACE = "GLOO_SOCKET_IFNAME"
_CONFIG = "OSTINATO_RANK_CONFIG"

# How many ranks the world has that this process started, while it is open.
_num_started: int | None = None


def join_world(config: EngineConfig) -> World:
    """This process's place in the world that ``config`` asks for, which has several ranks."""
    if _num_started is not None:
        raise ConfigError(
            f"another LLM of this process runs on {_num_started} ranks; close it first: a process "
            "starts ranks for one at a time"
        )
    if dist.is_available() and dist.is_initialized():
        return _join_ranks(config, owns_group=False)
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        _check_world_size(config, int(os.environ["WORLD_SIZE"]), "WORLD_SIZE, set by torchrun")
        with _group_gone_if_it_fails():
            dist.init_process_group("gloo", timeout=timedelta(seconds=_START_S))
            return _join_ranks(config, owns_group=True)
    return _start_ranks(config)


@contextlib.contextmanager
def _group_gone_if_it_fails() -> Iterator[None]:
    """Around what makes torch's process group: if it fails, it can be tried again."""
    try:
        yield
    except BaseException:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise


# --- ranks that exist ----------------------------------------------------------------------------


def _join_ranks(config: EngineConfig, *, owns_group: bool) -> World:
    _check_world_size(config, dist.get_world_size(), "torch.distributed is initialised with it")
    device = _device(config, int(os.environ.get("LOCAL_RANK", dist.get_rank())))
    # Worlds may follow one another on the same store. Gathering the names, the ranks wait for one
    # another, and from there on for rank_timeout_s only.
    names = [""] * dist.get_world_size()
    dist.all_gather_object(names, f"ostinato/{uuid.uuid4()}")
    store = PrefixStore(names[0], _client(dist.distributed_c10d._get_default_store()))
    return World(
        config.layout,
        device,
        store,
        threshold=config.shift_parallel_threshold or 0,
        timeout_s=config.rank_timeout_s,
        on_close=dist.destroy_process_group if owns_group else lambda: None,
    )


def _check_world_size(config: EngineConfig, found: int, source: str) -> None:
    layout = config.layout
    if found != layout.world_size:
        raise ConfigError(
            f"tensor_parallel {layout.tp} x sequence_parallel {layout.sp} takes "
            f"{layout.world_size} ranks, but this world has {found} ({source}); start "
            f"{layout.world_size} ranks, or change the settings"
        )


def _device(config: EngineConfig, local_rank: int) -> torch.device:
    device = config.torch_device()
    if device.type != "cuda":
        return device
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {local_rank} of this machine has no GPU of its own: torch finds "
            f"{torch.cuda.device_count()}, and {config.layout.world_size} ranks need as many"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


# --- ranks that are started here -----------------------------------------------------------------


def _start_ranks(config: EngineConfig) -> World:
    global _num_started
    _check_devices(config)
    with _local_interface(), _group_gone_if_it_fails():
        store = _local_store()
        ranks = _Ranks(config, store)
        _num_started = config.layout.world_size
        try:
            ranks.wait_for_all()
            return _join_started(config, 0, _device(config, 0), store, ranks)
        except BaseException:
            _stop(ranks)
            raise


def _local_store() -> TCPStore:
    """A store that this machine alone can reach. Torch itself would listen on all interfaces."""
    with socket.create_server((_HOST, 0), backlog=128) as listening:
        port = listening.getsockname()[1]
        return TCPStore(
            _HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),  # the store closes it
        )


def _stop(ranks: _Ranks) -> None:
    global _num_started
    _num_started = None
    ranks.stop()


def join_started(port: int, rank: int) -> tuple[EngineConfig, World]:
    """On a rank that was started: what it is to run, and its place in the world."""
    store = TCPStore(_HOST, port, is_master=False, timeout=timedelta(seconds=_START_S))
    # From the environment, which this process's parent alone has written to.
    config: EngineConfig = pickle.loads(base64.b64decode(os.environ[_CONFIG]))
    device = _device(config, rank)
    store.add("started", 1)  # from here on rank 0 waits for this one
    return config, _join_started(config, rank, device, store, None)


def _join_started(
    config: EngineConfig,
    rank: int,
    device: torch.device,
    store: TCPStore,
    ranks: _Ranks | None,
) -> World:
    dist.init_process_group(
        "gloo",
        store=PrefixStore("groups", _client(store)),
        rank=rank,
        world_size=config.layout.world_size,
        timeout=timedelta(seconds=_START_S),
    )

    def leave() -> None:
        try:
            dist.destroy_process_group()
        finally:
            if ranks is not None:
                _stop(ranks)

    return World(
        config.layout,
        device,
        PrefixStore("watchdog", _client(store)),
        threshold=config.shift_parallel_threshold or 0,
        timeout_s=config.rank_timeout_s,
        symmetric=False,
        dead_rank=(lambda: None) if ranks is None else ranks.dead,
        end_others=(lambda: None) if ranks is None else ranks.kill,
        on_close=leave,
    )


def _client(store: Store) -> Store:
    """Another connection to the same store: one that waits for a key blocks all its users."""
    client: Store = store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it
    return client


def _check_devices(config: EngineConfig) -> None:
    size = config.layout.world_size
    if config.torch_device().type == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(
            f"tensor_parallel {config.tensor_parallel} x sequence_parallel "
            f"{config.sequence_parallel} takes {size} GPUs, but torch finds "
            f"{torch.cuda.device_count()}"
        )


def _threads_of_a_rank(config: EngineConfig) -> int | None:
    """Ranks on the CPU share its cores; None leaves it to torch."""
    if config.torch_device().type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, torch.get_num_threads() // config.layout.world_size)


class _OnOurStreams(DefaultLogsSpecs):
    """What the ranks print goes where this process's goes, and no thread is kept for it."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destinations = super().reify(envs)
        destinations.tee_stdouts.clear()
        destinations.tee_stderrs.clear()
        return destinations


class _Ranks:
    """The processes of all ranks but 0, which is this one.

    ``store`` lives in this process, and until they have ended: ranks on their way out use it.
    """

    def __init__(self, config: EngineConfig, store: TCPStore) -> None:
        command = ("-m", "ostinato.runtime.parallel.worker", str(store.port))
        self._store: TCPStore | None = store
        environment = {
            _CONFIG: base64.b64encode(pickle.dumps(config)).decode(),
            # A rank that loses rank 0 says so itself; torch's warnings are pages of C++ frames.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }
        self._own_threads = torch.get_num_threads()
        num_threads = _threads_of_a_rank(config)
        if num_threads is not None:
            environment["OMP_NUM_THREADS"] = str(num_threads)
            torch.set_num_threads(num_threads)
        self._size = size = config.layout.world_size
        with _signals_as_they_are():
            self._context: Any = start_processes(
                "ostinato",
                sys.executable,
                args={local: (*command, str(local + 1)) for local in range(size - 1)},
                envs={local: dict(environment) for local in range(size - 1)},
                logs_specs=_OnOurStreams(log_dir=os.devnull),
            )

    def wait_for_all(self) -> None:
        """Return when all have found the store."""
        assert self._store is not None, "not stopped"
        deadline = time.monotonic() + _START_S
        while self._store.add("started", 0) < self._size - 1:
            failure = self.dead()
            if failure is None and time.monotonic() > deadline:
                failure = RankFailedError(f"not all ranks started within {_START_S:.0f} s")
            if failure is not None:
                raise failure
            time.sleep(0.02)

    def dead(self) -> RankFailedError | None:
        """The first rank whose process has ended, if one has."""
        for local, handler in self._context.subprocess_handlers.items():
            code = handler.proc.poll()
            if code is not None:
                how = (
                    f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                )
                return RankFailedError(f"the process of rank {local + 1} {how}", local + 1)
        return None

    def kill(self) -> None:
        for handler in self._context.subprocess_handlers.values():
            if handler.proc.poll() is None:
                handler.proc.kill()
                handler.proc.wait()

    def stop(self) -> None:
        """Wait a moment for those on their way out, and end the rest. Twice is harmless."""
        deadline = time.monotonic() + 5.0
        handlers = self._context.subprocess_handlers.values()
        while time.monotonic() < deadline and any(h.proc.poll() is None for h in handlers):
            time.sleep(0.01)
        self.kill()
        if self._store is not None:
            self._context.close()
            torch.set_num_threads(self._own_threads)
            self._store = None


@contextlib.contextmanager
def _signals_as_they_are() -> Iterator[None]:
    """torch's launcher takes over the signals of the process, which is not ours to give."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is None:
                continue  # set by other than Python code, and cannot be set back from here
            with contextlib.suppress(ValueError):  # not the main thread: nothing was taken over
                signal.signal(number, handler)


@contextlib.contextmanager
def _local_interface() -> Iterator[None]:
    """All ranks are on this machine: gloo need not resolve its name to find the interface."""
    if _INTERFACE in os.environ or "lo" not in {name for _, name in socket.if_nameindex()}:
        yield
        return
    os.environ[_INTERFACE] = "lo"
    try:
        yield
    finally:
        del os.environ[_INTERFACE]
