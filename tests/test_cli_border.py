"""Whatever happens to the command line is one line and an exit code, never a traceback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rekindle.cli.border import code_of

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
EXTRAS = ["typer", "click", "rich", "torch", "transformers", "tokenizers", "yaml", "jinja2", "fastapi", "uvicorn"]
EXTRAS += ["pydantic", "starlette", "platformdirs", "safetensors", "huggingface_hub", "matplotlib"]
ENGINES = [["serve", "--port", "0"], ["chat"], ["run", "router"]]


def without(missing: list[str], arguments: list[str]) -> subprocess.CompletedProcess[str]:
    code = f"MISSING = {missing!r}\n{WITHOUT}"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)


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


def test_a_reader_that_has_left_is_no_defect() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([*REKINDLE, "run"], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
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


def interruptible(arguments: list[str]) -> subprocess.Popen[str]:
    here = signal.signal(signal.SIGINT, signal.default_int_handler)  # where it is ignored, a child ignores it, too
    try:
        return subprocess.Popen([*REKINDLE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    finally:
        signal.signal(signal.SIGINT, here)


def test_interrupting_a_server_says_what_is_saved(tmp_path: Path) -> None:
    process = interruptible(["serve", "--port", "0", "--store", str(tmp_path)])
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("ready"):
                break
        process.send_signal(signal.SIGINT)
        output = process.stdout.read()
        assert process.wait(120) == 130, output
    finally:
        process.kill()
        process.communicate()
    assert f"are saved in {tmp_path}" in output
    assert "Traceback" not in output


def test_interrupting_a_server_that_loads_its_model(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = interruptible(["serve", "--port", str(port), "--store", str(tmp_path)])
    try:
        while process.poll() is None:  # it listens before it loads
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    # Python dies of the signal itself where it came in the middle of an exec: 130, too, as shells count.
    assert process.returncode in (130, -signal.SIGINT), output
    assert "Traceback" not in output
    assert "nothing is lost" in output or "are saved in" in output
