"""chat and run on the running server that has the store: at once, without torch, with the output of an engine here."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rekindle.cli import app
from rekindle.cli.chat import RemoteTalker
from rekindle.cli.remote import Remote, find_server
from rekindle.config import ServerSettings, Settings
from rekindle.errors import RequestFailed
from rekindle.harness.client import ServerProcess, free_port
from rekindle.store.files.directory import StoreDirectory
from rekindle.store.files.sync import OsFileSystem
from tests.forks import ForkedServer

ROOT = Path(__file__).parents[1]
# What loads models cannot be imported by the command.
WITHOUT_TORCH = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from rekindle.cli import main
main()
"""
SMALL = ("--threads", "1", "--hot-bytes", "64MiB")
SCENE = """\
name: trio
title: A trio
about: Three who know one thing.
sampling: {max_tokens: 8, temperature: 0}
opening: Good morning.
agents:
  - {name: Ada, knows: The copper key is in the attic.}
  - {name: Bo}
  - {name: Cy}
phases:
  - name: talk
    agents: [Ada, Bo]
    say: Where is the copper key?
    ask: [{to: Ada, text: 'What do you know?', private: true}]
    rounds: 1
  - {name: hints, topology: whisper, whisper: [{from: Ada, to: Bo, text: psst}], rounds: 1}
  - name: vote
    decide: {question: 'Where is the copper key?', options: [attic, cellar], mode: ranked}
  - name: play
    agents: [Ada, Bo]
    game:
      question: What do you do?
      moves: [stay, go]
      payoffs: {stay: {stay: [1, 1], go: [0, 2]}, go: {stay: [2, 0], go: [0, 0]}}
outcome:
  - text: Ada has {{ scores.Ada }}, and {{ decisions.vote.outcome }} was chosen.
"""


class House:
    """A server with a key, and the environment of a user of the machine."""

    def __init__(self, folder: Path, server: ServerProcess) -> None:
        self.folder, self.server = folder, server
        self.url = f"http://127.0.0.1:{server.port}"
        self.flags = ("--store", str(folder / "store"))

    def environment(self, **given: str) -> dict[str, str]:
        path = f"{ROOT / 'src'}:{ROOT / 'pocket' / 'src'}"
        variables = {"REKINDLE_PORT": str(self.server.port), "REKINDLE_API_KEY": "k", "COLUMNS": "200"}
        whole = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **variables, **given}
        return {name: value for name, value in whole.items() if value}

    def start(self, *arguments: str, **given: str) -> subprocess.Popen[str]:
        """The command without torch; ctrl-C reaches it as in a terminal."""
        here = signal.signal(signal.SIGINT, signal.default_int_handler)  # where it is ignored, a child ignores it, too
        pipe = subprocess.PIPE
        try:
            return subprocess.Popen(
                [sys.executable, "-c", WITHOUT_TORCH, *arguments],
                env=self.environment(**given), stdin=pipe, stdout=pipe, stderr=pipe, text=True,
            )  # fmt: skip
        finally:
            signal.signal(signal.SIGINT, here)

    def run(self, *arguments: str, said: str = "", **given: str) -> tuple[int, str, str]:
        """Exit code, output, errors."""
        process = self.start(*arguments, **given)
        out, errors = process.communicate(said)
        return process.returncode, out, errors


def invoked(*arguments: str, **variables: str) -> Result:
    """The command in this process, where torch is loaded."""
    return CliRunner(env={"COLUMNS": "200", **variables}).invoke(app, arguments)


def served(folder: Path) -> Iterator[House]:
    flags = ["--store", str(folder / "store"), *SMALL]
    with ForkedServer(flags, log=folder / "log", server=ServerSettings(port=0, api_key="k")) as server:
        server.wait_ready()
        yield House(folder, server)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    yield from served(tmp_path_factory.mktemp("house"))


@pytest.fixture
def scene(tmp_path: Path) -> Path:
    path = tmp_path / "trio.yaml"
    path.write_text(SCENE)
    return path


def test_a_chat_is_with_the_agent_of_the_server_and_shows_what_was_reused(house: House) -> None:
    said = "Remember that the copper key is in the attic.\n\nWhere is the copper key?\n/quit\nnot said\n"
    code, out, errors = house.run("chat", *house.flags, "--agent", "ann/ü", said=said)
    assert (code, errors) == (0, "")
    assert out.startswith(f"pocket on {house.url} (/quit ends the chat)\n")
    first, second = re.findall(r"^(\w+), (\d+) of (\d+) reused$", out, re.MULTILINE)
    assert first[:2] == ("miss", "0") and int(second[1]) > int(first[2])
    assert out.count("model ") == 2
    code, out, _ = house.run("chat", "--url", house.url, "--agent", "ann/ü", said=said)
    assert re.findall(r"^(\w+), (\d+) of \d+ reused$", out, re.MULTILINE)[0][0] != "miss"


def test_a_scene_reads_as_one_that_is_played_here(house: House, scene: Path, tmp_path: Path) -> None:
    remote, local = tmp_path / "remote.md", tmp_path / "local.md"
    code, out, errors = house.run("run", str(scene), "--plain", *house.flags, "--transcript", str(remote))
    assert (code, errors) == (0, ""), errors
    own = ["run", str(scene), "--plain", "--store", "off", *SMALL, "--transcript", str(local)]
    here = subprocess.run(
        [sys.executable, "-m", "rekindle.cli", *own],
        env=house.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert _words(out) == _words(here.stdout)
    assert _words(remote.read_text()) == _words(local.read_text())
    assert "Ada: psst" in out.replace(" (whispers to Bo)", "") and "Ada votes: " in out and "→ moves: " in out
    assert Remote(house.url, "k").ask("GET", "/v1/coordination/sessions")["data"] == []


def _words(text: str) -> list[str]:
    """The lines without figures: times differ, and what the agents of a used server share."""
    return [line for line in text.splitlines() if not re.search(r"tokens|<sub>", line)]


def test_a_scene_that_is_interrupted_stays_on_the_server(house: House, scene: Path) -> None:
    scene.write_text(SCENE.replace("    rounds: 1\n  - {name: hints", "    rounds: 900\n  - {name: hints"))
    process = house.start("run", str(scene), "--plain", *house.flags)
    assert process.stdout is not None
    next(line for line in process.stdout if line.startswith("Bo (to Ada, Bo): "))
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate()
    assert (process.returncode, errors) == (130, "")
    server = Remote(house.url, "k")
    (left,) = server.ask("GET", "/v1/coordination/sessions")["data"]
    assert f"saved as session {left['id']}" in out and f"the server at {house.url} can resume it" in out
    server.ask("DELETE", f"/v1/coordination/sessions/{left['id']}")


@pytest.mark.parametrize("command", [["chat"], ["run", "router"]], ids=" ".join)
def test_what_a_server_refuses_is_one_line(house: House, command: list[str]) -> None:
    port, key, nobody = str(house.server.port), {"REKINDLE_API_KEY": "k"}, f"http://127.0.0.1:{free_port()}"
    cases = (
        (["--store", str(house.folder / "store")], {}, 2, "(the key is read from REKINDLE_API_KEY)"),
        ([*house.flags, "--kv", "bf16", "--threads", "1"], key, 2, "--kv, --threads: the server at"),
        (["--url", house.url, "--store", "other"], key, 2, "--store: the server at"),
        (["--url", house.url, "--model", "none/such"], key, 2, "'none/such' is not served here; 'pocket' is"),
        (["--url", nobody], key, 1, f"no server answers at {nobody}"),
    )
    for flags, variables, code, said in cases:
        result = invoked(*command, *flags, REKINDLE_PORT=port, **variables)
        assert (result.exit_code, result.stderr.count("\n")) == (code, 1), result.output
        assert said in result.stderr


def test_a_server_without_the_store_or_the_model_is_left_alone(house: House, tmp_path: Path) -> None:
    def found(**given: object) -> object:
        settings = Settings.load({"store": house.folder / "store", "port": house.server.port, "api_key": "k", **given})
        return find_server(settings, (), None)

    assert found() is not None and found(model="pocket") is not None
    assert found(model="smollm2") is None
    assert found(model="none/such") is None
    assert found(store="off") is None
    assert found(store=tmp_path / "other") is None
    assert found(port=free_port()) is None


def test_a_store_that_another_process_has_open_is_not_taken_for_this_servers(house: House, tmp_path: Path) -> None:
    other = StoreDirectory.claim(tmp_path, bytes(32), OsFileSystem())
    try:
        settings = {"store": tmp_path, "port": house.server.port, "api_key": "k"}
        assert find_server(Settings.load(settings), (), None) is None
        said = invoked("chat", "--store", str(tmp_path), "--model", "/none", REKINDLE_PORT=str(free_port()))
        assert f"process {os.getpid()} has a store in {tmp_path} open: if that is a server at another" in said.stderr
        assert "/none: there is no such directory" in said.stderr
    finally:
        other.release()


def test_a_server_that_is_gone_between_two_replies_is_said(tmp_path: Path) -> None:
    for house in served(tmp_path):
        process = house.start("chat", *house.flags)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("Hello!\n")
        process.stdin.flush()
        next(line for line in process.stdout if line.endswith("reused\n"))
        house.server.kill()
        _, errors = process.communicate("Where is the copper key?\n")
        assert (process.returncode, errors.count("\n")) == (1, 1), errors
        assert f"rekindle: no server answers at {house.url}" in errors


def test_a_reply_that_breaks_off_is_an_error() -> None:
    chunk = b'data: {"choices": [{"delta": {"content": "At the"}}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(head + f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        server = Remote(f"http://127.0.0.1:{listener.getsockname()[1]}", None)
        talker = RemoteTalker(server, {"id": "m", "rekindle": {"sampling": {}}}, "me")
        pieces = talker.reply([{"role": "user", "content": "Where?"}])
        assert [next(pieces).text, next(pieces).text] == ["", "At the"]
        with pytest.raises(RequestFailed, match="went away in the middle of its answer"):
            list(pieces)
        thread.join()
