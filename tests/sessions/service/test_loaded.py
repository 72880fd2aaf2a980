"""Sessions that nobody uses are in the file alone, and are as they were when somebody asks for them again."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from rekindle import Engine
from rekindle.errors import NotFound
from rekindle_sessions.log.records import SessionRecords
from rekindle_sessions.machine.types import Participant, Plan
from rekindle_sessions.service.coordinator import Coordinator
from rekindle_sessions.service.loaded import LoadedSessions
from tests.sessions.service.held import SHORT, SPACE, held, of_kind, plan_of, told

NUM_SESSIONS = 12
MOST = 3


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """Within this context only what nobody refers to leaves memory."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def loaded(coordinator: Coordinator) -> LoadedSessions:
    return coordinator.registry.sessions


@pytest.fixture
def path(engine: Engine, tmp_path: Path) -> Path:
    """A file with sessions in which something was said, and one that has an agent of its own."""
    path = tmp_path / "sessions.db"

    async def fill() -> None:
        async with held(engine, path) as coordinator:
            for number in range(NUM_SESSIONS):
                await coordinator.create(SPACE, plan_of("Ada", "Ben", listen="later"), id=f"s{number}")
                await coordinator.post_message(SPACE, f"s{number}", f"This is number {number}.")

    asyncio.run(fill())
    return path


def test_a_start_reads_no_session_and_each_is_read_when_it_is_asked_for(engine: Engine, path: Path) -> None:
    async def run() -> None:
        async with held(engine, path) as coordinator:
            assert (loaded(coordinator).num_held(), loaded(coordinator).live()) == (0, [])
            assert coordinator.messages(SPACE, "s5")[-1].text == "This is number 5."
            assert loaded(coordinator).num_held() == 1
            assert [info.id for info in await coordinator.listed(SPACE)] == [f"s{at}" for at in range(NUM_SESSIONS)]
            with pytest.raises(NotFound):
                await coordinator.fetch(SPACE, "none")
            with pytest.raises(NotFound):
                await coordinator.fetch("other", "s5")

    asyncio.run(run())


def test_what_is_not_used_leaves_memory_and_what_is_busy_stays(engine: Engine, path: Path) -> None:
    async def run() -> None:
        with closing(SessionRecords.open(path)) as records, collected_by_hand():
            coordinator = Coordinator(engine, records)
            few = LoadedSessions(coordinator.shared, most_held=MOST)
            for card in records.cards():
                few.know(card)
            busy = await few.fetch(SPACE, "s0")
            watcher, until = busy.watch(), time.monotonic() + 60
            for number in range(1, NUM_SESSIONS):
                assert (await few.fetch(SPACE, f"s{number}")).machine.utterances[-1].text == f"This is number {number}."
                few.check()
            # a thread that has read a session lets go of it when it is next given time
            while (live := {session.id for session in few.live()}) != {"s0", "s10", "s11"}:
                assert time.monotonic() < until, live
                await asyncio.sleep(0.001)
            assert few.get(SPACE, "s0") is busy
            busy.unwatch(watcher)
            mine = few.get(SPACE, "s4")
            for number in range(5, NUM_SESSIONS):
                few.get(SPACE, f"s{number}")
            assert few.num_held() == MOST
            assert few.get(SPACE, "s4") is mine, "whoever has it and whoever asks have the same"
            together = await asyncio.gather(*(few.fetch(SPACE, "s5") for _ in range(4)))
            assert len(set(map(id, together))) == 1
            few.remove(mine)
            with pytest.raises(NotFound):
                few.get(SPACE, "s4")
            await coordinator.close()

    asyncio.run(run())


def test_sessions_are_held_by_their_bytes_too(engine: Engine, path: Path) -> None:
    async def run() -> None:
        with closing(SessionRecords.open(path)) as records:
            coordinator = Coordinator(engine, records)
            few = LoadedSessions(coordinator.shared, most_held_bytes=2 * max(map(records.usage.size, range(1, 13))))
            for card in records.cards():
                few.know(card)
            for number in range(NUM_SESSIONS):
                few.get(SPACE, f"s{number}")
            assert 1 <= few.num_held() <= 2
            await coordinator.close()

    asyncio.run(run())


def test_a_session_that_left_memory_is_played_as_if_it_had_not(engine: Engine, path: Path) -> None:
    async def run() -> None:
        with collected_by_hand():
            async with held(engine, path) as coordinator:
                loaded(coordinator).most_held = 1
                first = await told(coordinator.round(SPACE, "s1"))
                await coordinator.settle(SPACE, "s1")
                await coordinator.post_message(SPACE, "s2", "Go on.")
                gc.collect()  # a run refers to itself
                assert [each.id for each in loaded(coordinator).live()] == ["s2"]
                second = await told(coordinator.round(SPACE, "s1"))
                said = of_kind(first, "turn_complete") + of_kind(second, "turn_complete")
                assert [each["speaker"] for each in said] == ["Ada", "Ben"] * 2
                info = coordinator.show(SPACE, "s1")
                assert (info.num_rounds, info.num_turns, info.num_messages) == (2, 4, 6)

    asyncio.run(run())


def test_permanent_agents_bring_what_they_have_in_sessions_that_are_not_in_memory(engine: Engine, path: Path) -> None:
    plan = Plan((Participant("Ada", agent="ada"), Participant("Ben")), sampling=SHORT)

    async def run() -> None:
        async with held(engine, path) as coordinator:
            await coordinator.create(SPACE, plan, id="old")
            await coordinator.post_message(SPACE, "old", "The key is in the attic.")
        async with held(engine, path) as coordinator:
            assert loaded(coordinator).num_held() == 0
            await coordinator.create(SPACE, plan, id="new")
            session = await loaded(coordinator).fetch(SPACE, "new")
            assert "in the attic" in str(session.machine.context("Ada"))
            assert {each.id for each in loaded(coordinator).live()} == {"old", "new"}, "and no other one was read"

    asyncio.run(run())
