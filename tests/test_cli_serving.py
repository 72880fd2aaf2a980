"""What a start leaves behind is no matter of the garbage collector; what comes after it is."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from rekindle import Engine
from rekindle.cli import main
from rekindle.cli.serving import SWITCH_S, lasting_heap
from rekindle.errors import RekindleError
from rekindle.harness.client import Client, free_port
from tests.store.confined import run_apart
from tests.test_cli import run

MOST_TRIES = 6_000  # five minutes


def heap_while_serving(store: Path) -> tuple[int, list[str], bool, bool, float]:
    """The exit code of a server, and the first words of its lines that name its slot; while it served: whether the
    collector was on, whether it knew of the engine, and how long a thread may keep the interpreter [s]."""
    port, found = free_port(), []

    def look() -> None:
        for _ in range(MOST_TRIES):
            try:
                Client(port).json("GET", "/health/ready")
            except (OSError, RekindleError):
                time.sleep(0.05)
            else:
                is_known = any(isinstance(each, Engine) for each in gc.get_objects())
                found.append((gc.isenabled(), is_known, sys.getswitchinterval()))
                break
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look, daemon=True).start()
    flags = ["--port", str(port), "--store", str(store), "--slot", "auto", "--threads", "1", "--hot-bytes", "64MiB"]
    result = run("serve", *flags)
    slot = [line.split()[0] for line in result.output.splitlines() if str(store / "slot-0") in line]
    ((is_enabled, is_known, switch_s),) = found
    return result.exit_code, slot, is_enabled, is_known, switch_s


def test_a_server_collects_garbage_without_looking_at_its_engine_and_switches_threads_often(tmp_path: Path) -> None:
    found = run_apart(heap_while_serving, tmp_path / "store")
    assert found == (0, ["warm", "stopped:"], True, False, pytest.approx(SWITCH_S, abs=1e-6))


class Cycle:
    def __init__(self) -> None:
        self.myself = self


def cycles_left() -> tuple[bool, bool]:
    """Whether a cycle is still there after a start: made before its imports were frozen, made after it."""
    with lasting_heap() as freeze:
        early = weakref.ref(Cycle())
        freeze()
        late = weakref.ref(Cycle())
    return early() is not None, late() is not None


def test_the_collection_at_the_end_of_a_start_looks_at_nothing_imported() -> None:
    assert run_apart(cycles_left) == (True, False)


def test_a_start_that_fails_leaves_the_collector_as_it_was() -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(RekindleError), lasting_heap():
        assert not gc.isenabled(), "a start makes much and leaves most of it"
        raise RekindleError("no model")
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, frozen)


def heap_after_a_command() -> tuple[bool, bool]:
    """Whether the collector is on after a command, and whether it leaves out what was imported for it."""
    sys.argv = ["rekindle", "--version"]
    with pytest.raises(SystemExit):
        main()
    return gc.isenabled(), gc.get_freeze_count() > 10_000


def test_what_the_command_line_imports_is_not_searched_for_garbage() -> None:
    assert run_apart(heap_after_a_command) == (True, True)


STARTS = """
import sys

sys.addaudithook(lambda event, args: print("imports", flush=True) if event == "import" and args[0] == "torch" else None)
sys.argv = ["rekindle", "serve", sys.argv[1]]
from rekindle.cli import main

main()
"""


def test_a_server_says_what_it_loads_before_it_imports_what_takes_seconds(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing.gguf")
    done = subprocess.run([sys.executable, "-c", STARTS, missing], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout.splitlines()[:2] == [f"loading {missing}", "imports"], done
