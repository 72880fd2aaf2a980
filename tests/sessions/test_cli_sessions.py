"""sessions export and import: a conversation goes from one server to another, and on there as it would have here."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rekindle.cli import app
from rekindle.cli.remote import Remote
from rekindle.config import ServerSettings
from rekindle.errors import BadRequest, RekindleError
from rekindle_sessions.cli.session_file import verified
from tests.forks import ForkedServer

PATH = "/v1/coordination/sessions"
FLAGS = ("--hot-bytes", "64MiB", "--threads", "1")
SETTING = "Three deckhands of a small harbour tug talk in the galley. The north quay is full, the coal pier is free."
PLAN = {
    "title": "Where to moor",
    "setting": SETTING,
    "opening": "Where do we moor tonight?",
    "agents": [{"name": "Ada", "persona": "You know every berth."}, {"name": "Bo"}, {"name": "Cy", "agent": "crew/cy"}],
    "sampling": {"max_tokens": 8, "temperature": 0},
}
Server = tuple[Remote, dict[str, str]]


def run(*arguments: str, env: dict[str, str]) -> Result:
    return CliRunner(env={"COLUMNS": "200", **env}).invoke(app, ["sessions", *arguments])


def said(*arguments: str, env: dict[str, str]) -> str:
    """The output of a command that succeeds."""
    result = run(*arguments, env=env)
    assert result.exit_code == 0, result.output
    return result.stdout


def server(folder: Path) -> Iterator[Server]:
    store = folder / "store"
    with ForkedServer(["--store", str(store), *FLAGS], log=folder / "log", server=ServerSettings(port=0)) as process:
        process.wait_ready()
        yield (
            Remote(f"http://127.0.0.1:{process.port}", None),
            {"REKINDLE_PORT": str(process.port), "REKINDLE_STORE": str(store)},
        )


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from server(tmp_path_factory.mktemp("here"))


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from server(tmp_path_factory.mktemp("there"))


@pytest.fixture(scope="module")
def session(here: Server) -> str:
    """Two rounds, a whisper, a fork and a rewind."""
    client, _ = here
    created: str = client.ask("POST", PATH, PLAN)["id"]
    path = f"{PATH}/{created}"
    client.ask("POST", f"{path}/round", {})
    client.ask("POST", f"{path}/whisper", {"from": "Harbour master", "to": "Ada", "text": "The barge is free."})
    client.ask("POST", f"{path}/round", {})
    client.ask("POST", f"{path}/agents/Bo/fork", {"target": "Di/2"})
    client.ask("POST", f"{path}/agents/Bo/rewind", {})
    return created


@pytest.fixture(scope="module")
def file(here: Server, session: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("file") / "moor.session"
    assert "of its 4 agents have a memory, not encrypted" in said("export", session, str(file), env=here[1])
    return file


def state(client: Remote, session: str) -> list[Any]:
    """What a session is, but for its ids and times."""
    detail = client.ask("GET", f"{PATH}/{session}")
    kept = (
        "title",
        "topology",
        "names",
        "num_messages",
        "num_rounds",
        "num_turns",
        "is_unfinished",
        "expected",
        "plan",
    )
    messages = client.ask("GET", f"{PATH}/{session}/messages")["data"]
    heard = [client.ask("GET", f"{PATH}/{session}/messages?hears={name}")["data"] for name in ("Ada", "Bo")]
    texts = [[each["text"] for each in found] for found in (messages, *heard)]
    return [{name: detail[name] for name in (*kept, "plan")}, texts]


def known(client: Remote) -> list[str]:
    agents = [each["id"] for each in client.ask("GET", "/v1/agents")["data"]]
    return sorted([*agents, *(each["id"] for each in client.ask("GET", PATH)["data"])])


def test_a_session_goes_on_elsewhere(here: Server, there: Server, session: str, file: Path, tmp_path: Path) -> None:
    (key := tmp_path / "key").write_text("a copper key\n")
    closed = tmp_path / "moor.sealed"
    answer = json.loads(said("export", session, str(closed), "--passphrase-file", str(key), "--json", env=here[1]))
    assert answer["encrypted"] and SETTING.encode() in file.read_bytes() and SETTING.encode() not in closed.read_bytes()

    came = json.loads(said("import", str(closed), "--passphrase-file", str(key), "--json", env=there[1]))
    assert len(came["agents"]) == answer["agents"] >= 3 and came["kept"] == []
    assert all(each["kv_tokens"] == each["num_tokens"] > 64 for each in came["agents"])
    assert {each["id"].partition("/")[0] for each in came["agents"]} == {came["id"], "crew"}
    assert state(there[0], came["id"]) == state(here[0], session)

    again = json.loads(said("import", str(file), "--as", "moor-2", "--texts-only", "--json", env=there[1]))
    assert again["kept"] == ["crew/cy"], "it has a memory there already"
    assert all(each["kv_tokens"] == 0 and "as asked" in each["without_kv"] for each in again["agents"])
    turns = [
        client.ask("POST", f"{PATH}/{name}/turn", {"speaker": "Ada"})["turns"][0]
        for client, name in ((here[0], session), (there[0], came["id"]), (there[0], "moor-2"))
    ]
    assert len({turn["text"] for turn in turns}) == 1
    reports = [turn["rekindle"] for turn in turns]
    assert reports[1]["computed_tokens"] <= reports[0]["computed_tokens"] + 64 < reports[0]["prompt_tokens"]
    listed = said("list", env=there[1])
    assert "moor-2" in listed and "Where to moor" in listed


def test_files_that_are_refused_change_nothing(there: Server, file: Path, tmp_path: Path) -> None:
    client, env = there
    before, data, random = known(client), file.read_bytes(), Random(0)
    (odd := tmp_path / "odd.session").touch()

    def refusal(data: bytes) -> str:
        odd.write_bytes(data)
        result = run("import", str(odd), env=env)
        assert result.exit_code == 2 and known(client) == before, result.output
        return " ".join(result.stderr.split())

    with tarfile.open(file) as archive:
        found = [(each.name, each.size, each.offset_data) for each in archive]
    for name, size, start in found:
        for place in random.sample(range(size), 2):
            flipped = bytearray(data)
            flipped[start + place] ^= 1 << random.randrange(8)
            assert "and nothing has changed" in refusal(bytes(flipped)), (name, place)
    for end in (0, 100, found[0][2], found[1][2] - 512, found[1][2] + 100, found[-1][2] - 512, found[-1][2] + 3):
        assert "and nothing has changed" in refusal(data[:end]), end
    assert "is encrypted" in refusal(b"RKSEALED" + data)
    assert "it is an agent's file, so use `rekindle agents import`" in refusal(b"RKAGENT\n" + data)


def test_an_id_that_is_taken_is_refused(here: Server, session: str, file: Path) -> None:
    result = run("import", str(file), "--as", session, env=here[1])
    assert result.exit_code == 2 and f"there is a session '{session}' already" in result.stderr


def repacked(file: Path, target: Path, *, without: str = "", also: str = "", document: Any = None) -> Path:
    """The same archive with other parts, and digests of those."""
    with tarfile.open(file) as archive:
        parts = {each.name: archive.extractfile(each).read() for each in archive if archive.extractfile(each)}
    parts = {name: data for name, data in parts.items() if name not in ("SHA256SUMS", without)}
    if also:
        parts[also] = b"more"
    if document is not None:
        contents = json.loads(parts["session.json"])
        contents["session"] |= document
        parts["session.json"] = json.dumps(contents).encode()
    parts["SHA256SUMS"] = "".join(f"{sha256(data).hexdigest()}  {name}\n" for name, data in parts.items()).encode()
    with tarfile.open(target, "w") as archive:
        for name, data in parts.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, BytesIO(data))
    return target


@pytest.mark.parametrize("change", [{"without": "agents/3.agent"}, {"without": "session.json"}, {"also": "more"}])
def test_files_that_lack_a_part_or_have_one_too_many(
    there: Server, file: Path, tmp_path: Path, change: dict[str, str]
) -> None:
    client, env = there
    before = known(client)
    result = run("import", str(repacked(file, tmp_path / "odd", **change)), env=env)
    assert result.exit_code == 2 and "and nothing has changed" in result.stderr, result.output
    assert known(client) == before


def test_a_file_that_is_mostly_holes_is_refused_unread() -> None:
    """A sparse file in a few hundred bytes of an archive says that it has a terabyte."""
    sparse = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "session.json"}
    info, packed = tarfile.TarInfo("session.json"), BytesIO()
    info.pax_headers, info.size = {**sparse, "GNU.sparse.realsize": str(1 << 40)}, 512
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(info, BytesIO(b"0\n".ljust(512, b"\0")))
    packed.seek(0)
    with pytest.raises(BadRequest, match=r"'session\.json' in it is no file"):
        verified(packed)


def test_agents_of_a_session_that_is_refused_are_deleted_again(there: Server, file: Path, tmp_path: Path) -> None:
    client, env = there
    before = known(client)
    odd = repacked(file, tmp_path / "odd", document={"events": [{"kind": "Exploded", "body": {}}]})
    result = run("import", str(odd), env=env)
    assert result.exit_code == 1 and "'Exploded' is no kind of event" in result.stderr, result.output
    assert known(client) == before


def test_an_imported_session_survives_a_restart(here: Server, session: str, tmp_path: Path) -> None:
    document = here[0].ask("GET", f"{PATH}/{session}/export")
    for _ in range(2):
        for client, _ in server(tmp_path):
            if known(client) == []:
                client.ask("POST", f"{PATH}/import", {"session": document, "id": "moor"})
            found = state(client, "moor")
    assert found == state(here[0], session)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 2}, "it is of version 2, and this Rekindle reads 1"),
        ({"plan": {}}, "participants"),
        ({"plan": None}, "Input should be"),
        ({"events": [{"kind": "Exploded", "body": {}}]}, "'Exploded' is no kind of event"),
        ({"events": [{"kind": "Told", "body": {"by": "Host", "text": 7}}]}, "text"),
        ({"events": [{"kind": "Told", "body": {"by": "Host", "text": "a", "to": ["Zed"]}}]}, "event 0 does not fit"),
        ({"events": [{"kind": "TurnEnded", "body": {"turn": 9, "text": "a"}}]}, "event 0 does not fit"),
        ({"events": [7]}, "of another kind"),
        ({"events": [{}]}, "a part of it is missing"),
        ({"preludes": {"Ada": {"system": 1, "entries": []}}}, "system"),
    ],
)
def test_documents_that_do_not_fit_are_refused(here: Server, session: str, change: dict[str, Any], why: str) -> None:
    client, _ = here
    before, document = known(client), client.ask("GET", f"{PATH}/{session}/export")
    with pytest.raises(RekindleError, match="is not imported, and nothing has changed") as refused:
        client.ask("POST", f"{PATH}/import", {"session": {**document, **change}})
    assert why in str(refused.value)
    assert known(client) == before
