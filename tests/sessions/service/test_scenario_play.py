"""Scenes played on the bundled model: phases in order, words only where they belong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rekindle import Engine
from rekindle.config import Settings
from rekindle.errors import BadRequest, NotFound
from rekindle_sessions.log.records import SessionRecords
from rekindle_sessions.machine.types import Utterance
from rekindle_sessions.scenes.play import Play
from rekindle_sessions.scenes.played_here import CoordinatedSession
from rekindle_sessions.scenes.scenario import Scenario, find, load, shipped
from rekindle_sessions.service.coordinator import Coordinator
from rekindle_sessions.service.events import SessionEvent

SCENE = """\
name: small
title: A small scene
about: Three of them.
variables: {thing: copper key}
sampling: {max_tokens: 10, temperature: 0}
agents:
  - {name: Ada, knows: "The {{ thing }} is in the attic."}
  - {name: Bo}
  - {name: Cy}
phases:
  - name: apart
    agents: [Ada, Bo]
    say: "For two of you: where is the {{ thing }}?"
    whisper:
      - {from: Bo, to: Ada, text: I am listening.}
      - {from: Ada, to: Bo}
    turns: 2
  - name: alone
    ask: [{to: Cy, text: "Where is the {{ thing }}?", private: true}]
  - name: vote
    agents: [Ada, Bo]
    decide: {question: "Where is the {{ thing }}?", options: [attic, cellar]}
  - name: all
    topology: broadcast
    say: "Decided: {{ decisions.vote.outcome }}; Ada said {{ words.Ada | length > 0 }}, Cy has {{ scores.Cy }}."
    rounds: 1
outcome:
  - text: It is over.
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(Settings.load({"store": "off", "threads": 1, "hot_bytes": "256MiB"})) as started:
        yield started


def played(
    engine: Engine, scene: Scenario
) -> tuple[list[SessionEvent], list[Utterance], Play, dict[str, list[Utterance]]]:
    """The events of a whole play, what was said, and what each agent heard."""

    async def run() -> tuple[list[SessionEvent], list[Utterance], Play, dict[str, list[Utterance]]]:
        coordinator = Coordinator(engine, SessionRecords.open(None))
        await coordinator.start()
        try:
            play = Play(scene, CoordinatedSession(coordinator))
            events = [event async for event in play.run()]
            assert play.session is not None
            said = coordinator.messages("default", play.session)
            names = [each.name for each in scene.plan.participants]
            heard = {name: coordinator.messages("default", play.session, hears=name) for name in names}
            await play.end()
            assert await coordinator.listed("default") == []
            return events, said, play, heard
        finally:
            await coordinator.close()

    return asyncio.run(run())


def small(tmp_path: Path, text: str = SCENE) -> Scenario:
    path = tmp_path / "small.yaml"
    path.write_text(text)
    return load(path)


def kinds(events: list[SessionEvent], kind: str) -> list[dict[str, Any]]:
    return [event.data for event in events if event.kind == kind]


def test_a_scene_is_played_phase_by_phase(engine: Engine, tmp_path: Path) -> None:
    events, said, play, _ = played(engine, small(tmp_path))
    assert events[0].kind == "scene" and events[-1].kind == "outcome"
    assert [data["name"] for data in kinds(events, "phase")] == ["apart", "alone", "vote", "all"]
    spoke = [(data["speaker"], data["to"]) for data in kinds(events, "turn_complete") if data["purpose"] == "speak"]
    both = ["Ada", "Bo"]
    assert spoke[:4] == [("Ada", ["Bo"]), ("Ada", both), ("Bo", both), ("Cy", [])]
    assert sorted(name for name, to in spoke[4:] if to is None) == ["Ada", "Bo", "Cy"]
    assert kinds(events, "outcome") == [{"verdicts": [{"text": "It is over.", "holds": True, "held": 0, "of": 0}]}]
    outcome = play.story.decisions["vote"].outcome
    assert f"Decided: {outcome}; Ada said True, Cy has 0." in [each.text for each in said]
    assert kinds(events, "turn_failed") == []


def test_others_neither_speak_nor_hear(engine: Engine, tmp_path: Path) -> None:
    _, said, _, heard = played(engine, small(tmp_path))
    to_cy = [each.text for each in heard["Cy"] if each.by not in ("Ada", "Bo", "Cy")]
    assert to_cy[:2] == ["Let us begin.", "Where is the copper key?"]
    assert to_cy[2].startswith("Decided:") and len(to_cy) == 3  # nothing of the two phases without it
    (alone,) = [each for each in said if each.by == "Cy" and each.to == ()]
    assert all(alone not in heard[name] for name in ("Ada", "Bo"))


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_shipped_scenes_play_through(engine: Engine, path: Path) -> None:
    scene = load(path).with_sampling(max_tokens=12)
    events, _, play, _ = played(engine, scene)
    assert [data["name"] for data in kinds(events, "phase")] == [phase.name for phase in scene.phases]
    assert kinds(events, "turn_failed") == [] and kinds(events, "error") == []
    assert len(kinds(events, "decision")) == sum(
        phase.game.rounds if phase.game else phase.vote is not None for phase in scene.phases
    )
    (outcome,) = kinds(events, "outcome")
    assert outcome["verdicts"]
    assert sum(play.story.scores.values()) == sum(sum(data["points"].values()) for data in kinds(events, "scores"))


TWO_VOTES = """\
name: small
title: A small scene
about: Two votes, of which the second is dropped, and so is a game. Nobody has voted when it is told who begins.
sampling: {max_tokens: 60, temperature: 0, ignore_eos: true}
agents: [{name: Ada}, {name: Bo}]
phases:
  - name: first
    decide: {question: "Where is the copper key?", options: [attic, cellar]}
  - name: second
    decide: {question: "Who owns the silver bell?", options: [Ada, Bo]}
  - name: game
    game:
      question: Well?
      moves: [up, down]
      default: up
      payoffs: {up: {up: [1, 2], down: [3, 4]}, down: {up: [5, 6], down: [7, 8]}}
  - name: told
    say: "{{ decisions.second.outcome or 'Nothing' }} was decided, {{ decisions.second.tally | length }} counted."
outcome:
  - {decided: {phase: second}, text: decided, otherwise: not decided}
"""


def test_a_vote_that_is_dropped_decides_nothing(engine: Engine, tmp_path: Path) -> None:
    async def drop() -> tuple[Play, list[SessionEvent]]:
        coordinator = Coordinator(engine, SessionRecords.open(None))
        await coordinator.start()
        play, events = Play(small(tmp_path, TWO_VOTES), CoordinatedSession(coordinator)), []
        async with aclosing(play.run()) as running:
            async for event in running:
                events.append(event)
                is_later = play.phase is not None and play.phase.name in ("second", "game")
                if is_later and event.kind == "turn_start" and event.data["speaker"] == "Ada":
                    assert play.session is not None
                    await coordinator.post_message("default", play.session, "Stop.", stop="round")
        await coordinator.close()
        return play, events

    play, events = asyncio.run(drop())
    (only,) = kinds(events, "decision")
    first, second = play.story.decisions["first"], play.story.decisions["second"]
    assert asdict(first) == only
    assert (second.outcome, second.counts, second.ballots) == (None, (), ())
    assert second.question.text == "Who owns the silver bell?"
    assert play.story.scores == {"Ada": 1, "Bo": 2}, "whoever names no move makes the default one"
    assert "Nothing was decided, 0 counted." in [data["utterance"]["text"] for data in kinds(events, "message")]
    assert [each["text"] for each in kinds(events, "outcome")[0]["verdicts"]] == ["not decided"]


def test_the_routers_experts_hold_long_documents(engine: Engine) -> None:
    scene = load(find("router"))
    texts = [each.persona for each in scene.plan.participants[1:]]
    sizes = [len(engine.encoder.encode(engine.encoder.render_text(text))) for text in texts]
    assert len(sizes) == 10 and all(1000 <= size <= 1300 for size in sizes), sizes
    paragraphs = [each for text in texts for each in text.split("\n\n")]
    assert len(set(paragraphs)) == len(paragraphs), "each its own words"


def test_leaving_early_leaves_the_session_until_it_is_ended(engine: Engine, tmp_path: Path) -> None:
    async def leave() -> None:
        coordinator = Coordinator(engine, SessionRecords.open(None))
        await coordinator.start()
        scene = small(tmp_path).with_sampling(max_tokens=200, ignore_eos=True)  # nobody is through when it is left
        play = Play(scene, CoordinatedSession(coordinator))
        await play.end()  # there is none yet
        async with aclosing(play.run()) as events:
            async for event in events:
                if event.kind == "token":
                    break
        assert play.phase is not None and play.phase.name == "apart" and play.session is not None
        info = coordinator.show("default", play.session)
        assert info.is_unfinished
        await play.end()
        with pytest.raises(NotFound):
            coordinator.show("default", info.id)
        await coordinator.close()

    asyncio.run(leave())


def test_a_text_that_fails_when_it_is_said_names_its_place(engine: Engine, tmp_path: Path) -> None:
    text = SCENE.replace('say: "For two of you: where is the {{ thing }}?"', 'say: "{{ 1 // scores.Ada }}"')
    with pytest.raises(BadRequest, match=r"phases\[0\].say: the template fails: ZeroDivisionError"):
        played(engine, small(tmp_path, text))
