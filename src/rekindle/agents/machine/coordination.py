"""A session as a pure state machine: events in, directives out. No engine, no clock, no files.

    Told ──────────────▶ Hear
    RoundBegun ────────▶ Speak … TurnEnded ──▶ Hear, Speak … ──▶ RoundComplete
    VoteBegun ─▶ Hear ─▶ Speak … (a round of ballots, as often as the question needs) ──▶ Decided

Owns what was said, who takes part, whose turn it is and what was decided. A session is the fold of its events: the same
events give the same state, numbers included, so whoever keeps the events keeps the session. An event that is refused
(BadRequest, NotFound, Conflict) has changed nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rekindle.agents.machine import prompt_layout
from rekindle.agents.machine.decisions import Decision
from rekindle.agents.machine.participants import check_plan, forked
from rekindle.agents.machine.rounds import Asked, Round, Vote, next_round, next_turn
from rekindle.agents.machine.transcript import Transcript
from rekindle.agents.machine.turn_order import Floor
from rekindle.agents.machine.types import (
    Audience,
    Decided,
    Directive,
    Entry,
    Event,
    Forked,
    Hear,
    Merged,
    Participant,
    Plan,
    Prelude,
    Rewound,
    RoundBegun,
    RoundDropped,
    Told,
    Turn,
    TurnEnded,
    TurnFailed,
    Utterance,
    VoteBegun,
)
from rekindle.errors import BadRequest, Conflict, NotFound
from rekindle.text.messages import Message

NO_PRELUDES: Mapping[str, Prelude] = {}
ANY = Asked()


class Coordination:
    """One session; `preludes` are what participants bring along, by name. Raises BadRequest for a plan that is none."""

    def __init__(self, plan: Plan, preludes: Mapping[str, Prelude] = NO_PRELUDES) -> None:
        check_plan(plan)
        self.plan = plan
        self.participants: dict[str, Participant] = {each.name: each for each in plan.participants}
        self.decisions: list[Decision] = []
        self._transcript = Transcript(plan.host, self.participants)
        self._contexts = self._transcript.contexts
        self._systems: dict[str, str] = {}
        self._vote: Vote | None = None
        self._floor = Floor(plan, self._transcript, self._known)
        for name, each in self.participants.items():
            prelude = preludes.get(name)
            self._systems[name] = prelude.system if prelude else prompt_layout.opening(plan, each)
            self._contexts.add(name, _earlier(prelude) if prelude else ())
        self._transcript.open(plan, {name for name in preludes if name in self.participants})

    # What can be asked of it.

    @property
    def names(self) -> tuple[str, ...]:
        """Who takes part, and the host."""
        return (*self.participants, self.plan.host)

    @property
    def num_rounds(self) -> int:
        """Rounds that have begun, rounds of ballots included."""
        return self._floor.num_rounds

    @property
    def num_turns(self) -> int:
        """Turns that have been given out."""
        return self._floor.num_turns

    @property
    def is_unfinished(self) -> bool:
        """Whether a round or a vote is under way."""
        return self._floor.round is not None

    @property
    def utterances(self) -> Sequence[Utterance]:
        """All that was said, by number."""
        return self._transcript.utterances

    @property
    def voting(self) -> Vote | None:
        """The vote that is under way."""
        return self._vote

    def context(self, name: str) -> tuple[Entry, ...]:
        """What a participant has taken in, in its own order; it only grows, but for a rewind."""
        return self._contexts.of(self._known(name))

    def system(self, name: str) -> str:
        """How a participant's prompt begins."""
        return self._systems[self._known(name)]

    def prompt(self, name: str, *, partial: Entry | None = None, cue: bool = True) -> tuple[Message, ...]:
        """The prompt of a participant; `partial` is being said right now. `cue`: it is to speak, not only to listen."""
        prompt = prompt_layout.messages(self.system(name), self.context(name), partial=partial)
        if cue and self.plan.layout == "trailing_cue":
            return prompt_layout.with_trailing_cue(prompt, name, self.plan.host)
        return prompt

    def stops(self, name: str) -> tuple[str, ...]:
        """Strings that end a reply of a participant."""
        return prompt_layout.stops((self.plan.host, *self.participants), self._known(name))

    def heard_by(self, name: str) -> list[Utterance]:
        """What reached a participant, its own words included, in the order it was said."""
        return self._transcript.heard_by(self._known(name))

    def begun(self) -> list[Turn]:
        """Turns that have begun and not ended; after an interruption they are spoken again, from the same base."""
        return self._floor.begun()

    def expected(self) -> tuple[str, ...]:
        """Who speaks next, as far as that is known."""
        return self._floor.expected()

    def next_round(self, asked: Asked = ANY) -> RoundBegun:
        """What a round is in this topology, or in the one asked for."""
        return next_round(self.plan, self._floor.seats, self._known_in(asked))

    def next_turn(self, asked: Asked = ANY) -> RoundBegun:
        """What one turn is; BadRequest where the speaker has to be named."""
        return next_turn(self.plan, self._floor.seats, self._known_in(asked))

    def check_told(self, event: Told) -> None:
        """Raise what telling this would."""
        for name in event.to or ():
            self._known(name)
        self._transcript.check_told(event)

    def check_fork(self, event: Forked) -> Participant:
        """Who would join; raises what forking would."""
        return forked(self.participants, self.plan.host, self._require_silent(event.source), event)

    # What happens to it.

    def apply(self, event: Event) -> list[Directive]:
        """Take an event in; what is to be done now."""
        done: list[Directive] = []
        match event:
            case Told():
                self.check_told(event)
                done.append(self._transcript.tell(event))
            case RoundBegun():
                self._floor.begin(event, done)
            case TurnEnded() | TurnFailed():
                for told in event.then:
                    self.check_told(told)
                ended = self._floor.end_turn(event, done)
                if ended is not None and self._vote is not None:
                    self._count(self._vote, ended, done)
            case RoundDropped():
                self._floor.drop(done)
                self._vote = None
            case VoteBegun():
                self._begin_vote(event, done)
            case Forked():
                self._fork(event, done)
            case Rewound():
                self._require_silent(event.name)
                self._contexts.rewind(event.name, event.turns)
            case Merged():
                self._require_silent(event.source)
                self._require_silent(event.target)
                self._transcript.merge(event)
        return done

    def _begin_vote(self, event: VoteBegun, done: list[Directive]) -> None:
        if self._floor.round is not None:
            raise Conflict("a round is under way: let it end before the vote")
        voters, question = event.voters, event.question
        for name in voters + ((question.coordinator,) if question.coordinator else ()):
            self._known(name)
        if not voters or len(set(voters)) < len(voters):
            raise BadRequest("voters must be some of the participants, each once", param="voters")
        self._vote = Vote(question, voters)
        self._ask_ballots(self._vote, self._vote.instructions(), voters, done)

    def _ask_ballots(self, vote: Vote, words: str, voters: tuple[str, ...], done: list[Directive]) -> None:
        hear = vote.audience(tuple(self.participants))
        done.append(self._host_says(words, hear))
        self._floor.begin_ballots(voters, hear if vote.question.is_open else (), hear, done)

    def _count(self, vote: Vote, ended: Round, done: list[Directive]) -> None:
        result = vote.count(ended.ended)
        if not isinstance(result, Decision):
            self._ask_ballots(vote, result.announcement, result.voters, done)
            return
        self._vote = None
        self.decisions.append(result)
        done.append(self._host_says(vote.announcement(result), vote.audience(tuple(self.participants))))
        done.append(Decided(result))

    def _fork(self, event: Forked, done: list[Directive]) -> None:
        joined = self.check_fork(event)
        self._transcript.fork(event.source, joined.name)
        self._systems[joined.name] = self._systems[event.source]
        self.participants[joined.name] = joined
        self._floor.seats.join(joined.name)
        words = f"{joined.name} joins, and remembers all that {event.source} does."
        done.append(self._host_says(words, None))
        persona = f" {event.persona.strip()}" if event.persona.strip() else ""
        told = f"From now on you are {joined.name}, no longer {event.source}.{persona}"
        done.append(self._host_says(told, (joined.name,)))
        self._contexts.came_in(joined.name)

    def _host_says(self, text: str, to: Audience) -> Hear:
        return self._transcript.publish(self.plan.host, text, to)

    def _known(self, name: str) -> str:
        if name not in self.participants:
            raise NotFound(f"nobody here is called {name!r}: {', '.join(self.participants)} are", param="name")
        return name

    def _known_in(self, asked: Asked) -> Asked:
        for name in (*(asked.speakers or ()), *(asked.to or ())):
            self._known(name)
        return asked

    def _require_silent(self, name: str) -> Participant:
        if self._contexts.is_speaking(self._known(name)):
            raise Conflict(f"{name} is speaking: wait for the end of the turn")
        return self.participants[name]

    def snapshot(self) -> tuple[Any, ...]:
        """All of the state as plain values, to be compared."""
        vote = None if self._vote is None else self._vote.snapshot()
        said = (tuple(self.utterances), tuple(self.decisions), self._contexts.snapshot())
        return (*said, tuple(self.participants.values()), self._floor.snapshot(), vote)

    def check(self) -> None:
        """Assert what must hold between events."""
        self._floor.check()
        self._contexts.check()
        for name in self.participants:
            kinds = [entry.kind for entry in self._contexts.of(name)]
            assert kinds[0] != "said", f"{name} spoke before it heard anything"
            assert ("said", "said") not in list(pairwise(kinds)), f"{name} speaks twice in a row"
        assert [each.number for each in self.utterances] == list(range(len(self.utterances))), "numbers count up"
        assert self._vote is None or self._floor.round is not None, "a vote without a round of ballots"


def _earlier(prelude: Prelude) -> tuple[Entry, ...]:
    """Entries of other sessions: their numbers mean nothing here."""
    return tuple(Entry(each.kind, each.text, each.by, each.private, each.thought) for each in prelude.entries)
