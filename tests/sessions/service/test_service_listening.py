"""Who listens: held while a turn begins, behind again after it, and what is known of its tokens."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import closing

from rekindle import Engine
from rekindle.engine.generation import Generation
from rekindle.text.replies import TextDelta
from rekindle_sessions.log.records import SessionRecords
from rekindle_sessions.machine.types import Entry, Turn
from rekindle_sessions.service.coordinator import Coordinator
from rekindle_sessions.service.run import PAUSE_S
from rekindle_sessions.service.turn import OPEN_CHARS, Voice
from tests.sessions.service.held import SPACE, holding, of_kind, plan_of, told

SETTING = "They meet in the garden, as on every evening, and talk about the day. " * 20


def test_turn_that_begins_holds_who_listens(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of(setting=SETTING))
        listening = coordinator.registry.found(SPACE, info.id).listening
        busy = dict(listening.busy)
        assert len(busy) == 3
        listening.hold()
        assert all(each.cancel_asked for each in busy.values()) and list(listening.pending) == list(busy)
        await listening.settle()
        assert not listening.busy and list(listening.pending) == list(busy), "nothing begins meanwhile"
        coordinator.registry.found(SPACE, info.id).catch_up()
        await listening.settle()
        num_tokens = dict(listening.num_tokens)
        assert sorted(num_tokens) == sorted(busy)
        assert all(listening.computed_ever[name] <= num_tokens[name] for name in busy), "nothing is computed twice"
        assert not listening.num_failed

    holding(engine, play)


def test_tokens_are_those_after_a_rewind(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of())
        await coordinator.settle(SPACE, info.id)
        first = coordinator.show(SPACE, info.id).agents["Ada"].num_tokens
        await told(coordinator.round(SPACE, info.id))
        await coordinator.settle(SPACE, info.id)
        before = coordinator.show(SPACE, info.id).agents["Ada"].num_tokens
        assert first is not None and before is not None and before > first
        await coordinator.rewind(SPACE, info.id, "Ada")
        await coordinator.settle(SPACE, info.id)
        assert coordinator.show(SPACE, info.id).agents["Ada"].num_tokens == first

    holding(engine, play)


def test_gap_is_measured_between_rounds_but_for_a_pause(engine: Engine) -> None:
    paused = [0.0]
    looks = itertools.count(1)  # a millisecond passes with each

    async def play() -> None:
        with closing(SessionRecords.open(None)) as records:
            coordinator = Coordinator(engine, records, timer=lambda: next(looks) / 1000 + paused[0])
            await coordinator.start()
            info = await coordinator.create(SPACE, plan_of("Ada", "Ben"))
            gaps = []
            for paused[0] in (0.0, 0.0, 2 * PAUSE_S):
                turns = of_kind(await told(coordinator.round(SPACE, info.id)), "turn_complete")
                gaps.append([each["gap_ms"] for each in turns])
            await coordinator.close()
        assert [[gap is None for gap in each] for each in gaps] == [[True, False], [False, False], [True, False]]
        assert all(gap is None or 0 < gap < 1000 * PAUSE_S for each in gaps for gap in each)

    asyncio.run(play())


def test_what_is_being_said_is_heard_in_scripts_without_blanks(engine: Engine) -> None:
    def heard(text: str) -> Entry | None:
        voice = Voice(Turn(1, "Ada"), Generation(), 0.0, None, 0, time.perf_counter, engine.reply_format)
        voice.reply.take(TextDelta(text))
        return voice.heard_by("Ben", ("Ada", "Ben"))

    assert heard("天") is None
    assert heard("天" * 40) == Entry("heard", "天" * (40 - OPEN_CHARS), "Ada")
    assert heard("We go to the gard") == Entry("heard", "We go to the", "Ada")
