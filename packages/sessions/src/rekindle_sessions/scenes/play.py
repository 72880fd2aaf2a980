"""Play a scene in one session: run its phases in order and yield events as they happen.

Owns the progress of the play. Knows neither terminal nor HTTP: the caller displays the events, and the session may be
of this process or of a server. In addition to the
session's own events (docs/coordination.md) it emits:

    scene {session, layout}            the session has begun; `layout`: whether prompts only grow
    phase {name, agents}               a phase begins
    message {utterance}                a message of the host, or a scripted whisper
    scores {phase, round, moves, points, scores}    after each round of a game
    outcome {verdicts: [{text, holds, held, of}]}   all phases are over
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from rekindle_sessions.machine.decisions import Ballot, Count, Decision, Question
from rekindle_sessions.machine.types import Audience, Plan, Topology, Utterance
from rekindle_sessions.scenes.games import Game, number
from rekindle_sessions.scenes.phases import Phase
from rekindle_sessions.scenes.scenario import Scenario
from rekindle_sessions.scenes.story import Story
from rekindle_sessions.scenes.templating import Template
from rekindle_sessions.service.events import SessionEvent, of_utterance

Events = AsyncGenerator[SessionEvent, None]
NOBODY: Audience = ()


@dataclass(frozen=True, slots=True)
class Begun:
    """A session that has begun: its id, whether its prompts only grow, and what has been said in it."""

    id: str
    layout: Mapping[str, Any]
    said: tuple[Utterance, ...]


class SceneSession(Protocol):
    """The one session that a scene is played in. Runs yield their events; closing one early keeps the session."""

    async def begin(self, plan: Plan) -> Begun:
        """Create the session; called once, before all else."""
        ...

    async def post(self, text: str, *, by: str | None, to: Audience) -> Utterance:
        """Post a message, by the host unless `by` is given."""
        ...

    def turn(self, *, speaker: str | None, to: Audience, topology: Topology) -> Events:
        """Have one agent speak; `to` limits who hears it."""
        ...

    def round(self, *, speakers: Sequence[str] | None, to: Audience, topology: Topology) -> Events:
        """Play a round of a topology."""
        ...

    def vote(self, question: Question, *, voters: Sequence[str]) -> Events:
        """Put a question to the voters."""
        ...

    async def end(self) -> None:
        """Delete the session; permanent agents keep their memories."""
        ...


class Play:
    """One scene in its own session, which is created when the play begins and remains when it ends."""

    def __init__(self, scenario: Scenario, place: SceneSession) -> None:
        self.scenario = scenario
        self.session: str | None = None
        self.phase: Phase | None = None
        self.story = Story(scenario.variables, (each.name for each in scenario.plan.participants))
        self._place = place
        self._decided: Decision | None = None  # by the last vote; None: not yet, or it was dropped

    async def run(self) -> Events:
        """Play the scene, once. Closing the iterator early stops the turn within a step and keeps the session."""
        begun = await self._place.begin(self.scenario.plan)
        self.session = begun.id
        yield SessionEvent("scene", {"session": begun.id, "layout": begun.layout})
        for utterance in begun.said:
            yield of_utterance(utterance)
        for phase in self.scenario.phases:
            self.phase = phase
            yield SessionEvent("phase", {"name": phase.name, "agents": list(phase.agents)})
            for step in self._steps(phase):
                async with aclosing(step) as events:
                    async for event in events:
                        self._note(phase, event)
                        yield event
        self.phase = None
        verdicts = [rule.verdict(self.story) for rule in self.scenario.outcome]
        shown = [asdict(verdict) for verdict in verdicts if verdict is not None]
        yield SessionEvent("outcome", {"verdicts": shown})

    async def end(self) -> None:
        """Delete the session; permanent agents keep their memories. Does nothing without a session."""
        if self.session is not None:
            await self._place.end()
            self.session = None

    def _steps(self, phase: Phase) -> Iterator[Events]:
        """Yield the steps of a phase, each created after the previous one ends, so that texts can use its result."""
        if phase.say is not None:
            yield self._post(phase.say, None, phase.audience)
        for whisper in phase.whispers:
            if whisper.text is not None:
                yield self._post(whisper.text, whisper.by, (whisper.to,))
            else:
                yield self._turn(phase, whisper.by, (whisper.to,))
        for ask in phase.asks:
            yield self._post(ask.text, None, (ask.to,) if ask.private else phase.audience)
            yield self._turn(phase, ask.to, NOBODY if ask.private else phase.audience)
        for speaker in phase.turns:
            yield self._turn(phase, speaker, phase.audience)
        for _ in range(phase.rounds):
            yield self._round(phase)
        if phase.vote is not None:
            question = replace(phase.vote.question, text=phase.vote.text.render(self.story.values()))
            yield self._put(phase, question)
            self.story.decided(phase.name, self._result(question))
        if phase.game is not None:
            yield from self._game(phase, phase.game)

    def _game(self, phase: Phase, game: Game) -> Iterator[Events]:
        self.story.moves = {}
        for at in range(1, game.rounds + 1):
            question = game.rendered_question(self.story.values(round=at, rounds=game.rounds, moves=self.story.moves))
            yield self._put(phase, question)
            points = self.story.moved(game, phase.agents, self._result(question))
            yield _once(SessionEvent("scores", {"phase": phase.name, "round": at, **self._scored(points)}))

    async def _post(self, text: Template, by: str | None, to: Audience) -> Events:
        words = text.render(self.story.values())
        yield of_utterance(await self._place.post(words, by=by, to=to))

    def _turn(self, phase: Phase, speaker: str | None, to: Audience) -> Events:
        return self._place.turn(speaker=speaker, to=to, topology=phase.topology)

    def _round(self, phase: Phase) -> Events:
        """Play a round: in a whisper phase each speaks to its neighbour only, otherwise to the phase's audience.

        Speakers are given explicitly, so that each round begins with the first one, regardless of who spoke last.
        """
        to = None if phase.topology == "whisper" else phase.audience
        speakers = None if phase.topology == "moderated" and phase.audience is None else phase.agents
        return self._place.round(speakers=speakers, to=to, topology=phase.topology)

    def _put(self, phase: Phase, question: Question) -> Events:
        self._decided = None
        return self._place.vote(question, voters=phase.agents)

    def _result(self, question: Question) -> Decision:
        """Return the vote's decision; a dropped vote decides nothing."""
        return self._decided or Decision(question, None, (), (), (), ())

    def _scored(self, points: Mapping[str, float]) -> dict[str, Any]:
        shown = {name: number(more) for name, more in points.items()}
        totals = {name: number(self.story.scores[name]) for name in points}
        return {"moves": dict(self.story.moves), "points": shown, "scores": totals}

    def _note(self, phase: Phase, event: SessionEvent) -> None:
        """Record decisions and what agents say, including scripted whispers but not ballots and picks."""
        if event.kind == "decision":
            self._decided = _decision(event.data)
        for by, text in _words(event):
            if by in self.story.scores:
                self.story.said(phase.name, by, text)


async def _once(event: SessionEvent) -> Events:
    yield event


def _decision(data: Mapping[str, Any]) -> Decision:
    """Rebuild a decision from its event's data, which may have come as JSON."""
    nested = {
        "question": Question(**data["question"]),
        "counts": tuple(Count(tuple((option, number) for option, number in each["votes"])) for each in data["counts"]),
        "ballots": tuple(Ballot(**{**each, "ranking": tuple(each["ranking"])}) for each in data["ballots"]),
        "tied": tuple(data["tied"]),
        "abstained": tuple(data["abstained"]),
    }
    return Decision(**{**data, **nested})


def _words(event: SessionEvent) -> Iterator[tuple[str, str]]:
    if event.kind == "turn_complete" and event.data["purpose"] == "speak":
        yield event.data["speaker"], event.data["text"]
    elif event.kind == "message":
        yield event.data["utterance"]["by"], event.data["utterance"]["text"]
