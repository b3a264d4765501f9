"""Assembles the world: joins ranks that already exist, or starts them.

Under ``torchrun``, or if ``torch.distributed`` is initialised, the ranks exist and all run the same
script. A plain process becomes rank 0 and starts the others (``processes.py``). They run
``ostinato.ranks.worker`` and not the user's script, which therefore needs no
``if __name__ == "__main__"``. Several nodes require torchrun.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ostinato import compat
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, RankFailedError
from ostinato.parallel.distributed import gather_numbers
from ostinato.ranks.processes import RankConnection, RankProcesses
from ostinato.ranks.world import World

_HOST = "127.0.0.1"
_START_S = 300.0  # for all ranks to import torch, even on a busy machine
_CONNECT_S = 10.0  # for ranks that have, to connect to a listening socket
_INTERFACE = "GLOO_SOCKET_IFNAME"

# The size of the world that this process started, while it is open: torch has one world a process.
_started: list[int] = []
_joining = threading.Lock()  # a second thread must not find torch's world half made


def join_world(config: EngineConfig) -> World:
    """Join the world of several ranks that ``config`` asks for. One thread at a time."""
    with _joining:
        return _join_world(config)


def _join_world(config: EngineConfig) -> World:
    if _started:
        raise ConfigError(
            f"another LLM in this process runs on {_started[0]} ranks; close it first, because a "
            "process starts ranks for one LLM at a time"
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
    """Destroy torch's process group if creating it fails, so that it can be tried again."""
    try:
        yield
    except BaseException:
        if dist.is_initialized():
            dist.destroy_process_group()
        compat.forget_failed_groups()  # new ranks count from 0
        raise


# --- ranks that exist ----------------------------------------------------------------------------


def _join_ranks(config: EngineConfig, *, owns_group: bool) -> World:
    _check_world_size(config, dist.get_world_size(), "torch.distributed is initialised with it")
    device = _device(config, int(os.environ.get("LOCAL_RANK", dist.get_rank())))
    # Worlds may follow one another on the same store. Gathering the names makes the ranks wait for
    # each other here, so that later waits are bounded by rank_timeout_s.
    name = gather_numbers([secrets.randbits(62)])[0][0]
    store = PrefixStore(f"ostinato/{name}", _client(compat.default_store()))
    return World(
        config.layout,
        device,
        store,
        num_replicas=config.data_parallel_size,
        lockstep=config.data_parallel_lockstep,
        spreads_experts=config.enable_expert_parallel,
        threshold=config.shift_parallel_threshold or 0,
        timeout_s=config.rank_timeout_s,
        on_close=dist.destroy_process_group if owns_group else lambda: None,
    )


def _check_world_size(config: EngineConfig, found: int, source: str) -> None:
    if found != config.world_size:
        raise ConfigError(
            f"{_sizes(config)} needs {config.world_size} ranks, but this world has {found} "
            f"({source}); start {config.world_size} ranks, or change the settings"
        )


def _sizes(config: EngineConfig) -> str:
    layout, replicas = config.layout, config.data_parallel_size
    sizes = f"tensor_parallel_size {layout.tp} x ulysses_sequence_parallel_size {layout.sp}"
    return sizes if replicas == 1 else f"{sizes} x data_parallel_size {replicas}"


def _device(config: EngineConfig, local_rank: int) -> torch.device:
    device = config.torch_device()
    if device.type != "cuda":
        return device
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"no GPU is left for rank {local_rank} of this machine: torch finds "
            f"{torch.cuda.device_count()}, but {config.world_size} ranks need one each"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


# --- ranks that are started here -----------------------------------------------------------------


def _start_ranks(config: EngineConfig) -> World:
    _check_devices(config)
    _check_speculation(config)
    with _local_interface(), _group_gone_if_it_fails():
        ranks = _Ranks(config)
        _started.append(config.world_size)
        try:
            ranks.start()
            return _join_started(config, 0, _device(config, 0), ranks.store, ranks)
        except Exception:
            _stop(ranks)
            raise
        except BaseException:  # Ctrl-C: no rank is leaving by itself
            _stop(ranks, grace_s=0.0)
            raise


def _local_store() -> TCPStore:
    """A store that only this machine can reach. Torch's own would listen on all interfaces."""
    with socket.create_server((_HOST, 0), backlog=128) as listening:
        port = listening.getsockname()[1]
        return TCPStore(
            _HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),  # the store closes it
        )


def _stop(ranks: _Ranks, **options: float) -> None:
    _started.clear()
    ranks.stop(**options)


def join_started(connection: RankConnection, rank: int) -> tuple[EngineConfig, World]:
    """On a started rank: the config to run, and its membership in the world."""
    port, config = connection.launched()
    # Rank 0 was listening before it started this rank.
    store = TCPStore(_HOST, port, is_master=False, timeout=timedelta(seconds=_CONNECT_S))
    store.set_timeout(timedelta(seconds=_START_S))
    device = _device(config, rank)
    connection.wait_for_all()
    return config, _join_started(config, rank, device, store, connection)


def _join_started(
    config: EngineConfig,
    rank: int,
    device: torch.device,
    store: TCPStore,
    steps: _Ranks | RankConnection,
) -> World:
    ranks = steps if isinstance(steps, _Ranks) else None
    timeout_s = max(_CONNECT_S, config.rank_timeout_s)
    try:
        dist.init_process_group(
            "gloo",
            store=PrefixStore("groups", _client(store)),
            rank=rank,
            world_size=config.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise (ranks and ranks.dead()) or RankFailedError(
            f"rank {rank} could not connect to the others within {timeout_s:.0f} s ({error}); see "
            "their logs, and raise rank_timeout_s if the machine is only busy",
            rank,
        ) from error

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
        num_replicas=config.data_parallel_size,
        lockstep=config.data_parallel_lockstep,
        spreads_experts=config.enable_expert_parallel,
        threshold=config.shift_parallel_threshold or 0,
        timeout_s=config.rank_timeout_s,
        symmetric=False,
        steps=steps,
        dead_rank=(lambda: None) if ranks is None else ranks.dead,
        end_others=(lambda: None) if ranks is None else ranks.kill,
        on_close=leave,
    )


def _client(store: Store) -> Store:
    """Another connection to the same store: a client that waits for a key blocks all its users."""
    client: Store = store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it
    return client


def _check_devices(config: EngineConfig) -> None:
    size = config.world_size
    if config.torch_device().type == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(
            f"{_sizes(config)} needs {size} GPUs, but torch finds {torch.cuda.device_count()}"
        )


def _check_speculation(config: EngineConfig) -> None:
    kind = type(config.speculative)
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise ConfigError(
            f"the started ranks cannot import {kind.__name__} (speculative) from "
            f"{kind.__module__}.{kind.__qualname__}, because they do not run the script; move the "
            "class to the top level of a module, or start the script with torchrun"
        )


def _threads_of_a_rank(config: EngineConfig) -> int | None:
    """Threads per rank: CPU ranks share the cores. None leaves the number to torch."""
    if config.torch_device().type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, torch.get_num_threads() // config.world_size)


class _Ranks(RankProcesses):
    """The ranks of one model, and the resources this process holds while they run.

    The store lives in this process until they have ended, because leaving ranks use it.
    """

    def __init__(self, config: EngineConfig) -> None:
        # A rank that loses rank 0 reports it; torch's warnings are pages of C++ frames.
        environment = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
        self._num_threads = _threads_of_a_rank(config)
        if self._num_threads is not None:
            environment["OMP_NUM_THREADS"] = str(self._num_threads)
        super().__init__(config.world_size, environment)
        self._config = config
        self._own_threads = torch.get_num_threads()
        self._store: TCPStore | None = _local_store()

    @property
    def store(self) -> TCPStore:
        assert self._store is not None, "not stopped"
        return self._store

    def start(self) -> None:
        """Start all ranks, and return when they are ready."""
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        self.launch((self.store.port, self._config))
        self.wait_for_all(_START_S)

    def stop(self, **options: float) -> None:
        try:
            super().stop(**options)
        finally:
            if self._store is not None:
                torch.set_num_threads(self._own_threads)
                self._store = None


@contextlib.contextmanager
def _local_interface() -> Iterator[None]:
    """All ranks are on this machine, so gloo need not resolve its name to find the interface."""
    if _INTERFACE in os.environ or "lo" not in {name for _, name in socket.if_nameindex()}:
        yield
        return
    os.environ[_INTERFACE] = "lo"
    try:
        yield
    finally:
        del os.environ[_INTERFACE]
