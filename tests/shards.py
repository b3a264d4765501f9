"""Run tests in several processes with just pytest installed: ``make test-gpu``.

    python tests/shards.py -m gpu

A process runs tests of one file. Tests marked ``alone`` run last, one process at a time. Prints
one line per process, the full output of failed ones, and the sum of all counts.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=-q"]
MOST_JOBS = 16  # that share one GPU's memory
# Folders by the time that a test takes, longest first, and the most tests of a process, which takes
# seconds to start. Tests at real shapes compile kernels; engines start in most of the next.
FOLDERS = (
    ({"gpu"}, 12),
    ({"attention", "compile", "engine", "lora", "models", "ops", "speculative"}, 40),
)
OTHERS = 200
NO_TESTS_COLLECTED = 5
COUNT = re.compile(r"(\d+) (passed|failed|skipped|xfailed|errors?)\b")


def collect(expression: str, paths: list[str]) -> list[list[str]]:
    """The selected tests in groups of one file each, longest first."""
    command = [*PYTEST, "--disable-warnings", "--collect-only", "-m", expression, *paths]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, NO_TESTS_COLLECTED):
        sys.exit(f"{done.stdout}{done.stderr}\ncollecting the tests failed")
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    shards = []
    for _, group in groupby(tests, key=lambda test: test.split("::")[0]):
        of_file = list(group)
        number = -(-len(of_file) // most_tests(of_file[0]))
        size = -(-len(of_file) // number)
        shards += [of_file[at : at + size] for at in range(0, len(of_file), size)]
    return sorted(shards, key=lambda tests: (most_tests(tests[0]), -len(tests)))


def most_tests(test: str) -> int:
    return next((most for folders, most in FOLDERS if folders & _folders(test)), OTHERS)


def _folders(test: str) -> set[str]:
    return set(test.partition("::")[0].split("/")[:-1])


def run(tests: list[str]) -> tuple[Counter[str], bool]:
    """The outcomes by kind, and whether all is well."""
    done = subprocess.run([*PYTEST, *tests], capture_output=True, text=True)
    summary = done.stdout.rstrip().rpartition("\n")[2].strip("= ")
    counts = Counter({kind.rstrip("s"): int(number) for number, kind in COUNT.findall(summary)})
    whole = sum(counts.values()) >= len(tests)  # fewer, if the process died
    well = done.returncode == 0 and whole and "Exception ignored" not in done.stderr  # at exit
    if not well:
        sys.stdout.write(f"{done.stdout}{done.stderr}\n")
    said = "" if well else f" FAILED (exit code {done.returncode})"
    sys.stdout.write(f"{tests[0].split('::')[0]}: {summary}{said}\n")
    sys.stdout.flush()
    return counts, well


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", dest="marks", required=True, help="which tests, as for pytest")
    jobs = min(os.cpu_count() or 1, MOST_JOBS)
    parser.add_argument("--jobs", type=int, default=jobs, help="processes at a time")
    parser.add_argument("paths", nargs="*")
    options = parser.parse_args()
    start, results = time.monotonic(), []
    for alone, jobs in (("not alone", options.jobs), ("alone", 1)):
        shards = collect(f"({options.marks}) and {alone}", options.paths)
        with ThreadPoolExecutor(jobs) as processes:
            results += processes.map(run, shards)
    counts = sum((each for each, _ in results), Counter())
    said = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items())) or "no tests"
    sys.stdout.write(f"{said} in {time.monotonic() - start:.0f} s\n")
    return 0 if results and all(well for _, well in results) else 1


if __name__ == "__main__":
    sys.exit(main())
