"""Servers in slots of one store: each has sessions, all have the responses, and nobody learns the secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi.routing import APIRoute

from rekindle.config import Settings
from rekindle.server.serve import banner
from tests.server.scripted import serving, write_scripted_model

SECRET = "seventeen letters"
SESSIONS = "/v1/coordination/sessions"
PLAN = {"agents": [{"name": "Ada"}, {"name": "Ben"}]}


def test_two_servers_on_one_store(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"model": write_scripted_model(tmp_path / "model"), "store": tmp_path / "store"}
    flags |= {"threads": 1, "hot_bytes": "64MiB", "slot": "auto", "secret": SECRET}
    with serving(**flags) as first, serving(**flags) as second:
        assert [each.send("GET", "/health/ready").json["slot"] for each in (first, second)] == [0, 1]
        shown = banner(second.engine, Settings.load(flags), second.url)
        assert f"in {tmp_path / 'store' / 'slot-1'}" in shown and SECRET not in shown
        body = {"input": "talk please", "max_output_tokens": 4}
        stored = first.send("POST", "/v1/responses", body).json
        assert second.send("GET", f"/v1/responses/{stored['id']}").json == stored
        again = second.send("POST", "/v1/responses", {**body, "previous_response_id": stored["id"]})
        assert again.status == 200, again.body
        created = [each.send("POST", SESSIONS, PLAN).json["id"] for each in (first, second)]
        assert first.send("GET", SESSIONS).json["data"][0]["id"] == created[0] != created[1]
        for route in first.app.routes:
            if isinstance(route, APIRoute) and "GET" in route.methods and "{" not in route.path:
                assert SECRET.encode() not in first.send("GET", route.path).body, route.path
    with serving(**flags) as heir:
        assert [each["id"] for each in heir.send("GET", SESSIONS).json["data"]] == [created[0]]


def test_a_slot_is_for_those_with_a_key(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"model": write_scripted_model(tmp_path / "model"), "store": tmp_path / "store"}
    with serving(threads=1, hot_bytes="64MiB", slot=7, api_key="key-of-a-caller", **flags) as served:
        assert served.send("GET", "/health/ready").json == {"status": "ok", "problems": []}
        assert served.send("GET", "/health/ready", key="key-of-a-caller").json["slot"] == 7
