"""No process outlives rank 0: signals at random moments, forks, threads and interrupted starts.

``OSTINATO_NUM_SIGNALS=200`` sends more signals, ``OSTINATO_SIGNAL_SEED`` different ones.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from test_parallel_start import TINY

from ostinato import LLM
from ostinato.errors import RankFailedError
from ostinato.ranks.processes import RankProcesses

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc"),
]

MARK = "OSTINATO_TEST_MARK"  # in the environment of a script and of everything it starts
PATIENCE_S = 30.0  # for a busy machine
START = """
import os, sys, threading, time
def say(text):
    sys.stdout.write(text + "\\n")
    sys.stdout.flush()
say("begun")
from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.runner.model_runner import ModelRunner
capture = ModelRunner.capture_model
ModelRunner.capture_model = lambda runner: (say("capturing"), capture(runner))[1]
def start():
    global llm
    say("starting")
    llm = LLM("tiny", random_weights=True, device="cpu", max_model_len=128, show_progress=False,
              graphs=GraphConfig(capture_sizes=[1, 2, 4]), tensor_parallel_size=2, rank_timeout_s=5)
def generate():
    output = llm.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=12, temperature=0))[0]
    return output.outputs[0].token_ids
"""


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Script:
    """A script in a separate process, and what it started."""

    def __init__(self, code: str, directory: Path, cwd: Path | None = None) -> None:
        path = directory / "script.py"
        path.write_text(START + code)
        self._mark = f"{MARK}={uuid.uuid4()}"
        self.process = subprocess.Popen(
            [sys.executable, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=os.environ | dict([self._mark.split("=")]),
            # A test run under nohup ignores hang-ups, and so would what it starts.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )

    def wait_for(self, line: str) -> str:
        assert self.process.stdout is not None
        for said in self.process.stdout:
            if said.startswith(line):
                return said.removeprefix(line).strip()
        raise AssertionError(f"it ended before {line!r}:\n{self.process.communicate()[1]}")

    def living(self) -> set[int]:
        """All live processes of this script, excluding zombies."""
        found = set()
        for directory in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if self._mark.encode() in (directory / "environ").read_bytes().split(b"\0"):
                    found.add(int(directory.name))
        return found

    def started(self) -> set[int]:
        return self.living() - {self.process.pid}

    def wait_for_end(self, patience_s: float = PATIENCE_S) -> tuple[str, str]:
        """Its remaining output, once it and everything it started are gone."""
        said = self.process.communicate(timeout=patience_s)  # until no process holds its streams
        deadline = time.monotonic() + patience_s
        while self.living():
            assert time.monotonic() < deadline, f"{self.living()} are left"
            time.sleep(0.02)
        return said

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


# --- signals -------------------------------------------------------------------------------------

SIGNALS = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP)
# After which line of the script's output to send the signal, and the longest delay.
MOMENTS = {"starting": 3.0, "ready": 1.0, "capturing": 0.6, "begun": 3.0}
FOREVER = """
start()
say("ready")
while True:
    generate()
"""


def hit(script: Script, number: signal.Signals, *, in_rank_1: bool, stopped: bool) -> None:
    """Send the signal to rank 0, or to rank 1 if that exists, and wait for rank 0 to end."""
    ranks = script.started()
    for rank in ranks if stopped else ():
        os.kill(rank, signal.SIGSTOP)
    for pid in ranks if in_rank_1 and ranks and number != signal.SIGINT else {script.process.pid}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    deadline = time.monotonic() + PATIENCE_S
    while script.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.5)
        if number == signal.SIGINT:  # Python drops one that arrives in a finaliser or callback
            script.process.send_signal(number)


@pytest.mark.alone  # it is timed
def test_no_process_outlives_a_signal(tmp_path: Path) -> None:
    seed = int(os.environ.get("OSTINATO_SIGNAL_SEED", 0))
    for number in range(int(os.environ.get("OSTINATO_NUM_SIGNALS", 6))):
        draw = random.Random(f"{seed} {number}")
        after = list(MOMENTS)[number % len(MOMENTS)]
        which = SIGNALS[(number + number // len(MOMENTS)) % len(SIGNALS)]
        delay_s = draw.uniform(0, MOMENTS[after])
        options = {"in_rank_1": draw.random() < 0.25, "stopped": draw.random() < 0.1}
        with Script(FOREVER, tmp_path) as script:
            script.wait_for(after)
            time.sleep(delay_s)
            hit(script, which, **options)
            try:
                script.wait_for_end()
            except (AssertionError, subprocess.TimeoutExpired) as error:
                what = f"signal {number}: {which.name} {delay_s:.3f} s after {after!r}, {options}"
                raise AssertionError(f"{what}: {error}") from error
        if number % 10 == 9:
            sys.stderr.write(f"{number + 1} signals, no process left\n")


# --- forks and threads ---------------------------------------------------------------------------

# The thread that starts the ranks ends, a fork lives on, and the current directory contains a
# module named like one of the standard library.
FORKED = """
thread = threading.Thread(target=start)
thread.start()
thread.join()
before = generate()
child = os.fork()
if not child:
    try:
        generate()
    except Exception as error:
        say(f"error: {error}")
    llm.close()
    fork = os.fork()
    if fork:
        sys.exit()
    say("forked")
    time.sleep(1000)
os.waitpid(child, 0)
say(f"tokens: {generate() == before}")
time.sleep(1000)
"""


def test_forks_neither_use_the_ranks_nor_keep_them_alive(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "queue.py").write_text("raise RuntimeError('the current directory was imported')")
    with Script(FORKED, tmp_path, elsewhere) as script:
        said = script.wait_for("error: ")
        assert said.startswith("this is a fork of rank 0, which cannot use its connections to the")
        script.wait_for("forked")
        assert script.wait_for("tokens: ") == "True"
        assert len(script.living()) == 3  # rank 0, rank 1, the fork
        script.process.kill()
        deadline = time.monotonic() + PATIENCE_S
        while len(script.living()) > 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(script.living()) == 1


def test_an_interpreter_that_exits_while_ranks_start(tmp_path: Path) -> None:
    code = """
threading.Thread(target=start, daemon=True).start()
from ostinato.ranks import processes
while not any(each._processes for each in processes._started):
    time.sleep(0.01)
"""
    with Script(code, tmp_path) as script:
        _, said = script.wait_for_end()
        assert script.process.returncode == 0, said


# --- the start -----------------------------------------------------------------------------------


def test_a_start_that_is_interrupted_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(processes: Any, timeout_s: float) -> None:
        started.extend(processes._processes)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RankProcesses, "wait_for_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            LLM(**TINY, tensor_parallel_size=2)
    assert [process.returncode for process in started] == [-signal.SIGKILL]  # and was waited for
    assert started[0].stdin is not None
    assert started[0].stdin.closed
    assert not dist.is_initialized()


def test_a_rank_whose_parent_is_gone_ends_before_it_imports_torch() -> None:
    """Even if a fork keeps the other end of its pipe: its parent is then another process."""
    here, there = socket.socketpair()
    with here, there:
        command = [sys.executable, "-m", "ostinato.ranks.worker"]
        arguments = [str(there.fileno()), str(os.getpid() + 1), "1"]
        process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(there.fileno(),),
        )
        with process:
            assert process.stderr is not None
            said = process.stderr.read().decode()  # until it has ended: its pipe is open
    assert said == f"ostinato: rank 1 exits because rank 0 (pid {os.getpid() + 1}) ended\n"
    assert process.returncode == 1


def test_a_rank_that_cannot_be_started_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(RankFailedError, match="could not start the process of rank 1: ") as error:
        LLM(**TINY, tensor_parallel_size=2)
    assert error.value.rank == 1
    with pytest.raises(RankFailedError, match="could not start the process of rank 1"):
        LLM(**TINY, tensor_parallel_size=2)  # the first one has released everything
