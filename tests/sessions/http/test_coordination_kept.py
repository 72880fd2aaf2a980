"""Sessions and those who may see them: namespaces, a restart, a stop in mid-turn, agents that are forgotten."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rekindle import Engine
from rekindle.config import ServerSettings, Settings
from tests.proofs import proved
from tests.server.conftest import Served, serving
from tests.sessions.http.coordinating import NAMES, SESSIONS, Session, create, records_of
from tests.sessions.http.test_coordination_streams import LONG, until, wait_for

STORY = "A brass lamp stands on the third shelf of the pantry, beside the jar of nails. " * 8
TENANTS = ServerSettings(api_keys={"left": "key-l", "right": "key-r"}, admin_key="key-a")


@contextmanager
def running(store: Path, settings: ServerSettings | None = None) -> Iterator[Served]:
    flags: dict[str, Any] = {"store": store, "threads": 1, "hot_bytes": "64MiB", "max_chunk_tokens": 64}
    with proved(Engine(Settings.load(flags))) as engine:
        with serving(engine, settings or ServerSettings()) as served:
            yield served
        engine.check()


def test_a_session_of_another_namespace_is_not_there(tmp_path: Path) -> None:
    with running(tmp_path, TENANTS) as served:
        session = create(served, key="key-l")
        session.post("/turn")
        foreign = Session(served, session.id, "key-r")
        for method, path, body in (
            ("GET", "", None),
            ("DELETE", "", None),
            ("POST", "/turn", None),
            ("POST", "/round/stream", None),
            ("POST", "/messages", {"text": "Hi"}),
            ("GET", "/messages", None),
            ("GET", "/events", None),
            ("POST", "/agents/Ada/rewind", None),
        ):
            assert foreign.send(method, path, body).status == 404, f"{method} {path}"
        listed = {key: served.send("GET", SESSIONS, key=key).json["data"] for key in ("key-l", "key-r", "key-a")}
        assert [len(found) for found in listed.values()] == [1, 0, 0]
        assert served.send("GET", SESSIONS).status == 401
        assert served.send("GET", f"{SESSIONS}/{session.id}?namespace=left", key="key-r").status == 403
        assert served.send("GET", f"{SESSIONS}/{session.id}?namespace=left", key="key-a").json["namespace"] == "left"
        assert served.send("GET", f"{SESSIONS}?namespace=*", key="key-a").error["param"] == "namespace"
        assert {each.namespace for each in served.engine.agents()} == {"left"}
        assert session.get()["num_turns"] == 1


def test_sessions_and_their_kv_outlive_a_restart(tmp_path: Path) -> None:
    with running(tmp_path) as served:
        session = create(served, setting=STORY, title="Pantry")
        session.post("/round")
        session.post("/whisper", {"text": "A secret.", "to": "Bo"})
        before, said = session.get(), session.texts()
    with running(tmp_path) as served:
        session = Session(served, session.id)
        assert session.texts() == said
        after = session.get()
        same = set(before) - {"agents", "last_use"}
        assert {name: after[name] for name in same} == {name: before[name] for name in same}
        assert [each["id"] for each in served.send("GET", SESSIONS).json["data"]] == [session.id]
        reports = [turn["rekindle"] for turn in session.post("/round")["turns"]]
        assert all(report["reused_tokens"] > 0.8 * report["prompt_tokens"] for report in reports)
        assert reports[0]["warm_tokens"] > 0, "read from disk"
        assert session.get()["num_rounds"] == before["num_rounds"] + 1


def test_a_turn_that_a_stop_breaks_off_goes_on_after_it(tmp_path: Path) -> None:
    with running(tmp_path) as served:
        session = create(served)
        with session.stream("POST", "/round/stream", {"sampling": LONG}) as told:
            until(told, "token")
            loop = served.server.servers[0].get_loop()
            with session.stream("GET", "/events") as watched:
                loop.call_soon_threadsafe(served.app.gate.close)
                assert list(watched)[-1][1]["code"] == "stopping", "a stop does not wait for who only listens"
            assert until(told, "token")["speaker"] == "Ada", "it waits for who speaks"
            loop.call_soon_threadsafe(served.app.gate.cut)
            kind, data = list(told)[-1]
            assert (kind, data["code"]) == ("error", "stopping")
    with running(tmp_path) as served:
        session = Session(served, session.id)
        left = session.get()
        assert (left["is_unfinished"], left["num_messages"], left["running"]) == (True, 1, [])
        run = session.post("/round")
        assert [turn["speaker"] for turn in run["turns"]] == list(NAMES)
        assert len(session.texts()) == 4


def test_permanent_agents_remember_until_they_are_forgotten(tmp_path: Path) -> None:
    def meet(served: Served) -> dict[str, Any]:
        agents = [{"name": "Ada", "agent": "crew/ada"}, {"name": "Bo", "agent": "crew/bo"}, {"name": "Cy"}]
        session = create(served, agents=agents, opening=STORY)
        turns = {turn["speaker"]: turn["rekindle"] for turn in session.post("/round")["turns"]}
        assert session.send("DELETE").status == 200
        return turns

    with running(tmp_path) as served:
        first = meet(served)
        assert [each.agent for each in served.engine.agents()] in (["crew/bo", "crew/ada"], ["crew/ada", "crew/bo"])
        assert served.send("DELETE", "/v1/agents/crew%2Fbo").status == 200
        second = meet(served)
        assert second["Ada"]["prompt_tokens"] > 1.5 * first["Ada"]["prompt_tokens"], "it goes on with what it remembers"
        assert second["Bo"]["prompt_tokens"] < 1.5 * first["Bo"]["prompt_tokens"], "it was made to forget"
        assert served.send("POST", "/v1/agents/crew%2Fada/purge").status == 200
        third = meet(served)
        assert third["Ada"]["prompt_tokens"] < 1.5 * first["Ada"]["prompt_tokens"]


def test_who_was_in_no_session_is_deleted_without_opening_any(tmp_path: Path) -> None:
    with running(tmp_path) as served:
        assert served.chat("Hello!", agent="ada").status == 200
        assert served.send("DELETE", "/v1/agents/ada").status == 200
        assert not list(tmp_path.glob("sessions.db*"))


def test_an_agent_stays_while_its_memory_cannot_be_forgotten(tmp_path: Path) -> None:
    path, other = tmp_path / "sessions.db", tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 9")
    with running(tmp_path) as served:
        said = served.send("POST", "/v1/responses", {"input": "Hello!", "max_output_tokens": 4}, x_agent_id="ada").json
        refused = served.send("DELETE", "/v1/agents/ada")
        assert (refused.status, refused.error["code"]) == (503, "store_unavailable")
        assert "'ada' is not deleted" in refused.error["message"] and "format 9" in refused.error["message"]
        assert [each.agent for each in served.engine.agents()] == ["ada"]
        assert served.send("GET", f"/v1/responses/{said['id']}").status == 200, "nothing of it is deleted"
        path.rename(other)
        assert served.send("DELETE", "/v1/agents/ada").status == 200
        assert served.engine.agents() == []


def test_a_damaged_session_is_nobodys(tmp_path: Path) -> None:
    with running(tmp_path, TENANTS) as served:
        ids = [create(served, key="key-l").id for _ in range(3)]
        for each in ids:
            assert Session(served, each, "key-l").post("/messages", {"text": "Under the oak."})
    with closing(sqlite3.connect(tmp_path / "sessions.db", isolation_level=None)) as connection:
        connection.execute("UPDATE session SET namespace = 'right' WHERE id = ?", (ids[0],))
        connection.execute(
            "UPDATE event SET body = replace(body, 'oak', 'elm') "
            "WHERE session = (SELECT number FROM session WHERE id = ?)",
            (ids[1],),
        )
    with running(tmp_path, TENANTS) as served:
        listed = {key: served.send("GET", SESSIONS, key=key).json["data"] for key in ("key-l", "key-r")}
        assert [[each["id"] for each in found] for found in listed.values()] == [ids[2:], []]
        for key in listed:
            for each in ids[:2]:
                for method, path in (("GET", ""), ("GET", "/messages"), ("POST", "/turn"), ("DELETE", "")):
                    assert Session(served, each, key).send(method, path).status == 404
        assert create(served, key="key-r").get()["namespace"] == "right"


def test_a_file_that_breaks_while_it_is_used_is_set_aside_by_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    with running(tmp_path) as served:
        ids = [create(served, setting=STORY).id for _ in range(20)]
    with running(tmp_path) as served:
        assert served.send("GET", SESSIONS + "/none").status == 404
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * (path.stat().st_size - 4096))
        with records_of(served).reading() as connection:
            connection.execute("PRAGMA shrink_memory")
        refused = Session(served, ids[0]).send("GET")
        assert (refused.status, refused.error["code"]) == (503, "store_unavailable"), refused.body
        ready = served.send("GET", "/health/ready").json
        assert ready["status"] == "degraded" and "a damaged file is set aside" in ready["problems"][0]
        assert served.chat("Hello!", agent="ada").status == 200
    with running(tmp_path) as served:
        assert served.send("GET", SESSIONS).json["data"] == [] and path.with_name("sessions.db.damaged").exists()
        session = create(served)
        assert served.send("GET", "/health/ready").json["problems"] == []
    with running(tmp_path) as served:
        assert Session(served, session.id).get()["num_turns"] == 0


def test_messages_have_the_figures_of_their_turns(tmp_path: Path) -> None:
    with running(tmp_path) as served:
        session = create(served)
        turns = session.post("/round")["turns"]
        names = ("rekindle", "gap_ms", "first_token_ms", "taken_in_tokens")
        first, *spoken = session.get("/messages")["data"]
        assert {first[name] for name in names} == {None}
        assert [{name: each[name] for name in names} for each in spoken] == [
            {name: turn[name] for name in names} for turn in turns
        ]
    with running(tmp_path) as served:
        spoken = Session(served, session.id).get("/messages")["data"]
        assert {each[name] for each in spoken for name in names} == {None}, "those of this server's time only"


def test_two_servers_over_one_file_get_along(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "rekindle")
    with running(tmp_path) as served:
        session = create(served)
        with serving(served.engine, ServerSettings()) as other:
            answer = other.send("GET", SESSIONS)
            assert (answer.status, answer.error["code"]) == (503, "store_unavailable")
            assert "another process" in answer.error["message"]
            ready = other.send("GET", "/health/ready").json
            assert ready["status"] == "degraded" and ready["problems"][0].startswith("sessions: ")
            assert other.chat("Hello!", agent="ada").status == 200
            assert other.send("DELETE", "/v1/agents/ada").status == 200
            assert "what 'ada' remembers of sessions is not forgotten" in caplog.text
        assert served.send("GET", "/health/ready").json["status"] == "ok"
        assert session.get()["num_turns"] == 0
    assert sum("sessions cannot be had" in record.getMessage() for record in caplog.records) == 1


def test_without_a_store_sessions_last_as_long_as_the_server(tmp_path: Path) -> None:
    settings = Settings.load({"store": "off", "threads": 1, "hot_bytes": "32MiB"})
    with proved(Engine(settings)) as engine, serving(engine, ServerSettings()) as served:
        session = create(served)
        session.post("/turn")
        wait_for(lambda: session.get()["num_messages"] == 2)
        assert not list(tmp_path.iterdir())


def test_a_stream_shows_that_it_lives_while_a_prompt_is_computed(tmp_path: Path) -> None:
    with running(tmp_path, ServerSettings(ping_s=0.02)) as served:
        session = create(served, setting=STORY * 4, listen="later")  # else it is computed before the turn begins
        answer = session.send("POST", "/turn/stream")
        *parts, rest = answer.body.decode().split("\n\n")
        events = [part for part in parts if part != ": waiting"]
        assert len(events) < len(parts) and events[-1].startswith("event: round_complete\n") and not rest
        assert answer.headers["cache-control"] == "no-store"
