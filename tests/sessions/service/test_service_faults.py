"""Callers who go away, a disk that refuses, a defect in the middle: the session goes on, and so does its file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rekindle import Engine
from rekindle.errors import NotFound, RequestFailed, StoreError, Unavailable
from rekindle_sessions.log.records import SessionRecords
from rekindle_sessions.machine.types import Participant, Plan
from rekindle_sessions.service.coordinator import Coordinator
from rekindle_sessions.service.events import SessionEvent
from rekindle_sessions.service.session import MOST_UNREAD
from tests.engine.dying import Panic, died, poison
from tests.proofs import proved
from tests.sessions.service.held import (
    NAMES,
    SHORT,
    SPACE,
    busy_disk,
    holding,
    of_kind,
    plan_of,
    settings_in,
    told,
    until,
)

REFUSED = "CREATE TRIGGER full BEFORE {} BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"


@contextmanager
def _full_disk(coordinator: Coordinator, what: str = "INSERT ON event") -> Iterator[None]:
    with coordinator.shared.records.reading() as connection:
        connection.execute(REFUSED.format(what))
    try:
        yield
    finally:
        with coordinator.shared.records.reading() as connection:
            connection.execute("DROP TRIGGER full")


def _texts(coordinator: Coordinator, id: str) -> list[str]:
    return [each.text for each in coordinator.messages(SPACE, id)]


def test_what_was_asked_for_is_done_though_the_caller_is_gone(engine: Engine, tmp_path: Path) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of(), id="left")
        session = coordinator.registry.found(SPACE, info.id)
        await told(coordinator.round(SPACE, info.id))
        with busy_disk(coordinator):
            seen = asyncio.create_task(told(coordinator.events(SPACE, info.id)))
            asked = [
                asyncio.create_task(each)
                for each in (
                    coordinator.post_message(SPACE, info.id, "It rains."),
                    coordinator.rewind(SPACE, info.id, "Ada"),
                    coordinator.merge(SPACE, info.id, "Ben", "Ada"),
                    coordinator.fork(SPACE, info.id, "Cleo", "Dan"),
                )
            ]
            await until(lambda: "Dan" in session.machine.participants)
            for each in asked:
                each.cancel()
            await asyncio.wait(asked)
        await told(coordinator.round(SPACE, info.id))
        assert "It rains." in _texts(coordinator, info.id)
        assert [each.name for each in coordinator.show(SPACE, info.id).participants] == [*NAMES, "Dan"]
        await coordinator.delete(SPACE, info.id)
        assert of_kind(await seen, "message")[0]["utterance"]["text"] == "It rains."

    holding(engine, play, tmp_path / "sessions.db")


def test_created_session_is_held_though_the_caller_is_gone(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        with busy_disk(coordinator):
            asked = asyncio.create_task(coordinator.create(SPACE, plan_of(), id="left"))
            await until(lambda: coordinator.registry.creating.locked())
            asked.cancel()
            await asyncio.wait([asked])
        await coordinator.create(SPACE, plan_of(), id="next")
        assert [info.id for info in await coordinator.listed(SPACE)] == ["left", "next"]

    holding(engine, play)


def test_cancelled_write_ends_what_is_played(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"

    async def play(coordinator: Coordinator) -> None:
        await coordinator.create(SPACE, plan_of(), id="cut")
        session = coordinator.registry.found(SPACE, "cut")
        running = coordinator.round(SPACE, "cut", sampling={"max_tokens": 60})  # nobody ends before the disk is busy
        await anext(running)
        with busy_disk(coordinator):
            assert len(session.machine.utterances) == 1
            await until(lambda: len(session.machine.utterances) == 2)
            assert session.journal.last is not None
            session.journal.last.cancel()
            with pytest.raises(StoreError, match="cancelled"):
                async with asyncio.timeout(60):
                    await told(running)
        turns = of_kind(await told(coordinator.round(SPACE, "cut")), "turn_complete")
        assert [each["speaker"] for each in turns] == list(NAMES)

    holding(engine, play, path)
    said = holding(engine, _all_of("cut"), path)
    assert len(said) == 4


def _all_of(id: str) -> Callable[[Coordinator], Awaitable[list[str]]]:
    async def look(coordinator: Coordinator) -> list[str]:
        return _texts(coordinator, id)

    return look


def test_many_go_on_at_once_after_a_failed_write(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"

    async def play(coordinator: Coordinator) -> None:
        await coordinator.create(SPACE, plan_of(), id="full")
        with _full_disk(coordinator), pytest.raises(StoreError, match="the disk is full"):
            await coordinator.post_message(SPACE, "full", "Nobody hears this.")
        assert _texts(coordinator, "full") == ["Let us begin."]
        words = [f"Word {number}." for number in range(5)]
        with busy_disk(coordinator):
            asked = [asyncio.create_task(coordinator.post_message(SPACE, "full", each)) for each in words]
            run = asyncio.create_task(told(coordinator.round(SPACE, "full")))
            await asyncio.sleep(0)
        assert [each.text for each in await asyncio.gather(*asked)] == words
        assert len(of_kind(await run, "turn_complete")) == 3
        assert _texts(coordinator, "full")[1:6] == words

    holding(engine, play, path)
    assert holding(engine, _all_of("full"), path)[1:6] == [f"Word {number}." for number in range(5)]


def test_watcher_who_does_not_keep_up_is_let_go(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of())
        session = coordinator.registry.found(SPACE, info.id)
        slow, quick = session.watch(), session.watch()
        for number in range(2 * MOST_UNREAD):
            session.publish(SessionEvent("token", {"number": number}))
            assert quick.get_nowait() == SessionEvent("token", {"number": number})
        read = [slow.get_nowait() for _ in range(slow.qsize())]
        assert read == [*(SessionEvent("token", {"number": number}) for number in range(MOST_UNREAD)), None]
        assert quick.empty(), "who keeps up goes on"

    holding(engine, play)


@pytest.mark.parametrize("kind", [ZeroDivisionError, Panic])
def test_defect_ends_the_run_and_nothing_else(
    engine: Engine, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    broken = [False]

    def timer() -> float:
        if broken[0]:
            raise kind("no time")
        return time.perf_counter()

    async def play() -> None:
        with closing(SessionRecords.open(None)) as records:
            coordinator = Coordinator(engine, records, timer=timer)
            await coordinator.start()
            info = await coordinator.create(SPACE, plan_of())
            seen = asyncio.create_task(told(coordinator.events(SPACE, info.id)))
            async with aclosing(coordinator.round(SPACE, info.id, sampling={"max_tokens": 60})) as events:
                assert (await anext(events)).kind == "turn_start"  # told late, perhaps, but before Ada is through
                broken[0] = True
                with pytest.raises(RequestFailed, match="no time"):
                    async for _ in events:
                        pass
            broken[0] = False
            assert len(of_kind(await told(coordinator.round(SPACE, info.id)), "turn_complete")) == 3
            await coordinator.close()
            assert ["no time" in each["message"] for each in of_kind(await seen, "error")] == [True]

    asyncio.run(play())
    assert len([each for each in caplog.records if each.exc_info]) == 1


def _with_ada(other: str) -> Plan:
    return Plan((Participant("Ada", agent="ada"), Participant(other)), sampling=SHORT)


def test_session_that_is_being_deleted_takes_nothing_more(engine: Engine, tmp_path: Path) -> None:
    async def play(coordinator: Coordinator) -> None:
        await coordinator.create(SPACE, _with_ada("Ben"), id="first")
        await coordinator.post_message(SPACE, "first", "The treasure lies under the oak.")
        await told(coordinator.round(SPACE, "first"))
        session = coordinator.registry.found(SPACE, "first")
        with busy_disk(coordinator):
            deleting = asyncio.create_task(coordinator.delete(SPACE, "first"))
            await until(lambda: session.closed is not None)
            creating = asyncio.create_task(coordinator.create(SPACE, _with_ada("Cleo"), id="second"))
            await until(lambda: coordinator.registry.creating.locked())
            for attempt in (
                coordinator.post_message(SPACE, "first", "Who is there?"),
                coordinator.delete(SPACE, "first"),
                anext(coordinator.round(SPACE, "first")),
            ):
                with pytest.raises(NotFound):
                    await attempt
            assert await coordinator.listed(SPACE) == []
        await deleting
        await creating
        assert session.listening.is_idle
        assert "under the oak" in str(coordinator.registry.found(SPACE, "second").machine.context("Ada"))
        assert "first/Ben" not in {each.agent for each in engine.agents(SPACE)}

    holding(engine, play, tmp_path / "sessions.db")


def test_who_joins_a_session_that_goes_leaves_nothing(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        await coordinator.create(SPACE, plan_of(), id="goes")
        await told(coordinator.round(SPACE, "goes"))
        forking = asyncio.create_task(coordinator.fork(SPACE, "goes", "Ada", "Dan"))
        deleting = asyncio.create_task(coordinator.delete(SPACE, "goes"))
        with pytest.raises(NotFound, match="no session"):
            await forking
        await deleting
        assert not [each.agent for each in engine.agents(SPACE) if each.agent.startswith("goes/")]

    holding(engine, play)


def test_session_that_cannot_be_deleted_goes_on(engine: Engine, tmp_path: Path) -> None:
    async def play(coordinator: Coordinator) -> None:
        await coordinator.create(SPACE, plan_of(), id="stays")
        await told(coordinator.round(SPACE, "stays"))
        with _full_disk(coordinator, "DELETE ON session"), pytest.raises(StoreError, match="the disk is full"):
            await coordinator.delete(SPACE, "stays")
        assert len(of_kind(await told(coordinator.round(SPACE, "stays")), "turn_complete")) == 3
        await coordinator.delete(SPACE, "stays")

    holding(engine, play, tmp_path / "sessions.db")


def test_fork_that_cannot_be_kept_leaves_nothing(engine: Engine, tmp_path: Path) -> None:
    async def play(coordinator: Coordinator) -> None:
        await coordinator.create(SPACE, plan_of(setting="They talk. " * 40), id="forks")
        await told(coordinator.round(SPACE, "forks"))
        with _full_disk(coordinator), pytest.raises(StoreError, match="the disk is full"):
            await coordinator.fork(SPACE, "forks", "Ada", "Dan")
        assert [each.name for each in coordinator.show(SPACE, "forks").participants] == list(NAMES)
        with pytest.raises(NotFound):
            engine.agent("forks/Dan").info()
        await coordinator.fork(SPACE, "forks", "Ada", "Dan")
        await coordinator.settle(SPACE, "forks")
        (turn,) = of_kind(await told(coordinator.turn(SPACE, "forks", speaker="Dan")), "turn_complete")
        report = turn["rekindle"]
        assert report["source"] == "own" and report["reused_tokens"] > 0.9 * report["prompt_tokens"], report

    holding(engine, play, tmp_path / "sessions.db")


def test_fork_in_the_middle_of_listening(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        await coordinator.create(SPACE, plan_of(), id="busy")
        async with aclosing(coordinator.round(SPACE, "busy")) as events:
            async for event in events:
                if event.kind == "turn_complete" and event.data["speaker"] in ("Ada", "Ben"):
                    await coordinator.fork(SPACE, "busy", event.data["speaker"], f"{event.data['speaker']}'s twin")
        names = [each.name for each in coordinator.show(SPACE, "busy").participants]
        assert names == [*NAMES, "Ada's twin", "Ben's twin"]
        assert coordinator.registry.found(SPACE, "busy").listening.num_failed == 0

    holding(engine, play)


def test_what_is_not_durable_is_not_shown(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        await coordinator.create(SPACE, plan_of(), id="soon")
        session = coordinator.registry.found(SPACE, "soon")
        with busy_disk(coordinator):
            saying = asyncio.create_task(coordinator.post_message(SPACE, "soon", "It rains."))
            forking = asyncio.create_task(coordinator.fork(SPACE, "soon", "Ada", "Dan"))
            await until(lambda: "Dan" in session.machine.participants)
            comparing = asyncio.create_task(coordinator.compare(SPACE, "soon", ("Ada", "Ben")))
            assert len(session.machine.utterances) > 2
            assert _texts(coordinator, "soon") == ["Let us begin."]
            assert [each.number for each in coordinator.messages(SPACE, "soon", hears="Ben")] == [0]
            info = coordinator.show(SPACE, "soon")
            assert (info.num_messages, len(info.participants), list(info.agents)) == (1, 3, list(NAMES))
            assert not comparing.done()
        await asyncio.gather(saying, forking, comparing)
        assert _texts(coordinator, "soon")[1] == "It rains."
        assert len(coordinator.show(SPACE, "soon").participants) == 4

    holding(engine, play)


class PanickingRecords(SessionRecords):
    """Its file panics while it is told to, on the thread that writes."""

    kind: type[BaseException] | None = None

    def append(self, *args: Any) -> None:
        self._panic()
        super().append(*args)

    def forget(self, *args: Any) -> None:
        self._panic()
        super().forget(*args)

    def _panic(self) -> None:
        if self.kind is not None:
            raise self.kind("out of the depths")


@pytest.mark.parametrize("kind", [Panic, SystemExit])
def test_a_panic_on_the_writing_thread_fails_what_was_asked(engine: Engine, kind: type[BaseException]) -> None:
    async def play() -> None:
        with closing(PanickingRecords.open(None)) as records:
            assert isinstance(records, PanickingRecords)
            coordinator = Coordinator(engine, records)
            await coordinator.start()
            info = await coordinator.create(SPACE, plan_of())
            records.kind = kind
            with pytest.raises(StoreError, match="out of the depths"):
                await coordinator.post_message(SPACE, info.id, "Hello!")
            with pytest.raises(RequestFailed, match="out of the depths"):
                await coordinator.forget(SPACE, "ada")
            records.kind = None
            await coordinator.post_message(SPACE, info.id, "Hello again!")
            assert _texts(coordinator, info.id)[-1] == "Hello again!"
            await coordinator.close()

    asyncio.run(play())


def test_turns_that_a_dead_thread_leaves_are_spoken_after_the_restart(tmp_path: Path) -> None:
    settings, path = settings_in(tmp_path / "store"), tmp_path / "sessions.db"

    async def play(coordinator: Coordinator) -> None:
        await coordinator.create(SPACE, plan_of(), id="left")
        with pytest.raises(Unavailable, match="engine thread has ended"):
            async for event in coordinator.round(SPACE, "left", sampling={"max_tokens": 60}):
                if event.kind == "token" and not coordinator.shared.engine.deaths():
                    died(poison(coordinator.shared.engine, "engine"))
        with pytest.raises(Unavailable):
            await told(coordinator.round(SPACE, "left"))

    async def go_on(coordinator: Coordinator) -> None:
        assert coordinator.show(SPACE, "left").is_unfinished
        events = await told(coordinator.round(SPACE, "left"))
        assert len(of_kind(events, "turn_complete")) == 3 and not of_kind(events, "turn_failed")

    with proved(Engine(settings)) as engine, closing(SessionRecords.open(path)) as records:
        coordinator = Coordinator(engine, records)

        async def run() -> None:
            await coordinator.start()
            await play(coordinator)
            await coordinator.close()

        asyncio.run(run())
    with proved(Engine(settings)) as engine:
        holding(engine, go_on, path)
