"""A server that is killed in the middle of a round: another over the same store goes on with it, warm."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from rekindle.errors import RequestFailed
from rekindle.harness.client import Client, ServerProcess
from rekindle.harness.http import events
from tests.forks import ForkedServer
from tests.sessions.http.coordinating import NAMES, SESSIONS, Event
from tests.sessions.http.test_coordination_kept import STORY
from tests.sessions.http.test_coordination_streams import wait_for

PLAN = {
    "agents": [{"name": name} for name in NAMES],
    "setting": STORY * 3,
    "sampling": {"max_tokens": 24, "min_tokens": 24, "ignore_eos": True, "temperature": 0},
}
LONGER = {"max_tokens": 150, "min_tokens": 150}  # the round is far from its end when it is killed


def post(client: Client, path: str, body: Any = None) -> Any:
    with client.send("POST", SESSIONS + path, body, {}) as response:
        return json.loads(response.read())


def are_saved(client: Client, session: str) -> bool:
    """Whether all that the agents have taken in by now is on disk."""
    entries = [each for each in client.json("GET", "/v1/agents")["data"] if each["id"].startswith(f"{session}/")]
    return len(entries) == len(NAMES) and all(each["saved_tokens"] == each["num_tokens"] for each in entries)


def round_until_killed(server: ServerProcess, client: Client, session: str) -> list[Event]:
    """What was told of a round until its second speaker had begun, and what was still on its way."""
    told: list[Event] = []
    path = f"{SESSIONS}/{session}/round/stream"
    with suppress(RequestFailed), client.send("POST", path, {"sampling": LONGER}, {}) as response:  # it ends somewhere
        for kind, data in events(response):
            told.append((kind, data))
            if kind == "token" and data["speaker"] == NAMES[1]:
                server.kill()
    return told


def test_a_killed_server_loses_nothing_that_was_told(tmp_path: Path) -> None:
    flags, log = ["--store", str(tmp_path / "store"), "--threads", "1", "--hot-bytes", "64MiB"], tmp_path / "log"
    with ForkedServer(flags, log=log) as server:
        client = server.wait_ready()
        session = post(client, "", PLAN)["id"]
        first_round = post(client, f"/{session}/round")["turns"]
        before = [turn["text"] for turn in first_round]
        held = {turn["speaker"]: turn["rekindle"]["prompt_tokens"] for turn in first_round}
        wait_for(lambda: are_saved(client, session))
        told = round_until_killed(server, client, session)
    complete = [data["text"] for kind, data in told if kind == "turn_complete"]
    assert complete and "round_complete" not in dict(told)
    with ForkedServer(flags, log=log) as server:
        client = server.wait_ready()
        shown, found = client.json("GET", f"{SESSIONS}/{session}"), messages(client, session)
        assert (shown["is_unfinished"], shown["num_turns"], shown["running"]) == (True, 6, [])
        assert [each["text"] for each in found[1:]][: 3 + len(complete)] == [*before, *complete], (
            "what was told is there"
        )
        assert len(found) < 7, "it was killed in the middle"
        run = post(client, f"/{session}/round")
        spoken = [(turn["turn"], turn["number"], turn["speaker"]) for turn in run["turns"]]
        assert spoken == [(4, 4, "Ada"), (5, 5, "Bo"), (6, 6, "Cy")][len(found) - 4 :], "what was broken off goes on"
        first = run["turns"][0]["rekindle"]
        assert first["reused_tokens"] >= held[run["turns"][0]["speaker"]], "what was saved; it has heard more since"
        assert first["warm_tokens"] > 0, "read from disk"
        after = messages(client, session)
        assert after[: len(found)] == found
        assert [each["turn"] for each in after] == [None, 1, 2, 3, 4, 5, 6], "each turn once, in order"
        assert [each["number"] for each in after] == list(range(7))
        assert server.stop() == 0


def messages(client: Client, session: str) -> list[dict[str, Any]]:
    """What was said."""
    found: list[dict[str, Any]] = client.json("GET", f"{SESSIONS}/{session}/messages")["data"]
    return found
