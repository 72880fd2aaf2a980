"""Turns that come to nothing, as log, metrics and histories see them: with the status a request would have."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from urllib.parse import quote

import pytest

from rekindle import Engine
from rekindle.config import ServerSettings, Settings
from rekindle.errors import Cancelled, Overloaded, PromptTooLong, RekindleError, StoreError, Timeout
from rekindle.server.border import CLIENT_LEFT
from rekindle.server.observers.metrics import Metrics
from rekindle_sessions.http.observed import Figures, observed
from rekindle_sessions.machine.types import Turn
from rekindle_sessions.service.events import SessionEvent, Spoken, of_failure, of_start
from tests.proofs import proved
from tests.server.conftest import serving
from tests.server.test_metrics import samples, value
from tests.sessions.http.coordinating import SESSIONS, Session

FAILURES = "rekindle_failures_total"
TURN = Turn(7, "Ada")


def test_a_turn_that_is_refused_has_the_status_of_a_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flags = {"store": tmp_path, "threads": 1, "hot_bytes": "64MiB", "max_context": 256}
    said = "A brass lamp stands on the third shelf of the pantry. "
    long, nearly = said * 40, said * 11  # the second fits, but not with what is put around it
    body = {"agents": [{"name": "Ada", "persona": nearly}, {"name": "Bo"}], "sampling": {"max_tokens": 4}}
    caplog.set_level(logging.INFO, logger="rekindle.server")
    with proved(Engine(Settings.load(flags))) as engine, serving(engine, ServerSettings()) as served:
        refused = served.chat(long)
        assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
        session = Session(served, served.send("POST", SESSIONS, body).json["id"])
        before = samples(served.send("GET", "/metrics").body)
        caplog.clear()
        run = session.post("/round")
        assert [each["speaker"] for each in run["failed"]] == ["Ada"]
        assert [each["speaker"] for each in run["turns"]] == ["Bo"], "the round goes on"
        after = samples(served.send("GET", "/metrics").body)
        grew = {
            status: value(after, FAILURES, status=status) - value(before, FAILURES, status=status)
            for status in ("400", "500")
        }
        assert grew == {"400": 1, "500": 0}
        agent = session.get()["agents"][0]["agent"]
        (entry,) = served.send("GET", f"/v1/agents/{quote(agent, safe='')}/why").json["data"]
        assert (entry["error"]["status"], entry["error"]["code"]) == (400, "context_length_exceeded")
        assert entry["error"]["message"] == run["failed"][0]["error"] and entry["request"] is not None
        (line,) = [each for each in caplog.records if "failed with" in each.getMessage()]
        assert "turn failed tenant=default" in line.getMessage() and "failed with 400" in line.getMessage()
        assert line.levelno == logging.INFO


def _counted(events: AsyncGenerator[SessionEvent, None]) -> tuple[dict[str, float], RekindleError | None]:
    """How often which status was counted for a run, and what the run raised."""
    metrics = Metrics("toy")

    async def follow() -> RekindleError | None:
        try:
            async for _ in observed(events, metrics, Figures(), "default", "s", is_there=lambda: True):
                pass
        except RekindleError as error:
            return error
        return None

    raised = asyncio.run(follow())
    found = samples(metrics.text())
    return {dict(labels)["status"]: number for (name, labels), number in found.items() if name == FAILURES}, raised


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (PromptTooLong("too long"), "400"),
        (Timeout("too slow"), "503"),
        (Cancelled("interrupted"), str(CLIENT_LEFT)),
    ],
)
def test_a_turn_fails_with_its_own_error(error: RekindleError, status: str) -> None:
    async def run() -> AsyncGenerator[SessionEvent, None]:
        yield of_start(TURN, "s/Ada")
        yield of_failure(TURN, str(error), Spoken("s/Ada", 3, error=error))

    assert _counted(run()) == ({status: 1.0}, None)


@pytest.mark.parametrize("error", [Overloaded("full", retry_after_s=1.0), StoreError("the disk is full")])
def test_a_turn_whose_run_cannot_go_on_fails_for_its_reason(error: RekindleError) -> None:
    async def run() -> AsyncGenerator[SessionEvent, None]:
        yield of_start(TURN, "s/Ada")
        raise error

    assert _counted(run()) == ({"503": 1.0}, error)


def test_a_turn_whose_run_nobody_wants_any_more_is_left() -> None:
    async def run() -> AsyncGenerator[SessionEvent, None]:
        yield of_start(TURN, "s/Ada")

    assert _counted(run()) == ({str(CLIENT_LEFT): 1.0}, None)
