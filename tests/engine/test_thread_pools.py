"""Threads that compute: the engine's while it is busy, none while it is idle.

Idle threads of one pool make those of all others slow (`rekindle.compute.cpu.kernels.thread_pool`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rekindle.compute.cpu.kernels import thread_pool
from tests.engine.conftest import Start

THREADS = 3
WITHIN_S = 60.0
PROMPT = "a question of many words " * 40


def computing() -> set[str]:
    """The tasks of this process that are no threads of Python's, or no longer: one that ends may still be there."""
    own = {str(thread.native_id) for thread in threading.enumerate()}
    return set(os.listdir("/proc/self/task")) - own


def compute() -> None:
    torch.ones(1 << 20).relu_()


def wait_until_idle(before: set[str]) -> None:
    """Wait until there are no tasks besides those of before, some of which may have ended; nobody waits for an end."""
    deadline = time.monotonic() + WITHIN_S
    while computing() - before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not computing() - before


def test_a_pool_is_given_back_and_made_again() -> None:
    torch.set_num_threads(THREADS)
    thread_pool.release()
    before = computing()
    with ThreadPoolExecutor(1) as one_thread:
        for _ in range(2):
            one_thread.submit(compute).result()
            assert len(computing() - before) == THREADS - 1
            one_thread.submit(thread_pool.release).result()
            wait_until_idle(before)


def test_an_engine_has_no_pool_after_loading_and_when_idle(start: Start) -> None:
    thread_pool.release()
    before = computing()
    engine = start(threads=THREADS)
    wait_until_idle(before)
    engine.generate(PROMPT, agent="ada", max_tokens=2)
    wait_until_idle(before)


@pytest.mark.parametrize(("given", "spins"), [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_threads_of_a_command_spin_shortly_unless_the_environment_says_how(given: dict[str, str], spins: str) -> None:
    """As OpenMP itself shows its settings when torch loads it."""
    code = "import contextlib, rekindle.cli\nwith contextlib.suppress(SystemExit): rekindle.cli.main()\nimport torch"
    assert f"GOMP_SPINCOUNT = '{spins}'" in run(code, given).stderr


@pytest.mark.parametrize(("given", "spins"), [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_threads_of_the_library_do_as_well_and_the_programs_environment_stays(
    given: dict[str, str], spins: str
) -> None:
    done = run("import os, rekindle\nrekindle.Engine\nprint(os.environ.get('GOMP_SPINCOUNT'))", given)
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr
    assert done.stdout.split() == [str(given.get("GOMP_SPINCOUNT"))]


def run(code: str, given: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_DISPLAY_ENV": "verbose", **given}
    return subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, env=environment)
