"""Whatever happens to the command line is one line and an exit code, never a traceback."""

from __future__ import annotations

import io
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rekindle import __version__
from rekindle.cli import app
from rekindle.cli.border import code_of
from rekindle.config import ServerSettings
from rekindle.errors import StoreError, StoreLocked, StoreRefused
from rekindle.harness.client import free_port
from rekindle.server.observers.log import logging_to
from rekindle_pocket import MODEL_DIR
from tests.memory_limit import limit_memory

REKINDLE = [sys.executable, "-m", "rekindle.cli"]
# Packages are as good as not installed for a process that cannot find them.
WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from rekindle.cli import main
main()
"""
# Ctrl-C at the first call of each of these functions (END of the file's name, name of the function), in this order.
INTERRUPTED = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)

def interrupt(frame, event, arg):
    if PLACES and event == "call" and frame.f_code.co_filename.endswith(PLACES[0][0]):
        if frame.f_code.co_name == PLACES[0][1]:
            del PLACES[0]
            os.kill(os.getpid(), signal.SIGINT)

sys.setprofile(interrupt)
from rekindle.cli import main
main()
"""
STOPS = [("serve.py", "banner"), ("app.py", "close"), ("assembly.py", "flush"), ("assembly.py", "_stop")]
PHASES = {  # of a start: where ctrl-C comes, and what is said
    "before its own code is there": ([("border.py", "<module>")], "rekindle: interrupted"),
    "in an exec of source, while packages are imported": ([("<string>", "<module>")], "rekindle: interrupted"),
    "while the command line is read": ([("core.py", "parse_args")], "rekindle: interrupted"),
    "while the settings are read": ([("settings.py", "_load")], "rekindle: interrupted"),
    "where Python makes a RuntimeError of it": ([("functools.py", "__set_name__")], "interrupted"),
    "while torch is imported": ([("torch/__init__.py", "<module>")], "nothing is lost"),
    "while the model is loaded": ([("loader.py", "load_weights")], "nothing is lost"),
    "when it is ready, and again and again while it stops": (STOPS, "are saved in"),
}
EXTRAS = ["typer", "click", "rich", "torch", "transformers", "tokenizers", "yaml", "jinja2", "fastapi", "uvicorn"]
EXTRAS += ["pydantic", "starlette", "platformdirs", "safetensors", "huggingface_hub", "matplotlib", "httpx"]
ENGINES = [["serve", "--port", "0"], ["chat"], ["run", "router"]]


def without(missing: list[str], arguments: list[str]) -> subprocess.CompletedProcess[str]:
    code = f"MISSING = {missing!r}\n{WITHOUT}"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["serve"], ["agents"]], ids=str)
def test_without_its_extra_the_command_says_which_to_install(arguments: list[str]) -> None:
    done = without(EXTRAS, arguments)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "pip install 'rekindle[serve]'" in done.stderr


@pytest.mark.parametrize("arguments", ENGINES, ids=str)
def test_commands_that_need_a_model_say_what_is_missing(arguments: list[str], tmp_path: Path) -> None:
    store = ["--store", str(tmp_path)]
    done = without(["torch", "transformers"], [*arguments, *store])
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "pip install 'rekindle[serve]'" in done.stderr


@pytest.mark.parametrize("command", [["agents"], ["why", "ada"]], ids=" ".join)
def test_commands_that_ask_a_server_say_that_httpx_is_missing(command: list[str]) -> None:
    done = without(["httpx"], [*command, "--url", "http://127.0.0.1:9"])
    assert done.returncode == 2, done.stderr
    assert "the package httpx, which is not installed: pip install 'rekindle[serve]'" in done.stderr


def test_a_reader_that_has_left_is_no_defect() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([*REKINDLE, "run"], stdout=writing, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writing)
    assert done.returncode == 141, done.stderr
    assert done.stderr == ""


def test_a_defect_is_one_line_and_a_traceback_on_demand(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> int:
        raise RuntimeError("two\nlines")

    assert code_of(run) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "please report it: RuntimeError: two (test_cli_border.py, line" in said
    monkeypatch.setenv("REKINDLE_DEBUG", "1")
    assert code_of(run) == 1
    assert "Traceback" in capsys.readouterr().err


def test_files_of_others_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert code_of(lambda: len((tmp_path / "none").read_text())) == 1
    assert capsys.readouterr().err == f"rekindle: {tmp_path / 'none'}: No such file or directory\n"


@pytest.fixture
def unreadable(tmp_path: Path) -> Path:
    """A model that ends every start that comes as far as its weights."""
    directory = tmp_path / "model"
    shutil.copytree(MODEL_DIR, directory)
    (directory / "model.safetensors").write_bytes(b"no weights")
    return directory


BELOW_A_FILE = "FILE/store"
WRONG = {  # what is given -> what is said of it
    ("--hot-bytes", "4000TiB"): "is more than the memory of cpu",
    ("--device", "meta"): "device=meta cannot be used: write auto, cpu, cuda",
    ("--device", "cpu:3"): "device=cpu:3 cannot be used: write auto, cpu, cuda",
    ("--device", "nonsense"): "device=nonsense cannot be used: write auto, cpu, cuda",
    ("--device", "cuda:77"): "device=cuda:77 cannot be used: ",
    ("--threads", "0"): "threads must be from 1 to 1024, not 0",
    ("--threads", "1000000"): "threads must be from 1 to 1024, not 1000000",
    ("--dtype", "fp8"): "dtype: must be one of auto, bf16, fp32",
    ("--store", "FILE"): "it is a file; check its permissions, or choose another as store",
    ("--store", BELOW_A_FILE): "Not a directory; check its permissions, or choose another as store",
    ("--store", "/proc/store"): "No such file or directory; check its permissions, or choose another as store",
}
WRONG_SERVER = {
    ("--host", "no.such.host.invalid", "--open"): "choose another --host or --port",
    ("--record", BELOW_A_FILE): "cannot be written: File exists; choose another --record",
    ("--record", "/proc/day"): "cannot be written: No such file or directory; choose another --record",
    ("--record", "FILE"): "does not begin with the header of a recorded day",
}
COMMANDS = {"serve": ["serve", "--port", "0"], "chat": ["chat"], "run": ["run", "router"]}


def refused(arguments: list[str], directory: Path) -> str:
    """The one line of a command that is refused, with code 2."""
    file = directory / "file"
    file.write_text("anybody's\n")
    result = CliRunner().invoke(app, [each.replace("FILE", str(file)) for each in arguments])
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("rekindle: "), result.stderr
    assert len(result.stderr) < 400, result.stderr
    assert file.read_text() == "anybody's\n"
    return result.stderr


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("given", WRONG, ids=" ".join)
def test_what_is_wrong_without_a_model_is_said_before_its_weights_are_read(
    unreadable: Path, tmp_path: Path, given: tuple[str, ...], command: str
) -> None:
    arguments = [*COMMANDS[command], "--model", str(unreadable), "--store", str(tmp_path / "store"), *given]
    assert WRONG[given] in refused(arguments, tmp_path)


@pytest.mark.parametrize("given", WRONG_SERVER, ids=" ".join)
def test_what_a_server_cannot_have_is_said_before_the_weights_are_read(
    unreadable: Path, tmp_path: Path, given: tuple[str, ...]
) -> None:
    arguments = ["serve", "--port", "0", "--model", str(unreadable), "--store", str(tmp_path / "store"), *given]
    assert WRONG_SERVER[given] in refused(arguments, tmp_path)


@pytest.mark.parametrize("given", [("--device", "cuda:77"), ("--store", "FILE")], ids=" ".join)
def test_what_the_servers_of_a_demo_refuse_is_said_in_one_line(
    unreadable: Path, tmp_path: Path, given: tuple[str, str]
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "server.log").write_text("rekindle: what another demo was refused\n")
    assert WRONG[given] in refused(["demo", "--model", str(unreadable), "--store", str(store), *given], tmp_path)


def test_a_transcript_that_cannot_be_written_is_said_before_the_weights_are_read(
    unreadable: Path, tmp_path: Path
) -> None:
    arguments = ["run", "router", "--model", str(unreadable), "--store", str(tmp_path / "store"), "--transcript"]
    assert "--transcript: /proc/day.md cannot be written" in refused([*arguments, "/proc/day.md"], tmp_path)
    assert "--transcript: there is no directory" in refused([*arguments, str(tmp_path / "none" / "day.md")], tmp_path)


def test_weights_beyond_the_memory_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memory(monkeypatch, tmp_path).write_text("1000000\n")
    quiet = ["--log-level", "error"]  # requests of whoever had the port before are no refusal
    said = refused(["serve", "--port", "0", "--store", str(tmp_path / "store"), *quiet], tmp_path)
    assert "cpu has room for 1,000,000: choose a smaller model" in said


@pytest.mark.parametrize("given", [("--hot-bytes", "100"), ("--disk-bytes", "100")], ids=" ".join)
def test_room_for_less_than_a_block_is_refused(tmp_path: Path, given: tuple[str, str]) -> None:
    result = CliRunner().invoke(app, ["chat", "--threads", "1", "--store", str(tmp_path / "store"), *given])
    assert result.exit_code == 2, result.output
    setting = given[0].removeprefix("--").replace("-", "_")
    assert f"{setting}=100 holds less than " in result.stderr and "give at least " in result.stderr


def test_a_server_that_has_ended_logs_no_longer(unreadable: Path, tmp_path: Path) -> None:
    root, ours = logging.getLogger(), logging.getLogger("rekindle")
    before = (root.handlers[:], root.level, ours.level)
    refused(["serve", "--port", "0", "--log-level", "error", "--device", "meta", "--store", str(tmp_path)], tmp_path)
    assert (root.handlers, root.level, ours.level) == before

    stream = io.StringIO()
    with logging_to(ServerSettings(), stream):
        ours.warning("while it serves")
    assert (root.handlers, root.level, ours.level) == before
    stream.seek(0)
    assert stream.read().endswith(" WARNING while it serves\n")


@pytest.mark.parametrize(
    ("error", "code"), [(StoreError("a"), 2), (StoreLocked("a"), 1), (StoreRefused("a"), 1)], ids=repr
)
def test_a_directory_is_for_the_caller_to_change_a_lock_or_a_full_disk_pass(error: StoreError, code: int) -> None:
    def run() -> int:
        raise error

    assert code_of(run) == code


def interruptible(arguments: list[str]) -> subprocess.Popen[str]:
    here = signal.signal(signal.SIGINT, signal.default_int_handler)  # where it is ignored, a child ignores it, too
    try:
        return subprocess.Popen([*REKINDLE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    finally:
        signal.signal(signal.SIGINT, here)


@pytest.mark.parametrize("phase", PHASES)
def test_interrupting_a_server_ends_with_one_line_and_130(phase: str, tmp_path: Path) -> None:
    places, said = PHASES[phase]
    code = f"PLACES = {places!r}\n{INTERRUPTED}"
    arguments = ["serve", "--port", "0", "--threads", "1", "--log-level", "warning", "--store", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    output = [line for line in done.stderr.splitlines() if line and "Loading weights" not in line]
    if places is STOPS:
        assert output == []
        output = [line for line in done.stdout.splitlines() if line.startswith("stopped")]
    assert len(output) == 1 and said in output[0], done.stderr


def test_ctrl_c_after_the_end_changes_nothing() -> None:
    code = f"PLACES = [('threading.py', '_shutdown')]\n{INTERRUPTED}"
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")


def test_interrupting_a_server_says_what_is_saved(tmp_path: Path) -> None:
    process = interruptible(["serve", "--port", "0", "--store", str(tmp_path)])
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("ready"):
                break
        process.send_signal(signal.SIGINT)
        output = process.stdout.read()
        assert process.wait() == 130, output
    finally:
        process.kill()
        process.communicate()
    assert f"are saved in {tmp_path}" in output
    assert "Traceback" not in output


def test_interrupting_a_server_that_loads_its_model(tmp_path: Path) -> None:
    port = free_port()
    process = interruptible(["serve", "--port", str(port), "--store", str(tmp_path)])
    try:
        while process.poll() is None:  # it listens before it loads
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert "nothing is lost" in output or "are saved in" in output
