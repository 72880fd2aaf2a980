"""What permanent agents bring into a session, what was to be forgotten, and whose memory is whose."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from rekindle import Engine
from rekindle.errors import BadRequest, NotFound
from rekindle.store.files.keys import StoreKeys
from rekindle_sessions.log.database import SessionRow, SessionTables
from rekindle_sessions.log.records import SessionRecords
from rekindle_sessions.machine.types import Participant, Plan
from rekindle_sessions.service.coordinator import Coordinator
from tests.sessions.service.held import SHORT, SPACE, holding

SECRET = "The treasure lies under the oak."


def _with(identity: str | None) -> Plan:
    return Plan((Participant("Ada", agent=identity), Participant("Ben")), sampling=SHORT)


def _knows(coordinator: Coordinator, id: str) -> bool:
    return SECRET in str(coordinator.registry.found(SPACE, id).machine.context("Ada"))


async def _say(coordinator: Coordinator, id: str, text: str) -> None:
    await coordinator.post_message(SPACE, id, text)


@pytest.mark.parametrize("end", ["goes on", "is deleted", "is deleted first"])
def test_what_was_forgotten_stays_forgotten(engine: Engine, tmp_path: Path, end: str) -> None:
    """One more word in a session that had begun by then, or its end, brings nothing back; a restart does neither."""

    async def before(coordinator: Coordinator) -> None:
        await coordinator.create(SPACE, _with("ada"), id="old")
        await _say(coordinator, "old", SECRET)
        await coordinator.create(SPACE, _with("ada"), id="heir")
        assert _knows(coordinator, "heir")
        if end == "is deleted first":
            await coordinator.delete(SPACE, "old")
        await coordinator.forget(SPACE, "ada")
        for each in ("heir", *(() if end == "is deleted first" else ("old",))):
            await _say(coordinator, each, "One more word.")
            if end == "is deleted":
                await coordinator.delete(SPACE, each)

    async def after(coordinator: Coordinator) -> None:
        await coordinator.create(SPACE, _with("ada"), id="new")
        assert not _knows(coordinator, "new")
        await _say(coordinator, "new", SECRET)
        await coordinator.create(SPACE, _with("ada"), id="newer")
        assert _knows(coordinator, "newer"), "what it learns from then on it keeps"
        await coordinator.delete(SPACE, "new")
        await coordinator.delete(SPACE, "newer")
        await coordinator.create(SPACE, _with("ada"), id="newest")
        assert _knows(coordinator, "newest")

    path = tmp_path / "sessions.db"
    holding(engine, before, path)
    holding(engine, after, path)


def test_nobody_can_be_an_agent_of_a_session_for_good(engine: Engine, tmp_path: Path) -> None:
    async def play(coordinator: Coordinator) -> None:
        await coordinator.create(SPACE, _with("crew/ada"), id="first")
        for identity, name in (("first/Ben", "second"), ("second/Ben", "second"), ("first/", "second")):
            with pytest.raises(BadRequest, match="agent of the session") as caught:
                await coordinator.create(SPACE, _with(identity), id=name)
            assert caught.value.param == "agents[0].agent"
        with pytest.raises(BadRequest, match="choose another id") as caught:
            await coordinator.create(SPACE, _with(None), id="crew")
        assert caught.value.param == "id"
        for identity, name in (("first", "second"), ("firsts/Ben", "third")):
            await coordinator.create(SPACE, _with(identity), id=name)
        await coordinator.create("elsewhere", _with(None), id="crew")

    holding(engine, play, tmp_path / "sessions.db")


@pytest.mark.parametrize("vouches", [True, False])
def test_a_session_whose_rows_say_nothing_is_left_out(
    engine: Engine, tmp_path: Path, vouches: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "sessions.db"

    async def before(coordinator: Coordinator) -> None:
        for each in ("one", "two"):
            await coordinator.create(SPACE, _with("ada"), id=each)
            await _say(coordinator, each, SECRET)

    def damage(records: SessionRecords, vouches: bool) -> None:
        """As another version might have written it, or a damaged disk."""
        table = SessionTables(StoreKeys((tmp_path / "secret").read_bytes(), None)).session
        with records.reading() as connection:
            (row,) = table.rows(connection, "WHERE id = 'one'")
            changed = SessionRow(*row[:8], '{"Ada": {"system": "You are Ada."}}')
            mac = table.mac(changed if vouches else row)
            connection.execute("UPDATE session SET preludes = ?, mac = ? WHERE id = 'one'", (changed.preludes, mac))

    async def after(coordinator: Coordinator) -> None:
        assert [info.id for info in await coordinator.listed(SPACE)] == ["two"]
        assert ("session one of default cannot be read" if vouches else "1 rows of the session file") in caplog.text
        with pytest.raises(NotFound):
            coordinator.show(SPACE, "one")
        await coordinator.create(SPACE, _with("ada"), id="three")
        assert _knows(coordinator, "three")

    holding(engine, before, path)
    with closing(SessionRecords.open(path)) as records:
        damage(records, vouches)
    holding(engine, after, path)
