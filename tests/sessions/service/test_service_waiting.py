"""Sessions where few requests may wait: what listeners take in is in nobody's way, and turns begin together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from threading import Event

import pytest

from rekindle import Engine
from rekindle.engine.types import GenerationRequest
from rekindle.errors import Overloaded
from rekindle.model.params import SamplingParams
from rekindle_sessions.machine.decisions import Question
from rekindle_sessions.machine.types import Topology
from rekindle_sessions.service.coordinator import Coordinator
from rekindle_sessions.service.listeners import MOST_AT_ONCE
from tests.proofs import proved
from tests.sessions.service.held import SPACE, holding, of_kind, plan_of, settings_in, told

MAX_WAITING = 2
CREW = tuple(f"Agent {letter}" for letter in "ABCDEFGH")
HELLO = GenerationRequest(text="Hello!", params=SamplingParams(max_tokens=2))


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[Engine]:
    with proved(Engine(settings_in(tmp_path, max_waiting=MAX_WAITING))) as engine:
        yield engine


@contextmanager
def busy_intake(engine: Engine) -> Iterator[None]:
    """Within this context nothing begins that is asked for."""
    released = Event()
    engine.components.intake.call(released.wait)
    try:
        yield
    finally:
        released.set()


def test_listeners_take_no_place_of_who_asks(narrow: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of(*CREW))
        await coordinator.settle(SPACE, info.id)
        listening = coordinator.registry.found(SPACE, info.id).listening
        async with aclosing(coordinator.turn(SPACE, info.id)) as events:
            with busy_intake(narrow):
                await coordinator.post_message(SPACE, info.id, "It rains.")
                assert len(listening.busy) == MOST_AT_ONCE > MAX_WAITING
                assert (await anext(events)).kind == "turn_start"
                asked, refused = narrow.submit(HELLO), narrow.submit(HELLO)
                with pytest.raises(Overloaded, match="2 requests wait"):  # the turn, and what was asked first
                    await refused.aresult()
            (turn,) = of_kind([event async for event in events], "turn_complete")
        assert turn["speaker"] == CREW[0] and (await asked.aresult()).finish_reason == "length"
        await coordinator.settle(SPACE, info.id)
        assert listening.num_failed == 0 and not listening.pending, "all have taken in what was said"

    holding(narrow, play)


@pytest.mark.parametrize("topology", ["round_robin", "broadcast"])
def test_a_crew_plays_rounds_where_few_may_wait(narrow: Engine, topology: Topology) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of(*CREW, topology=topology))
        for _ in range(2):
            events = await told(coordinator.round(SPACE, info.id))
            assert [each["speaker"] for each in of_kind(events, "turn_complete")] == list(CREW)
        await coordinator.settle(SPACE, info.id)
        assert coordinator.registry.found(SPACE, info.id).listening.num_failed == 0

    holding(narrow, play)


def test_a_crew_votes_where_few_may_wait(narrow: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of(*CREW))
        with busy_intake(narrow):
            events = coordinator.vote(SPACE, info.id, Question("Where?", ("garden", "library")))
            assert (await anext(events)).kind == "message"
        async with aclosing(events):
            (decision,) = of_kind([event async for event in events], "decision")
        assert len(decision["ballots"]) == len(CREW)

    holding(narrow, play)
