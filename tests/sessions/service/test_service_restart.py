"""What is there after a restart, after a session was deleted, and in the next session of a permanent agent."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

import pytest

from rekindle import Engine
from rekindle.errors import NotFound
from rekindle_sessions.machine.types import Participant, Plan
from rekindle_sessions.service.coordinator import Coordinator
from tests.proofs import proved
from tests.sessions.service.held import NAMES, SHORT, SPACE, holding, of_kind, plan_of, settings_in, stored_texts, told

SETTING = "They meet in the garden, as on every evening, and talk about the day. " * 10


def test_session_goes_on_warm_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"

    async def before(coordinator: Coordinator) -> list[str]:
        await coordinator.create(SPACE, plan_of(setting=SETTING, title="Evening"), id="evening")
        for _ in range(2):
            await told(coordinator.round(SPACE, "evening"))
        await coordinator.settle(SPACE, "evening")
        return [each.text for each in coordinator.messages(SPACE, "evening")]

    async def after(coordinator: Coordinator) -> None:
        info = coordinator.show(SPACE, "evening")
        assert (info.plan.title, info.num_rounds, info.num_turns, info.is_unfinished) == ("Evening", 2, 6, False)
        assert [each.text for each in coordinator.messages(SPACE, "evening")] == said
        for data in of_kind(await told(coordinator.round(SPACE, "evening")), "turn_complete"):
            report = data["rekindle"]
            assert report["reused_tokens"] >= 0.9 * report["prompt_tokens"], report
            assert data["speaker"] != "Ada" or report["warm_tokens"] > 0

    with proved(Engine(settings_in(tmp_path))) as engine:
        said = holding(engine, before, path)
    with proved(Engine(settings_in(tmp_path))) as engine:
        holding(engine, after, path)


def test_turn_that_was_begun_is_spoken_after_a_restart(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"

    async def before(coordinator: Coordinator) -> None:
        await coordinator.create(SPACE, plan_of(), id="broken")
        long = {"max_tokens": 100}  # Ben is not through when it is told that Ada is, however slow the disk
        async with aclosing(coordinator.round(SPACE, "broken", sampling=long)) as events:
            async for event in events:
                if event.kind == "turn_complete":
                    break

    async def after(coordinator: Coordinator) -> None:
        info = coordinator.show(SPACE, "broken")
        assert info.is_unfinished and info.num_messages == 2
        events = await told(coordinator.turn(SPACE, "broken"))
        assert [each["speaker"] for each in of_kind(events, "turn_complete")] == ["Ben", "Cleo"]
        assert [each["num_turns"] for each in of_kind(events, "round_complete")] == [2]

    holding(engine, before, path)
    holding(engine, after, path)


def test_deleted_session_leaves_no_kv_behind(engine: Engine, tmp_path: Path) -> None:
    async def play(coordinator: Coordinator) -> None:
        agents = (Participant("Ada", agent="ada"), Participant("Ben"), Participant("Cle/o", "100 %"))
        await coordinator.create(SPACE, Plan(agents, sampling=SHORT), id="short")
        await told(coordinator.round(SPACE, "short"))
        ids = {"ada", "short/Ben", "short/Cle%2Fo"}
        assert {each.agent for each in engine.agents(SPACE)} >= ids
        await coordinator.delete(SPACE, "short")
        assert {each.agent for each in engine.agents(SPACE)} & ids == {"ada"}
        with pytest.raises(NotFound):
            await coordinator.delete(SPACE, "short")

    holding(engine, play, tmp_path / "sessions.db")


def _with_ada(other: str) -> Plan:
    return Plan((Participant("Ada", "You know much.", agent="ada"), Participant(other)), sampling=SHORT)


def test_permanent_agent_remembers_over_sessions(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"

    async def first(coordinator: Coordinator) -> None:
        await coordinator.create(SPACE, _with_ada("Ben"), id="first")
        await coordinator.post_message(SPACE, "first", "The treasure lies under the oak. " * 8, to=("Ada",))
        await told(coordinator.round(SPACE, "first"))
        await coordinator.delete(SPACE, "first")

    async def second(coordinator: Coordinator) -> None:
        await coordinator.create(SPACE, _with_ada("Cleo"), id="second")
        (turn, _) = of_kind(await told(coordinator.round(SPACE, "second")), "turn_complete")
        report = turn["rekindle"]
        assert report["reused_tokens"] > 0.5 * report["prompt_tokens"], report
        assert any("under the oak" in text for text in stored_texts(engine, "ada"))
        assert not any("under the oak" in text for text in stored_texts(engine, "second/Cleo"))

    async def third(coordinator: Coordinator) -> None:
        """From a session that is still held, which itself brought it from the first."""
        await coordinator.create(SPACE, _with_ada("Dan"), id="third")
        assert "under the oak" in str(coordinator.registry.found(SPACE, "third").machine.context("Ada"))
        await coordinator.forget(SPACE, "ada")
        await coordinator.create(SPACE, _with_ada("Eve"), id="fourth")
        assert "under the oak" not in str(coordinator.registry.found(SPACE, "fourth").machine.context("Ada"))

    for play in (first, second, third):
        holding(engine, play, path)


def test_sessions_of_an_agent_are_found_without_reading_all(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"

    async def create(coordinator: Coordinator) -> None:
        await coordinator.create(SPACE, _with_ada("Ben"), id="one")
        await coordinator.create(SPACE, plan_of(), id="two")
        await coordinator.create(SPACE, _with_ada("Cleo"), id="three")

    async def find(coordinator: Coordinator) -> None:
        num_held = coordinator.registry.sessions.num_held
        assert await coordinator.with_agent(SPACE, "ada") == ("one", "three")
        assert await coordinator.with_agent("other", "ada") == await coordinator.with_agent(SPACE, "one") == ()
        assert num_held() == 0
        assert await coordinator.with_agent(SPACE, f"two/{NAMES[0]}") == ("two",)
        assert await coordinator.with_agent(SPACE, "two/Nobody") == ()
        assert num_held() == 1

    holding(engine, create, path)
    holding(engine, find, path)


def test_names_are_kept_in_order(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"

    async def create(coordinator: Coordinator) -> None:
        for name in ("one", "two"):
            await coordinator.create(SPACE, plan_of(), id=name)

    async def look(coordinator: Coordinator) -> list[tuple[str, ...]]:
        return [(info.id, *(each.name for each in info.participants)) for info in await coordinator.listed(SPACE)]

    holding(engine, create, path)
    assert holding(engine, look, path) == [("one", *NAMES), ("two", *NAMES)]
