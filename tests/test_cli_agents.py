"""agents: over a running server, and on the store of a stopped one."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rekindle import Engine
from rekindle.cli import app
from rekindle.config import RESPONSES_FILE, SESSIONS_FILE, ServerSettings
from rekindle.engine.types import Breakpoint, GenerationRequest
from rekindle.harness.client import Client, free_port
from rekindle.model.params import SamplingParams
from rekindle.server.responses.items import message_item
from rekindle.server.responses.stored import StoredResponse, StoredResponses
from rekindle.text.messages import Message
from rekindle_sessions.log.records import Memory, SessionRecords
from rekindle_sessions.machine.types import Entry, Participant, Plan, Prelude
from tests.forks import ForkedServer

TEXT = "You look after the lighthouse, count the ships that pass, and write down each one's name and its port."
FLAGS = ("--hot-bytes", "64MiB", "--threads", "1")


def run(*arguments: str, **env: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", **env}).invoke(app, ["agents", *arguments])


def said(*arguments: str, **env: str) -> str:
    """The output of a command that succeeds."""
    result = run(*arguments, **env)
    assert result.exit_code == 0, result.output
    return result.stdout


def talk(client: Client, agent: str, turns: int = 1) -> None:
    messages = [{"role": "system", "content": f"{TEXT} You are {agent}."}]
    for number in range(turns):
        messages.append({"role": "user", "content": f"Which ship was number {number}?"})
        reply = client.chat(messages, agent=agent, max_tokens=4)
        messages.append({"role": "assistant", "content": reply.text})


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, dict[str, str]]]:
    """A server, and the variables by which commands find it."""
    folder = tmp_path_factory.mktemp("agents")
    store = folder / "store"
    with ForkedServer(["--store", str(store), *FLAGS], log=folder / "log", server=ServerSettings(port=0)) as server:
        yield server.wait_ready(), {"REKINDLE_PORT": str(server.port), "REKINDLE_STORE": str(store)}


def shown(agent: str, env: dict[str, str]) -> dict[str, Any]:
    info: dict[str, Any] = json.loads(said("show", agent, "--json", **env))
    return info


def test_a_table_of_agents(running: tuple[Client, dict[str, str]]) -> None:
    client, env = running
    talk(client, "ada lovelace/1")
    talk(client, "bo", turns=2)
    table = said(**env).splitlines()
    assert table[0].split() == "AGENT TOKENS SAVED HOT WARM BRANCHES PINNED LAST USED".split()
    rows = [line for line in table[1:] if line]
    assert [row.split("  ")[0] for row in rows] == ["bo", "ada lovelace/1"]
    assert f"{shown('bo', env)['num_tokens']:,}" in rows[0]
    assert {info["id"] for info in json.loads(said("--json", **env))} == {"bo", "ada lovelace/1"}
    assert "ada lovelace/1" in said("show", "ada lovelace/1", **env)
    size = r"[\d.]+ [KM]iB"
    assert re.search(rf"^2 in http\S+; {size} written to disk today, {size} a turn$", run(**env).stderr, re.M)


def test_what_can_be_done_to_an_agent(running: tuple[Client, dict[str, str]]) -> None:
    client, env = running
    talk(client, "cy", turns=2)
    assert "for 8 h" in said("pin", "cy", "--ttl", "8h", **env)
    assert shown("cy", env)["pinned"] and 7.9 < (shown("cy", env)["pinned_until"] - time.time()) / 3600 <= 8
    assert "until 20" in said("show", "cy", **env)
    said("pin", "cy", **env)
    assert shown("cy", env)["pinned"] and shown("cy", env)["pinned_until"] is None
    assert "forever" in said("show", "cy", **env)
    said("unpin", "cy", **env)
    assert not shown("cy", env)["pinned"]
    num_tokens = shown("cy", env)["saved_tokens"]
    assert f"blocks offloaded; {num_tokens:,} of {num_tokens:,} tokens are on disk" in said("offload", "cy", **env)
    assert shown("cy", env)["hot_tokens"] == 0 < shown("cy", env)["warm_tokens"]
    said("fork", "cy", "cy/copy", **env)
    assert shown("cy/copy", env)["num_tokens"] == shown("cy", env)["num_tokens"]
    while (branch := shown("cy/copy", env)["branch_infos"][0])["saved_tokens"] < branch["num_tokens"]:
        time.sleep(0.01)
    tokens = f"{branch['num_tokens']:,}"
    line = next(line for line in said("show", "cy/copy", **env).splitlines() if line.startswith("branch "))
    assert line.endswith(
        f"{tokens} tokens: {branch['saved_tokens']:,} saved, 0 hot, {tokens} warm, {tokens} shared with cy"
    )
    said("rewind", "cy", "--turns", "1", **env)
    assert shown("cy", env)["num_tokens"] < shown("cy/copy", env)["num_tokens"]
    said("delete", "cy", **env)
    result = run("show", "cy", **env)
    assert (result.exit_code, "cy/copy" in result.output) == (2, True)


def test_a_purge_prints_its_proof(running: tuple[Client, dict[str, str]]) -> None:
    client, env = running
    talk(client, "dan", turns=2)
    proof = json.loads(said("purge", "dan", "--json", **env))
    assert proof["slots_freed"] > 0 and proof["bytes_zeroed"] > 0
    talk(client, "dan", turns=2)
    assert "read back as zeros" in said("purge", "dan", **env)
    assert run("show", "dan", **env).exit_code == 2


def test_a_locked_store_without_its_server_says_who_holds_it(running: tuple[Client, dict[str, str]]) -> None:
    _, env = running
    nobody = {**env, "REKINDLE_PORT": str(free_port())}
    for arguments in (["list"], ["purge", "bo"]):
        result = run(*arguments, **nobody)
        assert result.exit_code == 1
        assert "process " in result.output and "is in use by" in result.output and "--url" in result.output


def test_durations_and_unknown_commands_are_refused(running: tuple[Client, dict[str, str]]) -> None:
    _, env = running
    assert "8h" in run("pin", "bo", "--ttl", "soon", **env).output
    assert run("pin", "nobody", **env).exit_code == 2
    assert run("forget", "bo", **env).exit_code == 2
    assert "purge" in run("--help").output


@pytest.fixture
def stopped(tmp_path: Path) -> dict[str, str]:
    """The store of two agents and an unnamed conversation, no server."""
    with Engine.from_pretrained("pocket", store=tmp_path, hot_bytes="64MiB", threads=1) as engine:
        for agent in ("ada", "bo", None):
            engine.chat(agent, [{"role": "user", "content": f"{TEXT} You are {agent or 'nobody'}."}], max_tokens=4)
    return {"REKINDLE_STORE": str(tmp_path), "REKINDLE_PORT": str(free_port())}


def test_a_stopped_store_is_listed(stopped: dict[str, str]) -> None:
    day = {**stopped, "REKINDLE_DISK_WRITES_A_DAY": "1GiB"}
    agents = json.loads(said("--json", **stopped))
    assert [info["id"] for info in agents] == ["bo", "ada"]
    assert all(info["warm_tokens"] == info["num_tokens"] > 20 and info["hot_tokens"] == 0 for info in agents)
    assert [line.split()[0] for line in said(**stopped).splitlines()] == ["AGENT", "bo", "ada"]
    assert re.search(r"^2 in .*; [\d.]+ [KM]iB of 1.0 GiB written to disk today$", run(**day).stderr, re.M)
    assert "ada" in said("show", "ada", **stopped)
    assert run("list", "--url", "http://127.0.0.1:9", **stopped).exit_code == 1  # that server was meant and no store


def test_a_stopped_store_is_purged(stopped: dict[str, str]) -> None:
    result = run("purge", "adda", **stopped)
    assert (result.exit_code, "did you mean ada?" in result.output) == (2, True)
    assert run("purge", "ada", "--namespace", "other", **stopped).exit_code == 2
    assert "read back as zeros" in said("purge", "ada", **stopped)
    assert [info["id"] for info in json.loads(said("--json", **stopped))] == ["bo"]
    with Engine.from_pretrained("pocket", store=stopped["REKINDLE_STORE"], hot_bytes="64MiB", threads=1) as engine:
        assert [info.agent for info in engine.agents()] == ["bo"]
        engine.check()


def test_what_a_purged_agent_said_goes_from_a_stopped_store(stopped: dict[str, str]) -> None:
    store = Path(stopped["REKINDLE_STORE"])
    with closing(StoredResponses(store / RESPONSES_FILE)) as responses:
        responses.start()
        for agent in ("ada", "bo"):
            output = [message_item(f"msg_{agent}", f"{agent} knows where the key is.")]
            response = {"id": f"resp_{agent}", "previous_response_id": None, "output": output}
            responses.keep(StoredResponse("default", agent, response, [])).result(10)
    with closing(SessionRecords.open(store / SESSIONS_FILE)) as sessions:
        plan = Plan((Participant("Ada", agent="ada"), Participant("Bo")))
        number = sessions.create("default", "gone", plan, {}, 1.0)
        prelude = Prelude("", (Entry("heard", "The key is in the attic."),))
        sessions.delete(number, "default", [Memory("ada", 3.0, prelude)])
    (store / f"{RESPONSES_FILE}.damaged").write_text("The key is in the attic.")
    assert run("purge", "adda", **stopped).exit_code == 2 and list(store.glob("*.damaged"))
    assert json.loads(said("purge", "ada", "--json", **stopped))["responses_deleted"] == 1
    contents = [path.read_bytes() for path in store.rglob("*") if path.is_file()]
    assert not any(b"in the attic" in content for content in contents) and not list(store.glob("*.damaged"))
    with closing(StoredResponses(store / RESPONSES_FILE)) as responses:
        responses.start()
        assert responses.find("default", "resp_ada") is None and responses.find("default", "resp_bo") is not None


def test_what_needs_a_server_says_so(stopped: dict[str, str]) -> None:
    for arguments in (["pin", "ada"], ["offload", "ada"], ["fork", "ada", "x"], ["rewind", "ada"], ["delete", "ada"]):
        result = run(*arguments, **stopped)
        assert (result.exit_code, "rekindle serve" in result.output) == (1, True)


def test_no_store_at_all_is_no_error(tmp_path: Path) -> None:
    env = {"REKINDLE_STORE": str(tmp_path / "none"), "REKINDLE_PORT": str(free_port())}
    assert json.loads(said("--json", **env)) == []
    assert not (tmp_path / "none").exists()


def test_what_an_agents_requests_marked_is_purged_from_a_stopped_store(tmp_path: Path) -> None:
    environment = {"REKINDLE_STORE": str(tmp_path), "REKINDLE_PORT": str(free_port())}
    settings = {"store": tmp_path, "hot_bytes": "64MiB", "threads": 1}
    message, marks = Message("user", TEXT * 4), (Breakpoint(0, None, 3600.0),)
    with Engine.from_pretrained("pocket", **settings) as engine:
        for agent in ("ada", "bo"):
            params = SamplingParams(max_tokens=4)
            engine.submit(GenerationRequest((message,), agent=agent, params=params, breakpoints=marks)).result()
        engine.agent("bo").rewind(1)
    for agent in ("ada", "bo"):
        assert "read back as zeros" in said("purge", agent, **environment)
    assert run("purge", "bo", **environment).exit_code == 2
    with Engine.from_pretrained("pocket", **settings) as engine:
        assert (engine.stats().store or {})["num_blocks"] == 0


def test_an_agent_goes_into_a_file_and_out_of_it(running: tuple[Client, dict[str, str]], tmp_path: Path) -> None:
    client, env = running
    talk(client, "eve", turns=2)
    file, closed, key = tmp_path / "eve.agent", tmp_path / "eve.sealed", tmp_path / "key"
    key.write_text("a copper key\n")
    assert re.search(
        r"^eve is in \S+: [\d.]+ \wiB, not encrypted: who has the file can read it$",
        said("export", "eve", str(file), **env),
    )
    sealed = json.loads(said("export", "eve", str(closed), "--passphrase-file", str(key), "--json", **env))
    assert sealed == {"id": "eve", "file": str(closed), "bytes": closed.stat().st_size, "encrypted": True}
    assert TEXT.encode() in file.read_bytes() and TEXT.encode() not in closed.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o600 and sorted(tmp_path.iterdir()) == sorted((file, closed, key))
    was = shown("eve", env)
    count = f"{was['num_tokens']:,}"
    opened = said("import", str(closed), "--passphrase-file", str(key), "--as", "eve/2", **env)
    assert opened == f"eve/2 is imported: {count} tokens, all of them with their KV\n"
    texts = said("import", str(file), "--as", "eve/3", "--texts-only", **env)
    left = "it was left out, as asked; its next turn computes the rest"
    assert texts == f"eve/3 is imported: {count} tokens, 0 of them with their KV: {left}\n"
    said("delete", "eve", **env)
    assert json.loads(said("import", str(file), "--json", **env))["id"] == "eve", "the id is that of the file"
    assert shown("eve", env)["saved_tokens"] == was["num_tokens"]


def test_files_that_cannot_be_used(running: tuple[Client, dict[str, str]], tmp_path: Path) -> None:
    client, env = running
    talk(client, "joe")
    file, key, other = tmp_path / "joe.sealed", tmp_path / "key", tmp_path / "other"
    key.write_text("a copper key")
    other.write_text("a brass key")
    said("export", "joe", str(file), "--passphrase-file", str(key), **env)
    data = file.read_bytes()
    (hurt := tmp_path / "hurt").write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
    (cut := tmp_path / "cut").write_bytes(data[:-1])
    (empty := tmp_path / "empty").write_bytes(b"")
    (session := tmp_path / "session").write_bytes(b"session.json" + bytes(500))
    for arguments, why in (
        (("export", "joe", str(file)), "is there already: remove it, or name another file"),
        (("export", "nobody", str(tmp_path / "new")), "no agent 'nobody'"),
        (("export", "joe", str(tmp_path / "no" / "new")), "cannot be written"),
        (("import", str(file)), "is encrypted: name the file with its passphrase"),
        (
            ("import", str(file), "--passphrase-file", str(other)),
            "the passphrase is another one, or the file was changed",
        ),
        (("import", str(file), "--passphrase-file", str(empty)), "is empty: write the passphrase in it"),
        (("import", str(file), "--passphrase-file", str(key)), "agent 'joe' has a memory already"),
        (("import", str(hurt), "--passphrase-file", str(key), "--as", "new"), "or the file was changed"),
        (("import", str(cut), "--passphrase-file", str(key), "--as", "new"), "it ends too early"),
        (("import", str(key), "--as", "new"), "this is no agent's file"),
        (("import", str(session), "--as", "new"), "it is a session's, so use `rekindle sessions import`"),
        (("import", str(session)), "it is a session's, so use `rekindle sessions import`"),
        (
            ("import", str(key), "--passphrase-file", str(key)),
            "not encrypted as Rekindle does: leave the passphrase out",
        ),
        (("import", str(tmp_path / "none")), "cannot be read"),
    ):
        result = run(*arguments, **env)
        assert result.exit_code and why in " ".join(result.stderr.split()), (arguments, result.stderr)
    assert run("show", "new", **env).exit_code == 2
    assert not list(tmp_path.glob(".*"))
