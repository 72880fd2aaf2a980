"""Somebody leaves, or puts in a word: what was begun goes on from where it stood, or is given up."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from pathlib import Path

import pytest

from rekindle import Engine
from rekindle.engine.generation import Generation
from rekindle.errors import BadRequest, Cancelled, Conflict, NotFound, StoreError
from rekindle_sessions.machine.decisions import Question
from rekindle_sessions.machine.types import Turn, TurnEnded, TurnFailed
from rekindle_sessions.service.coordinator import Coordinator
from rekindle_sessions.service.turn import Voice
from tests.sessions.service.held import NAMES, SPACE, busy_disk, holding, of_kind, plan_of, told, until

LONG = (("max_tokens", 400), ("temperature", 0), ("ignore_eos", True))


async def _until_token(coordinator: Coordinator, id: str, num_tokens: int = 2) -> None:
    """Have a round played, and leave in the middle of its first turn."""
    async with aclosing(coordinator.round(SPACE, id, sampling=dict(LONG))) as events:
        async for event in events:
            num_tokens -= event.kind == "token"
            if num_tokens == 0:
                return


def test_leaving_leaves_the_turn_begun(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of())
        await _until_token(coordinator, info.id)
        left = coordinator.show(SPACE, info.id)
        assert left.is_unfinished and left.running == () and left.num_messages == 1
        assert engine.stats().num_running == 0
        events = await told(coordinator.round(SPACE, info.id))
        turns = of_kind(events, "turn_complete")
        assert [each["speaker"] for each in turns] == list(NAMES)
        assert [each["turn"] for each in turns] == [1, 2, 3]
        fresh = await coordinator.create(SPACE, plan_of())
        expected = of_kind(await told(coordinator.round(SPACE, fresh.id)), "turn_complete")
        assert [each["text"] for each in turns] == [each["text"] for each in expected]

    holding(engine, play)


def test_words_of_a_round_that_was_left_are_told_when_it_goes_on(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of(topology="broadcast"))
        await _until_token(coordinator, info.id, num_tokens=1)
        session = coordinator.registry.found(SPACE, info.id)
        ada, ben, cleo = session.machine.begun()
        session.commit(TurnEnded(ben.number, "We meet at ten."))  # nobody hears it before Ada has spoken
        assert list(session.machine.begun()) == [ada, cleo] and len(session.machine.utterances) == 1
        events = await told(coordinator.round(SPACE, info.id))
        (message,) = [each["utterance"] for each in of_kind(events, "message")]
        assert (message["by"], message["turn"], message["text"]) == ("Ben", ben.number, "We meet at ten.")
        assert [each["speaker"] for each in of_kind(events, "turn_complete")] == ["Ada", "Cleo"]
        kinds = [event.kind for event in events if event.kind not in ("turn_start", "token")]
        assert kinds == ["turn_complete", "message", "turn_complete", "round_complete"], "in the order of the seats"
        assert of_kind(events, "round_complete")[0]["num_turns"] == 2, "figures are those of this run"

    holding(engine, play)


def test_what_is_unfinished_is_gone_on_with_or_dropped(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of())
        await _until_token(coordinator, info.id)
        question = Question("Where?", ("garden", "library"))
        for other in (
            coordinator.round(SPACE, info.id, speakers=("Ben",)),
            coordinator.turn(SPACE, info.id, speaker="Cleo"),
            coordinator.vote(SPACE, info.id, question),
        ):
            with pytest.raises(Conflict, match="under way"):
                await told(other)
        await coordinator.post_message(SPACE, info.id, "Stop.", stop="round")
        assert not coordinator.show(SPACE, info.id).is_unfinished
        events = await told(coordinator.round(SPACE, info.id, speakers=("Ben",)))
        assert [each["speaker"] for each in of_kind(events, "turn_complete")] == ["Ben"]

    holding(engine, play)


def test_unfinished_vote_is_gone_on_with(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of())
        question = Question("Where?", ("garden", "library"))
        async with aclosing(coordinator.vote(SPACE, info.id, question, sampling=dict(LONG))) as events:
            async for event in events:
                if event.kind == "turn_start":
                    break
        assert coordinator.show(SPACE, info.id).is_voting
        with pytest.raises(Conflict, match="a vote is unfinished"):
            await told(coordinator.round(SPACE, info.id))
        resumed = await told(coordinator.vote(SPACE, info.id, None))
        (decision,) = of_kind(resumed, "decision")
        assert len(decision["ballots"]) == 3

    holding(engine, play)


def test_interrupted_turn_ends_there_and_the_next_speaks(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of("Ada", "Ben"))
        events = []
        async with aclosing(coordinator.round(SPACE, info.id, sampling=dict(LONG))) as running:
            async for event in running:
                events.append(event)
                heard = [each["speaker"] for each in of_kind(events, "token")]
                if event.kind == "token" and heard.count(event.data["speaker"]) == 3:
                    await coordinator.post_message(SPACE, info.id, "Enough!", stop="turn")
        turns = of_kind(events, "turn_complete")
        assert [(each["speaker"], each["cut"]) for each in turns] == [("Ada", True), ("Ben", True)]
        assert all(0 < each["num_tokens"] < 400 for each in turns)
        assert len(of_kind(events, "message")) == 2
        assert [each.by for each in coordinator.messages(SPACE, info.id)] == ["Host", "Ada", "Host", "Ben", "Host"]

    holding(engine, play)


def test_who_interrupts_comes_after_who_was_interrupted(engine: Engine, tmp_path: Path) -> None:
    """At once, whatever the disk is at; and whoever begins meanwhile is not cut."""

    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of("Ada", "Ben"), id="cut")
        session = coordinator.registry.found(SPACE, info.id)
        sampling = {**dict(LONG), "max_tokens": 150}  # the first is told when the round is on the disk, which may take
        async with aclosing(coordinator.round(SPACE, info.id, sampling=sampling)) as running:
            async for event in running:
                if event.kind == "token":
                    break
            with busy_disk(coordinator):
                asked = asyncio.create_task(coordinator.post_message(SPACE, info.id, "Enough!", stop="turn"))
                await until(lambda: [turn.speaker for turn in session.machine.begun()] == ["Ben"])
                assert not asked.done()
            assert (await asked).number == 2
            turns = of_kind([event async for event in running], "turn_complete")
        assert [(each["speaker"], each["cut"]) for each in turns] == [("Ada", True), ("Ben", False)]
        assert turns[0]["num_tokens"] < turns[1]["num_tokens"] == 150
        heard = [entry.by for entry in session.machine.context("Ben")]
        assert heard == ["Host", "Ada", "Host", "Ben"], "he heard both before he spoke"

    async def look(coordinator: Coordinator) -> list[str]:
        return [each.by for each in coordinator.messages(SPACE, "cut")]

    path = tmp_path / "sessions.db"
    holding(engine, play, path)
    assert holding(engine, look, path) == ["Host", "Ada", "Host", "Ben"]


def test_words_that_cannot_be_told_cut_nobody(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of())
        async with aclosing(coordinator.round(SPACE, info.id)) as running:
            await anext(running)
            with pytest.raises(NotFound, match="Zed"):
                await coordinator.post_message(SPACE, info.id, "Stop.", to=("Zed",), stop="round")
            with pytest.raises(BadRequest, match="say something"):
                await coordinator.post_message(SPACE, info.id, " ", stop="round")
            with pytest.raises(BadRequest, match="a name"):
                await coordinator.post_message(SPACE, info.id, "Stop.", by=" Zed", stop="turn")
            turns = of_kind([event async for event in running], "turn_complete")
        assert [each["cut"] for each in turns] == [False] * 3

    holding(engine, play)


def test_later_round_is_not_stopped(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of())
        session = coordinator.registry.found(SPACE, info.id)
        running = asyncio.create_task(told(coordinator.round(SPACE, info.id, sampling=dict(LONG))))
        await until(lambda: session.run is not None)
        first = session.run
        assert first is not None

        async def at_once_again() -> list[str]:
            await first.wait()
            turns = of_kind(await told(coordinator.round(SPACE, info.id)), "turn_complete")
            return [each["speaker"] for each in turns if not each["cut"]]

        again = asyncio.create_task(at_once_again())
        await asyncio.sleep(0)  # it waits before the other does
        await coordinator.post_message(SPACE, info.id, "We have to go.", stop="round")
        await running
        assert len(await again) == 3

    holding(engine, play)


def test_interrupted_in_a_vote_that_is_dropped(engine: Engine) -> None:
    """Words that wait for a turn which then has no end are told all the same."""

    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of())
        session = coordinator.registry.found(SPACE, info.id)
        question = Question("Where?", ("garden", "library"))
        voting = asyncio.create_task(told(coordinator.vote(SPACE, info.id, question, sampling=dict(LONG))))
        await until(lambda: session.run is not None)
        said = await asyncio.gather(
            coordinator.post_message(SPACE, info.id, "Wait.", stop="turn"),
            coordinator.post_message(SPACE, info.id, "No vote today.", stop="round"),
        )
        await voting
        numbers = {each.number: each.text for each in coordinator.messages(SPACE, info.id)}
        assert [numbers[each.number] for each in said] == ["Wait.", "No vote today."]
        assert not coordinator.show(SPACE, info.id).is_unfinished

    holding(engine, play)


def test_stopped_round_keeps_what_was_said(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of())
        running = asyncio.create_task(told(coordinator.round(SPACE, info.id, sampling=dict(LONG))))
        async with aclosing(coordinator.events(SPACE, info.id)) as watched:
            async for event in watched:
                if event.kind == "token":
                    break
        said = await coordinator.post_message(SPACE, info.id, "We have to go.", stop="round")
        (turn,) = of_kind(await running, "turn_complete")
        assert turn["cut"] and turn["speaker"] == "Ada" and turn["number"] < said.number
        info = coordinator.show(SPACE, info.id)
        assert not info.is_unfinished and info.num_messages == 3

    holding(engine, play)


def test_deleting_stops_who_speaks(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of(), id="gone")
        running = coordinator.round(SPACE, info.id, sampling=dict(LONG))
        async for event in running:
            if event.kind == "token":
                break
        await coordinator.delete(SPACE, info.id)
        with pytest.raises(Cancelled):
            await told(running)
        with pytest.raises(NotFound):
            engine.agent("gone/Ada").info()

    holding(engine, play)


def test_session_that_cannot_be_written_goes_back_to_what_is_kept(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"

    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of("Ada", "Ben"))
        records = coordinator.shared.records
        full = "CREATE TRIGGER full BEFORE INSERT ON event WHEN NEW.kind = 'TurnEnded' AND NEW.number > 1 BEGIN {} END"
        with records.reading() as connection:
            connection.execute(full.format("SELECT RAISE(ABORT, 'the disk is full');"))
        events = []
        with pytest.raises(StoreError, match="the disk is full"):
            async for event in coordinator.round(SPACE, info.id):
                events.append(event)
        assert [each["speaker"] for each in of_kind(events, "turn_complete")] == ["Ada"]
        with pytest.raises(StoreError, match="the disk is full"):
            await told(coordinator.round(SPACE, info.id))
        with records.reading() as connection:
            connection.execute("DROP TRIGGER full")
        events = await told(coordinator.round(SPACE, info.id))
        assert [each["speaker"] for each in of_kind(events, "turn_complete")] == ["Ben"]
        assert [each.by for each in coordinator.messages(SPACE, info.id)] == ["Host", "Ada", "Ben"]

    holding(engine, play, path)


def test_who_is_cut_before_its_first_word_was_cancelled(engine: Engine) -> None:
    for is_known in (False, True):  # to the engine, which then says how it ended
        voice = Voice(Turn(1, "Ada"), Generation(), 0.0, None, 0, time.perf_counter, engine.reply_format)
        voice.interrupt()
        voice.finish = "cancelled" if is_known else None
        assert isinstance(voice.ended() if is_known else voice.failed(Cancelled("left")), TurnFailed)
        spoken = voice.spoken("session/Ada")
        assert isinstance(spoken.error, Cancelled) and spoken.request == voice.generation.id
