"""Faults around ranks that ``LLM`` starts: while they start, load, leave, or stop."""

from __future__ import annotations

import gc
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_parallel_start import PARAMS, PROMPTS, TIMEOUT_S, TINY, gone, pid_of_rank_1
from workers import GlooPool

from ostinato import LLM, SamplingParams
from ostinato.errors import ConfigError, RankFailedError, SchedulingError
from ostinato.graphs.capture.pool import GraphPool
from ostinato.ranks import rendezvous, worker
from ostinato.ranks.world import World
from ostinato.runner import startup

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_ranks")]

TWO: dict[str, Any] = {**TINY, "tensor_parallel_size": 2, "rank_timeout_s": TIMEOUT_S}


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def in_rank_1(code: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every started rank run ``code`` before anything else."""
    guarded = "import os, signal, sys\nif sys.argv[:1] == ['-m']:\n" + code
    (directory / "sitecustomize.py").write_text(guarded)
    monkeypatch.setenv("PYTHONPATH", str(directory), prepend=os.pathsep)


def listening_on(port: int) -> set[str]:
    """The local addresses, in hexadecimal, of the sockets that listen on ``port``."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if Path(table).exists():
            for line in Path(table).read_text().splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                if state == "0A" and int(local.rsplit(":", 1)[1], 16) == port:
                    found.add(local.rsplit(":", 1)[0])
    return found


def test_one_world_at_a_time_on_this_machine_alone() -> None:
    with LLM(**TWO) as llm:
        ranks: Any = llm.engine.runner._world._dead_rank.__self__  # type: ignore[attr-defined]
        port = ranks._store.port
        assert listening_on(port) == {"0100007F"}
        with pytest.raises(ConfigError, match="another LLM in this process runs on 2 ranks; close"):
            LLM(**TWO)
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(pickle.dumps("what a stranger says") * 1000)
            assert llm.generate(PROMPTS, PARAMS)  # it has not noticed either
        processes_are_looked_at_once_a_step(llm)
    del ranks
    assert listening_on(port) == set()


def test_one_of_two_threads_gets_the_world() -> None:
    barrier = threading.Barrier(2)

    def start_and_generate(results: list[Any]) -> None:
        barrier.wait()
        try:
            with LLM(**TWO) as llm:
                results.append(llm.generate(PROMPTS, PARAMS)[0].outputs[0].token_ids)
                ended.wait(60)  # the other must not take its place
        except ConfigError as error:
            results.append(error)
            ended.set()

    ended, results = threading.Event(), list[Any]()
    threads = [threading.Thread(target=start_and_generate, args=(results,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (error,) = (each for each in results if isinstance(each, ConfigError))
    assert "another LLM in this process runs on 2 ranks; close it first" in str(error)
    (tokens,) = (each for each in results if each is not error)
    with LLM(**TINY) as llm:
        assert llm.generate(PROMPTS, PARAMS)[0].outputs[0].token_ids == tokens


def processes_are_looked_at_once_a_step(llm: LLM) -> None:
    """Here because ranks take seconds to start."""
    runner: Any = llm.engine.runner
    steps, looks, run, dead_rank = [], [], runner.run, runner._world._dead_rank
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run", lambda plan: (steps.append(plan), run(plan))[1])
        patch.setattr(runner._world, "_dead_rank", lambda: (looks.append(1), dead_rank())[1])
        llm.generate(PROMPTS, PARAMS)
    assert len(looks) == len(steps) > 20


# --- the end -------------------------------------------------------------------------------------


def test_the_graphs_of_a_dropped_llm_go_before_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(**TWO)
    pid, ended = pid_of_rank_1(llm), []
    pool_close, world_close = GraphPool.close, World.close
    monkeypatch.setattr(GraphPool, "close", lambda pool: (ended.append("pool"), pool_close(pool)))
    monkeypatch.setattr(World, "close", lambda world: (ended.append("world"), world_close(world)))
    del llm
    gc.collect()
    assert ended == ["pool", "world"]
    assert gone(pid)


def test_ranks_end_whatever_fails_before(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(**TWO)
    pid, destroy = pid_of_rank_1(llm), dist.destroy_process_group

    def fails(group: Any = None) -> None:
        destroy(group)
        if group is None:
            raise RuntimeError("a fault of torch")

    monkeypatch.setattr(dist, "destroy_process_group", fails)
    with pytest.raises(RuntimeError, match="a fault of torch"):
        llm.close()
    assert gone(pid)


class BlockingComm:
    """A communicator on a GPU whose abort may never return."""

    def __init__(self, *, blocks: bool) -> None:
        self.device = torch.device("cuda")
        self.blocks = blocks
        self.aborted = threading.Event()

    def abort(self) -> None:
        if self.blocks:
            threading.Event().wait()
        self.aborted.set()


def test_a_communicator_that_does_not_abort_holds_up_no_other() -> None:
    world: Any = object.__new__(World)
    stuck, other = BlockingComm(blocks=True), BlockingComm(blocks=False)
    world._comms, world._aborts = {(0, 1): stuck, (0, 1, 2, 3): other}, {}
    world._abort()
    assert other.aborted.wait(10)


# --- the start -----------------------------------------------------------------------------------

FAULTY_GROUPS = """
    from ostinato.parallel.distributed import DistributedComm
    def connect(self):
        {fault}
    DistributedComm._connect = connect
"""


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise ValueError('a fault of this rank')", "rank 1 failed: ValueError: a fault of this"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "rank 1 (stopped|never started) beating"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 was killed by signal 9"),
    ],
    ids=["raises", "hangs", "dies"],
)
def test_a_world_that_cannot_be_made_can_be_made_again(
    fault: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as faulty:
        in_rank_1(FAULTY_GROUPS.format(fault=fault), tmp_path, faulty)
        with pytest.raises(RankFailedError, match=message) as caught:
            LLM(**TWO)
    assert caught.value.rank == 1
    assert not dist.is_initialized()
    assert not [t for t in threading.enumerate() if t.name.startswith("watchdog")]
    if "ValueError" in fault:
        said = capfd.readouterr().err
        assert "rank 1 could not join (ValueError: a fault of this rank)" in said
        with LLM(**TWO) as llm:
            assert llm.generate(PROMPTS, PARAMS)


FAULTY_LOAD = """
    from ostinato.runner import startup
    def load(*args, **options):
        raise ValueError("a fault of this rank")
    startup.load = load
"""


def test_a_rank_that_fails_leaves_rank_0_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process belongs to the user, so the error is raised in the main thread instead."""
    in_rank_1(FAULTY_LOAD, tmp_path, monkeypatch)
    load = startup.load

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(TIMEOUT_S + 1)  # longer than detection and rescue take
        return load(*args, **options)

    monkeypatch.setattr(startup, "load", slow)
    with pytest.raises(RankFailedError, match="rank 1 failed: ValueError: a fault of this rank"):
        LLM(**TWO)
    assert not dist.is_initialized()


def test_a_rank_that_cannot_join_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(connection: Any, rank: int) -> None:
        raise ConfigError("no GPU is left for rank 1 of this machine")

    monkeypatch.setattr(rendezvous, "join_started", refuses)
    here, there = socket.socketpair()
    with here:
        assert worker._run(there.detach(), 1) == 1
    assert (
        "rank 1 could not join (ConfigError: no GPU is left for rank 1" in capsys.readouterr().err
    )


# --- rank 0 --------------------------------------------------------------------------------------


def steps_on_its_own() -> tuple[str, list[int]]:
    with LLM(**TWO) as llm:
        said = ""
        if dist.get_rank() == 1:
            llm.engine.add(llm.engine.prepare_request([1, 2, 3], SamplingParams(max_tokens=3))[0])
            with pytest.raises(SchedulingError) as caught:
                llm.engine.step()
            said = str(caught.value)
        output = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, temperature=0))[0]
        return said, output.outputs[0].token_ids


def test_only_rank_0_takes_requests(gloo_pool: GlooPool) -> None:
    (_, first), (said, second) = gloo_pool.run(steps_on_its_own)
    assert said.startswith("this is rank 1, but only rank 0 takes requests")
    assert first == second  # the ranks are in step


SCRIPT = """
import sys
from ostinato import LLM, SamplingParams

llm = LLM("tiny", random_weights=True, device="cpu", max_model_len=128, show_progress=False,
          tensor_parallel_size=2, rank_timeout_s=4)
ranks = llm.engine.runner._world._dead_rank.__self__
sys.stdout.write(f"{ranks._processes[0].pid}\\n")
sys.stdout.flush()
while True:
    llm.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=12))
"""


def has_ended(pid: int) -> bool:
    """Even before its exit code was collected, because its parent is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.alone  # it is timed
def test_a_stopped_rank_0_ends_the_others(tmp_path: Path) -> None:
    """The store is in its process, so ranks that read beats block."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            time.sleep(0.5)
            process.send_signal(signal.SIGSTOP)
            # The timeout plus a tenth, and three seconds for a busy machine.
            deadline = time.monotonic() + 1.1 * TIMEOUT_S + 3
            while not has_ended(pid) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert has_ended(pid)
            process.send_signal(signal.SIGCONT)
            _, said = process.communicate(timeout=20)
        finally:
            process.kill()
    assert "which rank 0 hosts, has not answered for" in said
    # Awake again, rank 0 names rank 1: in an error or, if gloo still blocks it, when it exits.
    assert process.returncode == 1
    assert re.search("the process of rank 1 ended with exit code 1|rank 1 stopped beating", said)
