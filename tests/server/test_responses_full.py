"""What a disk that is busy, full or refuses means for kept responses: it is waited for, or it is said in the answer."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.conftest import Served
from tests.server.scripted import serving, write_scripted_model
from tests.store.confined import limit_files, run_apart


def on_a_full_disk(directory: Path) -> None:
    """The files of this process may not grow while a response is to be deleted."""
    model = write_scripted_model(directory / "model")
    with serving(model=model, store=directory / "store", threads=1, hot_bytes="64MiB") as served:
        responses = served.client().responses
        name = responses.create(model="default", input="talk please", max_output_tokens=4).id
        assert served.app.responses.flush()
        limit_files(1)
        answer = served.send("DELETE", f"/v1/responses/{name}")
        with pytest.raises(openai.InternalServerError) as caught:
            responses.delete(name)
        assert responses.retrieve(name).id == name
        limit_files(None)
        assert answer.status == caught.value.status_code == 503
        error = answer.error
        assert (error["type"], error["code"]) == ("server_error", "store_unavailable")
        assert name in error["message"] and "make room" in error["message"], error
        responses.delete(name)
        assert served.send("GET", f"/v1/responses/{name}").status == 404


def test_a_response_is_not_deleted_on_a_full_disk_and_that_is_said(tmp_path: Path) -> None:
    run_apart(on_a_full_disk, tmp_path)


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[tuple[Served, sqlite3.Connection]]:
    """A server, and another connection to its file of responses."""
    model = write_scripted_model(tmp_path / "model")
    with (
        serving(model=model, store=tmp_path / "store", threads=1, hot_bytes="64MiB") as served,
        closing(sqlite3.connect(tmp_path / "store" / "responses.db", isolation_level=None)) as other,
    ):
        yield served, other


def asked(served: Served, **more: Any) -> dict[str, Any]:
    """The response object of an answer, whole or from the last event of a stream."""
    answer = served.send("POST", "/v1/responses", {"input": "talk please", "max_output_tokens": 4, **more})
    assert answer.status == 200, answer.body
    if more.get("stream"):
        last = answer.body.decode().strip().rpartition("data: ")[2]
        found: dict[str, Any] = json.loads(last)["response"]
        return found
    return dict(answer.json)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_end_of_an_answer_waits_until_the_response_is_durable(
    scripted: tuple[Served, sqlite3.Connection], stream: bool
) -> None:
    served, other = scripted
    other.execute("BEGIN IMMEDIATE")
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(asked(served, stream=stream)))
    thread.start()
    while served.engine.stats().prompt_tokens == 0:
        pass
    served.until_idle()
    assert asked(served, store=False)["store"] is False  # one that is not kept waits for nobody
    assert answers == [], "it was answered before it was written"
    other.execute("COMMIT")
    thread.join()
    (answer,) = answers
    assert answer["store"] is True and "not_stored" not in answer["rekindle"]
    assert other.execute("SELECT id FROM response").fetchall() == [(answer["id"],)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_response_that_a_disk_refuses_says_so(scripted: tuple[Served, sqlite3.Connection], stream: bool) -> None:
    served, other = scripted
    other.execute("CREATE TRIGGER full BEFORE INSERT ON response BEGIN SELECT RAISE(FAIL, 'disk is full'); END")
    first = asked(served, stream=stream)
    assert first["store"] is False
    assert "disk is full" in first["rekindle"]["not_stored"]
    health = served.send("GET", "/health/ready").json
    assert health["status"] == "degraded" and "disk is full" in health["problems"][0]
    # It is in memory while that has room, so that the conversation goes on.
    second = asked(served, stream=stream, previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"] and second["store"] is False
    other.execute("DROP TRIGGER full")
    third = asked(served, stream=stream, previous_response_id=second["id"])
    assert third["store"] is True and "not_stored" not in third["rekindle"]
    assert served.send("GET", "/health/ready").json["status"] == "ok"
    written = {name for (name,) in other.execute("SELECT id FROM response")}
    assert written == {each["id"] for each in (first, second, third)}
    assert served.send("GET", f"/v1/responses/{first['id']}").json["status"] == first["status"]
