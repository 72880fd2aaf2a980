"""Sessions as they are played: every topology, who hears what, votes, and what is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rekindle import Engine
from rekindle.errors import BadRequest, Conflict, NotFound
from rekindle_sessions.machine.decisions import Question
from rekindle_sessions.machine.types import Participant, Plan, Topology
from rekindle_sessions.service.coordinator import Coordinator
from tests.sessions.service.held import NAMES, SHORT, SPACE, holding, of_kind, plan_of, stored_texts, told


def test_round_is_told_in_order(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of())
        assert info.expected == ("Ada",) and not info.is_unfinished and info.num_messages == 1
        events = await told(coordinator.round(SPACE, info.id))
        kinds = [event.kind for event in events if event.kind != "token"]
        assert kinds == ["turn_start", "turn_complete"] * 3 + ["round_complete"]
        for number, data in enumerate(of_kind(events, "turn_complete"), 1):
            spoken = "".join(each["text"] for each in of_kind(events, "token") if each["turn"] == number)
            assert (data["turn"], data["speaker"], data["num_tokens"]) == (number, NAMES[number - 1], 6)
            assert data["text"] == spoken.strip() and data["number"] == number and not data["cut"]
            assert data["rekindle"]["completion_tokens"] == 6
            assert (data["gap_ms"] is None) == (number == 1) and data["first_token_ms"] > 0
        (done,) = of_kind(events, "round_complete")
        assert done["num_turns"] == 3 and done["gap_ms"] > 0 and 0 < done["reused_share"] <= 1
        assert [each.by for each in coordinator.messages(SPACE, info.id)] == ["Host", *NAMES]
        assert [each.by for each in coordinator.messages(SPACE, info.id, after=2)] == ["Ben", "Cleo"]

    holding(engine, play)


@pytest.mark.parametrize("topology", ["round_robin", "broadcast", "moderated", "whisper"])
def test_round_of_each_topology(engine: Engine, topology: Topology) -> None:
    async def play(coordinator: Coordinator) -> None:
        moderator = "Ada" if topology == "moderated" else None
        info = await coordinator.create(SPACE, plan_of(topology=topology, moderator=moderator))
        for number in (1, 2):
            events = await told(coordinator.round(SPACE, info.id))
            turns = of_kind(events, "turn_complete")
            if topology == "moderated":
                assert [each["purpose"] for each in turns] == ["pick", "speak"] * 2
            else:
                assert sorted(each["speaker"] for each in turns) == sorted(NAMES)
            if topology == "broadcast":
                starts = [event.kind for event in events if event.kind in ("turn_start", "turn_complete")]
                assert starts == ["turn_start"] * 3 + ["turn_complete"] * 3
            if topology == "whisper":
                assert [each["to"] for each in turns] == [["Ben"], ["Cleo"], ["Ada"]]
            assert [each["round"] for each in of_kind(events, "round_complete")] == [number]

    holding(engine, play)


def test_turn_by_turn_wants_a_speaker(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of(topology="turn_by_turn"))
        events = await told(coordinator.turn(SPACE, info.id, speaker="Cleo", to=("Ada",)))
        (data,) = of_kind(events, "turn_complete")
        assert data["speaker"] == "Cleo" and data["to"] == ["Ada"]
        with pytest.raises(BadRequest, match="has to be named"):
            await told(coordinator.turn(SPACE, info.id))
        with pytest.raises(NotFound, match="Zed"):
            await told(coordinator.turn(SPACE, info.id, speaker="Zed"))

    holding(engine, play)


def test_reuse_is_whole_but_for_what_is_new(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of("Ada", "Ben", setting="They talk. " * 40))
        assert info.layout.extends, info.layout
        await told(coordinator.round(SPACE, info.id))
        for _ in range(3):
            await coordinator.settle(SPACE, info.id)
            for data in of_kind(await told(coordinator.round(SPACE, info.id)), "turn_complete"):
                report = data["rekindle"]
                assert report["source"] == "own"
                assert data["taken_in_tokens"] > 0 or data["speaker"] == "Ben"  # who has had no time to listen
                assert report["reused_tokens"] >= 0.9 * report["prompt_tokens"], report

    holding(engine, play)


def test_whisper_reaches_one_prompt_only(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of(), id="secret")
        await coordinator.post_message(SPACE, "secret", "The key is under the blue pot.", to=("Ben",))
        for _ in range(2):
            await told(coordinator.round(SPACE, info.id))
        await coordinator.settle(SPACE, "secret")
        for name in NAMES:
            texts = stored_texts(engine, f"secret/{name}")
            assert texts
            assert any("blue pot" in text for text in texts) == (name == "Ben"), texts
        heard = {name: coordinator.messages(SPACE, "secret", hears=name) for name in NAMES}
        assert ["blue pot" in str(heard[name]) for name in NAMES] == [False, True, False]

    holding(engine, play)


def test_listeners_take_in_what_is_said(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of(), id="listened")
        await told(coordinator.turn(SPACE, info.id, speaker="Ada"))
        await coordinator.settle(SPACE, info.id)
        said = coordinator.messages(SPACE, info.id)[-1].text
        said = said[: len(said) // 2]  # the last words may go on
        for name in ("Ben", "Cleo"):
            assert any(f"Ada: {said}" in text for text in stored_texts(engine, f"listened/{name}"))
        later = await coordinator.create(SPACE, plan_of(listen="later"), id="later")
        await told(coordinator.turn(SPACE, later.id, speaker="Ada"))
        assert not stored_texts(engine, "later/Ben")

    holding(engine, play)


def test_next_speaker_absorbs_what_is_being_said(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of("Ada", "Ben"))
        await coordinator.settle(SPACE, info.id)
        long = {"max_tokens": 80, "temperature": 0, "ignore_eos": True}
        ada, ben = of_kind(await told(coordinator.round(SPACE, info.id, sampling=long)), "turn_complete")
        assert ada["num_tokens"] == 80
        assert ben["taken_in_tokens"] > 40, ben
        assert ben["rekindle"]["computed_tokens"] < 60, ben

    holding(engine, play)


def test_nothing_is_reused_where_reuse_is_off(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of(reuse="off"), id="cold")
        for _ in range(2):
            for data in of_kind(await told(coordinator.round(SPACE, info.id)), "turn_complete"):
                assert data["rekindle"]["reused_tokens"] == 0
        assert not stored_texts(engine, "cold/Ada")

    holding(engine, play)


def test_vote_is_counted_and_kept(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of())
        question = Question("Where do we meet?", ("garden", "library"))
        events = await told(coordinator.vote(SPACE, info.id, question, voters=("Ada", "Ben")))
        (decision,) = of_kind(events, "decision")
        assert {each["voter"] for each in decision["ballots"]} == {"Ada", "Ben"}
        assert [each["purpose"] for each in of_kind(events, "turn_complete")] == ["ballot", "ballot"]
        assert [each["utterance"]["by"] for each in of_kind(events, "message")] == ["Host", "Host"]
        assert len(coordinator.show(SPACE, info.id).decisions) == 1
        with pytest.raises(BadRequest, match="no vote is under way"):
            await told(coordinator.vote(SPACE, info.id, None))

    holding(engine, play)


def test_forked_agent_stands_on_the_same_memory(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of(), id="forks")
        await told(coordinator.round(SPACE, info.id))
        await coordinator.settle(SPACE, info.id)
        (held,) = engine.agent("forks/Ada").info().branch_infos
        forked = await coordinator.fork(SPACE, info.id, "Ada", "Dan", persona="You doubt everything.")
        assert [each.name for each in forked.participants] == [*NAMES, "Dan"]
        assert forked.agents["Dan"].agent == "forks/Dan" and not forked.agents["Dan"].is_permanent
        compared = await coordinator.compare(SPACE, info.id, ("Ada", "Dan"))
        assert compared["shared_tokens"] > 0.8 * compared["num_tokens"]["Ada"]
        assert compared["parts_at"]["Dan"]["by"] == "Host"
        events = await told(coordinator.turn(SPACE, info.id, speaker="Dan"))
        (data,) = of_kind(events, "turn_complete")
        assert data["rekindle"]["reused_tokens"] >= held.num_tokens
        await coordinator.rewind(SPACE, info.id, "Dan")
        await coordinator.merge(SPACE, info.id, "Ben", "Dan")
        with pytest.raises(BadRequest, match="two agents"):
            await coordinator.compare(SPACE, info.id, ("Ada",))

    holding(engine, play)


def test_watchers_see_what_others_have_played(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of())
        seen = asyncio.create_task(told(coordinator.events(SPACE, info.id)))
        events = await told(coordinator.round(SPACE, info.id))
        said = await coordinator.post_message(SPACE, info.id, "Well done.")
        await coordinator.delete(SPACE, info.id)
        watched = await seen
        assert watched[: len(events)] == events
        assert [each["utterance"]["number"] for each in of_kind(watched, "message")] == [said.number]

    holding(engine, play)


def test_one_thing_at_a_time(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of())
        running = coordinator.round(SPACE, info.id, sampling={"max_tokens": 40})  # Ada is not through when it is told
        assert (await anext(running)).kind == "turn_start"
        assert [turn.speaker for turn in coordinator.show(SPACE, info.id).running] == ["Ada"]
        for other in (coordinator.turn(SPACE, info.id), coordinator.vote(SPACE, info.id, None)):
            with pytest.raises(Conflict, match="somebody is speaking"):
                await anext(other)
        with pytest.raises(Conflict, match="Ada is speaking"):
            await coordinator.rewind(SPACE, info.id, "Ada")
        said = await coordinator.post_message(SPACE, info.id, "By the way, it rains.")
        events = await told(running)
        assert [each["utterance"]["number"] for each in of_kind(events, "message")] == [said.number]
        assert len(of_kind(events, "turn_complete")) == 3
        assert coordinator.show(SPACE, info.id).running == ()

    holding(engine, play)


def _with(**fields: Any) -> Plan:
    return plan_of(**fields)


@pytest.mark.parametrize(
    ("plan", "id", "message"),
    [
        (plan_of("Ada"), None, "2 to 30 agents"),
        (_with(sampling=(("max_tokns", 3),)), None, "max_tokns"),
        (_with(sampling=(("temperature", -1),)), None, "temperature"),
        (_with(setting="a\ufdd0b"), None, "U\\+FDD0"),
        (plan_of(), "a/b", "no id"),
        (Plan((Participant("Ada", agent="x" * 300), Participant("Ben"))), None, "256 bytes"),
    ],
)
def test_plans_that_are_none(engine: Engine, plan: Plan, id: str | None, message: str) -> None:
    async def play(coordinator: Coordinator) -> None:
        with pytest.raises(BadRequest, match=message):
            await coordinator.create(SPACE, plan, id=id)
        assert await coordinator.listed(SPACE) == []

    holding(engine, play)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"listen": "next"}, "listen"),
        ({"layout": "shrink"}, "layout"),
        ({"reuse": True}, "reuse"),
        ({"title": 5}, "title"),
        ({"setting": None}, "setting"),
        ({"sampling": (("stop", {"a"}),)}, "sampling"),
        ({"sampling": (("stop",),)}, "sampling"),
        ({"participants": (Participant("Ada", role=None), Participant("Ben"))}, "participants"),
        ({"participants": ("Ada", "Ben")}, "participants"),
    ],
)
def test_a_plan_that_could_not_be_read_back_is_refused(engine: Engine, fields: dict[str, Any], name: str) -> None:
    async def play(coordinator: Coordinator) -> None:
        with pytest.raises(BadRequest, match=name) as refused:
            await coordinator.create(SPACE, replace(plan_of(), **fields))
        assert refused.value.param == name
        info = await coordinator.create(SPACE, plan_of())
        question = Question("Where?", ("here", "there"), max_rounds=2.5)
        with pytest.raises(BadRequest, match=r"question\.max_rounds cannot be kept: .*integer"):
            await told(coordinator.vote(SPACE, info.id, question))
        assert coordinator.show(SPACE, info.id).is_voting is False

    holding(engine, play)


def test_sessions_belong_to_their_namespace(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        await coordinator.create("one", plan_of(), id="same")
        await coordinator.create("two", plan_of(), id="same")
        assert [info.namespace for info in await coordinator.listed("two")] == ["two"]
        with pytest.raises(Conflict, match="already"):
            await coordinator.create("two", plan_of(), id="same")
        await coordinator.delete("one", "same")
        with pytest.raises(NotFound):
            coordinator.show("one", "same")
        assert coordinator.show("two", "same").id == "same"

    holding(engine, play)


def test_turn_that_cannot_be_had_fails_alone(engine: Engine) -> None:
    async def play(coordinator: Coordinator) -> None:
        long = "word " * (engine.max_context - 10)  # it fits, but not with what every prompt has
        agents = (Participant("Ada", long), Participant("Ben"), Participant("Cleo"))
        info = await coordinator.create(SPACE, Plan(agents, sampling=SHORT))
        await coordinator.settle(SPACE, info.id)
        assert coordinator.registry.found(SPACE, info.id).listening.num_failed == 1
        events = await told(coordinator.round(SPACE, info.id))
        (failed,) = of_kind(events, "turn_failed")
        assert failed["speaker"] == "Ada" and str(engine.max_context - 1) in failed["error"]
        assert [each["speaker"] for each in of_kind(events, "turn_complete")] == ["Ben", "Cleo"]

    holding(engine, play)


def test_sampling_of_a_call_goes_before_the_plan(engine: Engine, tmp_path: Path) -> None:
    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of())
        events = await told(coordinator.turn(SPACE, info.id, sampling={"max_tokens": 2}))
        assert [each["num_tokens"] for each in of_kind(events, "turn_complete")] == [2]
        with pytest.raises(BadRequest, match="max_tokens"):
            await told(coordinator.turn(SPACE, info.id, sampling={"max_tokens": 0}))
        assert not coordinator.show(SPACE, info.id).is_unfinished

    holding(engine, play, tmp_path / "sessions.db")
