"""Deleting an agent over HTTP: a refusal has changed nothing, or says what is left, which goes when asked again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rekindle.store.files.sqlite_file import SqliteFile
from tests.engine.test_index_trouble import refused
from tests.server.conftest import Served
from tests.server.scripted import serving, write_scripted_model
from tests.sessions.http.coordinating import create, records_of

ASKED = {"delete": ("DELETE", "/v1/agents/ada"), "purge": ("POST", "/v1/agents/ada/purge")}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    model = write_scripted_model(tmp_path / "model")
    with serving(model=model, store=tmp_path / "store", threads=1, hot_bytes="64MiB") as running:
        yield running


def known(served: Served) -> dict[str, Any]:
    """An agent with a memory, a kept response, and something that it remembers of a session that is over."""
    session = create(served, agents=[{"name": "Ada", "agent": "ada"}, {"name": "Bo"}])
    session.post("/round")
    assert session.send("DELETE").status == 200
    body = {"input": "talk please", "max_output_tokens": 4}
    said: dict[str, Any] = served.send("POST", "/v1/responses", body, x_agent_id="ada").json
    assert said["store"] is True and remembered(served) == 1
    served.engine.flush()
    return said


def remembered(served: Served) -> int:
    """Rows of what agents remember of sessions that are over."""
    with records_of(served).reading() as connection:
        count: int = connection.execute("SELECT COUNT(*) FROM memory WHERE prelude IS NOT NULL").fetchone()[0]
    return count


def of_responses(served: Served) -> SqliteFile:
    assert served.app.responses.records is not None
    return served.app.responses.records


@contextmanager
def refusing(records: SqliteFile, table: str) -> Iterator[None]:
    """Meanwhile nothing can be deleted of a table."""
    with records.reading() as connection:
        connection.execute(
            f"CREATE TEMP TRIGGER refused BEFORE DELETE ON {table} BEGIN SELECT RAISE(ABORT, 'no more today'); END"
        )
    try:
        yield
    finally:
        with records.reading() as connection:
            connection.execute("DROP TRIGGER refused")


def listed(served: Served) -> list[str]:
    return [each["id"] for each in served.send("GET", "/v1/agents").json["data"]]


@pytest.mark.parametrize("verb", ASKED)
def test_what_the_store_refuses_changes_nothing(served: Served, verb: str) -> None:
    said = known(served)
    before = served.send("GET", "/v1/agents/ada").json
    with refused(served.engine, "DELETE ON sequence"):
        answer = served.send(*ASKED[verb])
        assert (answer.status, answer.error["code"]) == (503, "store_unavailable")
        assert f"no more today; {verb} it again" in answer.error["message"]
        assert served.send("GET", f"/v1/responses/{said['id']}").json == said
        assert served.send("GET", "/v1/agents/ada").json == before
        assert served.send("GET", "/v1/agents/ada/why").json["data"] and remembered(served) == 1
    assert served.send(*ASKED[verb]).status == 200
    assert served.send("GET", f"/v1/responses/{said['id']}").status == 404
    assert listed(served) == [] and remembered(served) == 0


REST: dict[str, tuple[Callable[[Served], SqliteFile], str, str]] = {
    "responses": (of_responses, "response", "its stored responses"),
    "sessions": (records_of, "memory", "what it remembers of sessions"),
}


@pytest.mark.parametrize("verb", ASKED)
@pytest.mark.parametrize("rest", REST)
def test_what_is_left_is_said_and_listed_and_goes_when_asked_again(served: Served, rest: str, verb: str) -> None:
    known(served)
    records, table, what = REST[rest]
    with refusing(records(served), table):
        for _ in range(2):
            answer = served.send(*ASKED[verb])
            assert (answer.status, answer.error["code"]) == (503, "store_unavailable")
            assert f"there is left: {what} (" in answer.error["message"] and "no more today" in answer.error["message"]
            assert listed(served) == ["ada"]
            shown = served.send("GET", "/v1/agents/ada").json
            assert (shown["branches"], shown["num_tokens"], shown["hot_tokens"]) == (0, 0, 0)
    assert served.engine.agents() == []
    assert served.send(*ASKED[verb]).status == 200
    assert listed(served) == [] and remembered(served) == 0
    assert served.send(*ASKED[verb]).status == served.send("GET", "/v1/agents/ada").status == 404


def test_responses_of_an_agent_without_a_memory_are_deleted(served: Served) -> None:
    body = {"input": "talk please", "max_output_tokens": 4, "rekindle": {"reuse": "off"}}
    said = served.send("POST", "/v1/responses", body, x_agent_id="ada").json
    assert said["store"] is True and served.engine.agents() == []
    assert served.send("DELETE", "/v1/agents/ada").status == 200
    assert served.send("GET", f"/v1/responses/{said['id']}").status == 404
    assert served.send("DELETE", "/v1/agents/ada").status == 404


def set_aside(store: Path) -> list[Path]:
    """What damaged files leave in a store's directory, with words of their agents."""
    names = "responses.db.damaged", "responses.db.damaged-wal", "responses.db.damaged1", "sessions.db.damaged"
    for name in names:
        (store / name).write_bytes(b"what ada said")
    return [store / name for name in names]


def test_a_purge_removes_what_was_set_aside_of_responses_and_sessions(served: Served, tmp_path: Path) -> None:
    left = set_aside(tmp_path / "store")
    assert served.send(*ASKED["purge"]).status == 404
    known(served)
    assert served.send(*ASKED["delete"]).status == 200
    assert all(path.exists() for path in left)
    known(served)
    left[0].unlink()
    left[0].mkdir()
    answer = served.send(*ASKED["purge"])
    assert answer.status == 503 and "a damaged file that was set aside may hold" in answer.error["message"]
    assert listed(served) == ["ada"]
    left[0].rmdir()
    assert served.send(*ASKED["purge"]).status == 200
    assert not list((tmp_path / "store").glob("*damaged*"))


def test_a_deletion_with_a_parameter_is_refused(served: Served) -> None:
    """`?purge=true` would be believed to have been obeyed."""
    assert served.chat("Hi", agent="eve").status == 200
    answer = served.send("DELETE", "/v1/agents/eve?purge=true")
    assert answer.status == 400 and "/purge" in answer.json["error"]["message"], answer.body
    assert served.send("GET", "/v1/agents/eve").status == 200
    assert served.send("DELETE", "/v1/agents/eve").status == 200
