"""A backend that we start: a program called `vllm` here answers as its script says, and ends however we end.

If it ends by itself it is started again, and given up when it ends too often.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import ConfigError, Unavailable
from rekindle.harness.own_server import STEADY_S, OwnServer
from rekindle_backends.client import Address, Arrived, Backend
from rekindle_backends.vllm_command import connector_config, vllm_command
from rekindle_backends.wire import Call, read_piece
from tests.needs import ROOT
from tests.server.scripted import serving

PROGRAM = """#!{python}
import json, os, signal, subprocess, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.backends.foreign import chunk, foreign, usage
notes, gate = Path({notes!r}), Path({gate!r})
child = subprocess.Popen(["sleep", "100"]) if "--child" in sys.argv else None
with notes.open("a") as file:
    print(json.dumps([os.getpid(), child and child.pid, *sys.argv[1:]]), file=file)
if "--fails" in sys.argv:
    sys.exit(3)
while gate.exists():
    time.sleep(0.05)
port = sys.argv[sys.argv.index("--port") + 1]
with foreign(url="http://127.0.0.1:" + port, body=chunk([5], "length") + usage(3)):
    signal.pause()
"""
KILLED = """
import os, signal, sys
from pathlib import Path
from rekindle.harness.own_server import OwnServer
from rekindle_backends.vllm_command import vllm_command
OwnServer(vllm_command(Path("model"), "name", flags=(), records=None)).start()
os.kill(os.getpid(), signal.SIGKILL)
"""
WAIT_S = 60.0  # nothing here is timed; this bounds a failure


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the program writes its process id and arguments; it is found as `vllm`."""
    return put_on_path(tmp_path, monkeypatch)


def put_on_path(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Have the program found as `vllm`; return where it writes."""
    found, gate, program = folder / "notes", folder / "gate", folder / "bin" / "vllm"
    program.parent.mkdir()
    values = {"python": sys.executable, "notes": str(found), "gate": str(gate), "root": str(ROOT)}
    program.write_text(PROGRAM.format(**values))
    program.chmod(0o755)
    patch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return found


@dataclass(frozen=True)
class Started:
    """A start of the program: its process, that of its child, its arguments."""

    pid: int
    child: int | None
    arguments: list[str]


def starts(notes: Path) -> list[Started]:
    found = [json.loads(line) for line in notes.read_text().splitlines()]
    return [Started(pid, child, arguments) for pid, child, *arguments in found]


def until(look: Callable[[], bool]) -> bool:
    """Whether that becomes true."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if look():
            return True
        time.sleep(0.02)
    return False


def has_ended(pid: int | None) -> bool:
    assert pid is not None

    def is_gone() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False

    return until(is_gone)


@contextmanager
def running(**more: Any) -> Iterator[OwnServer]:
    own = OwnServer(vllm_command(Path("model"), "scripted", flags=(), records=None), **more)
    own.start()
    try:
        yield own
    finally:
        own.stop()


def test_it_starts_and_ends_with_us(scripted_model: Path, notes: Path, tmp_path: Path) -> None:
    flags = {"backend": "vllm", "backend_flags": "--max-model-len 1024", "store": str(tmp_path / "texts")}
    with serving(model=str(scripted_model), **flags) as front:
        body = {"messages": [{"role": "user", "content": "talk"}]}
        usage = front.send("POST", "/v1/chat/completions", body).json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 3
        (started,) = starts(notes)
        arguments = started.arguments
        assert arguments[:2] == ["serve", str(scripted_model)] and arguments[-2:] == ["--max-model-len", "1024"]
        assert json.dumps(connector_config(tmp_path / "texts" / "vllm")) in arguments
    assert has_ended(started.pid)


def test_it_ends_when_we_are_killed(notes: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert has_ended(starts(notes)[0].pid)


def test_one_that_does_not_start_is_an_error(scripted_model: Path, notes: Path) -> None:
    with (
        pytest.raises(ConfigError, match="ended with status 3 before it answered"),
        serving(model=str(scripted_model), store="off", backend="vllm", backend_flags="--fails"),
    ):
        pass
    assert has_ended(starts(notes)[0].pid)


def test_one_that_ends_is_started_again(scripted_model: Path, notes: Path) -> None:
    gate = notes.with_name("gate")
    with serving(model=str(scripted_model), store="off", backend="vllm", backend_flags="--child") as front:

        def status() -> int:
            return front.send(
                "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "talk"}]}
            ).status

        def problems() -> str:
            return " ".join(front.engine.health().problems)

        assert status() == 200 and front.engine.health().ok
        (first,) = starts(notes)
        gate.touch()
        os.kill(first.pid, signal.SIGKILL)
        assert until(lambda: "vLLM was ended by SIGKILL and is being started again, attempt 1 of 4" in problems())
        assert has_ended(first.child)  # it would keep the lock of a store
        answer = front.send("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "talk"}]})
        assert answer.status == 503 and "is being started again" in answer.error["message"]
        assert answer.headers["retry-after"] == "10"
        assert front.send("GET", "/health/ready").json["status"] == "unavailable"
        gate.unlink()
        assert until(lambda: status() == 200) and front.engine.health().ok
        first, second = starts(notes)
        assert first.arguments == second.arguments and front.engine.deaths() == ()
    assert has_ended(second.pid) and has_ended(second.child)


def test_one_that_ends_too_often_is_given_up(notes: Path) -> None:
    now = [0.0]

    def kill(number: int) -> None:
        os.kill(starts(notes)[-1].pid, signal.SIGKILL)
        assert until(lambda: len(starts(notes)) == number and own.refusal() is None)

    with running(pauses_s=(0.01,), clock=lambda: now[0]) as own:
        kill(2)
        now[0] += STEADY_S  # what served for long has its attempt again
        kill(3)
        os.kill(starts(notes)[-1].pid, signal.SIGKILL)
        assert until(lambda: isinstance(own.refusal(), Unavailable))
        backend, arrived = Backend(Address(own.command.url, None, 60.0), own=own), queue.SimpleQueue[Arrived]()
        backend.start()
        backend.submit(Call("/", {}, {}, read_piece), arrived.put)
        error = arrived.get(timeout=WAIT_S)
        backend.stop()
        assert isinstance(error, Unavailable) and str(error) == backend.problem()
        assert "after 1 attempts to start it again it is given up" in str(error) and "restart this server" in str(error)
        assert len(starts(notes)) == 3


def test_one_that_cannot_start_again_is_given_up(notes: Path) -> None:
    with running(pauses_s=(0.01, 0.01)) as own:
        program = Path(os.environ["PATH"].split(":")[0]) / "vllm"
        program.write_text("#!/bin/sh\nexit 7\n")
        os.kill(starts(notes)[0].pid, signal.SIGKILL)
        assert until(lambda: isinstance(own.refusal(), Unavailable))
        assert "vLLM ended with status 7; after 2 attempts" in str(own.refusal())


def test_nothing_is_started_once_we_stop(notes: Path) -> None:
    with running(pauses_s=(1000.0,)) as own:
        os.kill(starts(notes)[0].pid, signal.SIGKILL)
        assert until(lambda: own.refusal() is not None)
    assert len(starts(notes)) == 1 and not own.worker.is_alive


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            {"backend": "vllm=http://127.0.0.1:9", "backend_flags": "--x"},
            "backend_flags: these are for a server",
        ),
        ({"backend": "vllm", "slot": "auto"}, "slot: a vLLM that is started here needs to know its slot"),
    ],
)
def test_settings_that_do_not_fit_it(scripted_model: Path, tmp_path: Path, flags: dict[str, str], says: str) -> None:
    with (
        pytest.raises(ConfigError, match=says),
        serving(model=str(scripted_model), store=str(tmp_path), **flags),
    ):
        pass
