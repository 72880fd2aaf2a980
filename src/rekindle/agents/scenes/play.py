"""A scene played in one session: its phases one after the other, what happens told as it happens.

Owns where the play stands. Knows neither terminal nor HTTP: whoever iterates it shows it. Beside the session's own
events (docs/coordination.md) it tells:

    scene {session, layout}            the session has begun; `layout`: whether prompts only grow
    phase {name, agents}               a phase begins
    message {utterance}                the host says something, or a whisper is given
    scores {phase, round, moves, points, scores}    after each round of a game
    outcome {verdicts: [{text, holds, held, of}]}   all phases are over
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

from rekindle.agents.machine.decisions import Ballot, Count, Decision, Question
from rekindle.agents.machine.types import Audience
from rekindle.agents.scenes.games import Game, number
from rekindle.agents.scenes.phases import Phase
from rekindle.agents.scenes.scenario import Scenario
from rekindle.agents.scenes.story import Story
from rekindle.agents.scenes.templating import Template
from rekindle.agents.sessions.coordinator import Coordinator
from rekindle.agents.sessions.events import SessionEvent, of_utterance

Events = AsyncGenerator[SessionEvent, None]
NOBODY: Audience = ()


class Play:
    """One scene in a session of its own, which is made when the play begins and stays when it ends."""

    def __init__(self, scenario: Scenario, coordinator: Coordinator, *, namespace: str = "default") -> None:
        self.scenario = scenario
        self.namespace = namespace
        self.session: str | None = None
        self.phase: Phase | None = None
        self.story = Story(scenario.variables, (each.name for each in scenario.plan.participants))
        self._coordinator = coordinator
        self._decided: Decision | None = None  # by the vote that was put last; None: not yet, or it was dropped

    async def run(self) -> Events:
        """Play it, once. Leaving early stops the turn within a step and leaves the session as it is."""
        info = await self._coordinator.create(self.namespace, self.scenario.plan)
        self.session = info.id
        yield SessionEvent("scene", {"session": info.id, "layout": asdict(info.layout)})
        for utterance in self._coordinator.messages(self.namespace, info.id):
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
        told = [asdict(verdict) for verdict in verdicts if verdict is not None]
        yield SessionEvent("outcome", {"verdicts": told})

    async def end(self) -> None:
        """Delete the session; permanent agents keep what they remember. Without a session nothing happens."""
        if self.session is not None:
            await self._coordinator.delete(self.namespace, self.session)
            self.session = None

    def _steps(self, phase: Phase) -> Iterator[Events]:
        """What happens in a phase, each made when the one before is over, so that texts know what came of it."""
        if phase.say is not None:
            yield self._tell(phase.say, None, phase.audience)
        for whisper in phase.whispers:
            if whisper.text is not None:
                yield self._tell(whisper.text, whisper.by, (whisper.to,))
            else:
                yield self._turn(phase, whisper.by, (whisper.to,))
        for ask in phase.asks:
            yield self._tell(ask.text, None, (ask.to,) if ask.private else phase.audience)
            yield self._turn(phase, ask.to, NOBODY if ask.private else phase.audience)
        for speaker in phase.turns:
            yield self._turn(phase, speaker, phase.audience)
        for _ in range(phase.rounds):
            yield self._round(phase)
        if phase.vote is not None:
            question = replace(phase.vote.question, text=phase.vote.text.render(self.story.values()))
            yield self._put(phase, question)
            self.story.decided(phase.name, self._came_of(question))
        if phase.game is not None:
            yield from self._game(phase, phase.game)

    def _game(self, phase: Phase, game: Game) -> Iterator[Events]:
        self.story.moves = {}
        for at in range(1, game.rounds + 1):
            question = game.asked(self.story.values(round=at, rounds=game.rounds, moves=self.story.moves))
            yield self._put(phase, question)
            points = self.story.moved(game, phase.agents, self._came_of(question))
            yield _once(SessionEvent("scores", {"phase": phase.name, "round": at, **self._scored(points)}))

    async def _tell(self, text: Template, by: str | None, to: Audience) -> Events:
        words = text.render(self.story.values())
        yield of_utterance(await self._coordinator.tell(self.namespace, self._id, words, by=by, to=to))

    def _turn(self, phase: Phase, speaker: str | None, to: Audience) -> Events:
        return self._coordinator.turn(self.namespace, self._id, speaker=speaker, to=to, topology=phase.topology)

    def _round(self, phase: Phase) -> Events:
        """In a whispering phase each speaks to its neighbour alone; else all who take part hear.

        Speakers are named, so that each round begins with the first of them, whoever spoke before.
        """
        to = None if phase.topology == "whisper" else phase.audience
        speakers = None if phase.topology == "moderated" and phase.audience is None else phase.agents
        return self._coordinator.round(self.namespace, self._id, speakers=speakers, to=to, topology=phase.topology)

    def _put(self, phase: Phase, question: Question) -> Events:
        self._decided = None
        return self._coordinator.vote(self.namespace, self._id, question, voters=phase.agents)

    def _came_of(self, question: Question) -> Decision:
        """What the vote decided; one that somebody had dropped decides nothing."""
        return self._decided or Decision(question, None, (), (), (), ())

    def _scored(self, points: Mapping[str, float]) -> dict[str, Any]:
        shown = {name: number(more) for name, more in points.items()}
        totals = {name: number(self.story.scores[name]) for name in points}
        return {"moves": dict(self.story.moves), "points": shown, "scores": totals}

    def _note(self, phase: Phase, event: SessionEvent) -> None:
        """Keep what an agent has said, a given whisper included; ballots and picks are no words of the scene.

        And what a vote has decided.
        """
        if event.kind == "decision":
            self._decided = _decision(event.data)
        for by, text in _words(event):
            if by in self.story.scores:
                self.story.said(phase.name, by, text)

    @property
    def _id(self) -> str:
        assert self.session is not None, "the play has not begun"
        return self.session


async def _once(event: SessionEvent) -> Events:
    yield event


def _decision(told: Mapping[str, Any]) -> Decision:
    """A decision as its event tells it."""
    nested = {
        "question": Question(**told["question"]),
        "counts": tuple(Count(**each) for each in told["counts"]),
        "ballots": tuple(Ballot(**each) for each in told["ballots"]),
    }
    return Decision(**{**told, **nested})


def _words(event: SessionEvent) -> Iterator[tuple[str, str]]:
    if event.kind == "turn_complete" and event.data["purpose"] == "speak":
        yield event.data["speaker"], event.data["text"]
    elif event.kind == "message":
        yield event.data["utterance"]["by"], event.data["utterance"]["text"]
