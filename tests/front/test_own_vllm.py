"""A backend that we start: a program called `vllm` here answers as its script says, and ends however we end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rekindle.backend.process import connector_config
from rekindle.errors import ConfigError
from tests.needs import ROOT
from tests.server.scripted import serving

PROGRAM = """#!{python}
import json, os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.front.foreign import chunk, foreign, usage
Path({notes!r}).write_text(json.dumps([os.getpid(), *sys.argv[1:]]))
if "--fails" in sys.argv:
    sys.exit(3)
port = sys.argv[sys.argv.index("--port") + 1]
with foreign(url="http://127.0.0.1:" + port, body=chunk([5], "length") + usage(3)):
    signal.pause()
"""
KILLED = """
import os, signal, sys
from pathlib import Path
from rekindle.backend.process import OwnVllm
OwnVllm.start(Path("model"), "name", flags=(), records=None)
os.kill(os.getpid(), signal.SIGKILL)
"""
WAIT_S = 60.0  # nothing here is timed; this bounds a failure


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the program writes its process id and arguments; it is found as `vllm`."""
    found, program = tmp_path / "notes", tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable, notes=str(found), root=str(ROOT)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return found


def read(notes: Path) -> tuple[int, list[str]]:
    pid, *arguments = json.loads(notes.read_text())
    return pid, arguments


def has_ended(pid: int) -> bool:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_it_starts_and_ends_with_us(scripted_model: Path, notes: Path, tmp_path: Path) -> None:
    flags = {"backend": "vllm", "backend_flags": "--max-model-len 1024", "store": str(tmp_path / "texts")}
    with serving(model=str(scripted_model), **flags) as front:
        body = {"messages": [{"role": "user", "content": "talk"}]}
        usage = front.send("POST", "/v1/chat/completions", body).json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 3
        pid, arguments = read(notes)
        assert arguments[:2] == ["serve", str(scripted_model)] and arguments[-2:] == ["--max-model-len", "1024"]
        assert json.dumps(connector_config(tmp_path / "texts" / "vllm")) in arguments
    assert has_ended(pid)


def test_it_ends_when_we_are_killed(notes: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert has_ended(read(notes)[0])


def test_one_that_does_not_start_is_an_error(scripted_model: Path, notes: Path) -> None:
    with (
        pytest.raises(ConfigError, match="ended with status 3 before it answered"),
        serving(model=str(scripted_model), store="off", backend="vllm", backend_flags="--fails"),
    ):
        pass
    assert has_ended(read(notes)[0])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"backend": "vllm=http://127.0.0.1:9", "backend_flags": "--x"}, "backend_flags: these are for backend=vllm"),
        ({"backend": "vllm", "slot": "auto"}, "slot: a vLLM that is started here needs to know its slot"),
    ],
)
def test_settings_that_do_not_fit_it(scripted_model: Path, tmp_path: Path, flags: dict[str, str], says: str) -> None:
    with (
        pytest.raises(ConfigError, match=says),
        serving(model=str(scripted_model), store=str(tmp_path), **flags),
    ):
        pass
