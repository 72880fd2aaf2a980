"""A session as a pure state machine: events in, directives out. No engine, no clock, no files.

    MessagePosted ─────▶ Hear
    RoundBegun ────────▶ Speak … TurnEnded ──▶ Hear, Speak … ──▶ RoundComplete
    VoteBegun ─▶ Hear ─▶ Speak … (a round of ballots, as often as the question needs) ──▶ Decided

Owns what was said, who takes part, whose turn it is and what was decided. A session is the fold of its events: the same
events give the same state, numbers included, so storing the events stores the session. A refused event (BadRequest,
NotFound, Conflict) changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rekindle.errors import BadRequest, Conflict, NotFound, RekindleError
from rekindle.text.messages import Message
from rekindle_sessions.machine import prompt_layout
from rekindle_sessions.machine.decisions import Decision
from rekindle_sessions.machine.participants import check_plan, forked
from rekindle_sessions.machine.rounds import Round, RoundRequest, Vote, next_round, next_turn
from rekindle_sessions.machine.transcript import Transcript
from rekindle_sessions.machine.turn_order import Floor
from rekindle_sessions.machine.types import (
    Audience,
    Decided,
    Directive,
    Entry,
    Event,
    Forked,
    Hear,
    Merged,
    MessagePosted,
    Participant,
    Plan,
    Prelude,
    Rewound,
    RoundBegun,
    RoundDropped,
    Turn,
    TurnEnded,
    TurnFailed,
    Utterance,
    VoteBegun,
)

NO_PRELUDES: Mapping[str, Prelude] = {}
ANY = RoundRequest()


class Coordination:
    """One session; `preludes` by participant name come from earlier sessions. Raises BadRequest for an invalid plan."""

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

    @classmethod
    def fold(cls, plan: Plan, preludes: Mapping[str, Prelude], events: Iterable[Event]) -> Coordination:
        """Return the session of these events; BadRequest for a plan, or an event, that does not fit."""
        machine = cls(plan, preludes)
        for number, event in enumerate(events):
            try:
                machine.apply(event)
            except RekindleError as error:
                raise BadRequest(f"event {number} does not fit those before it: {error}") from error
        return machine

    # Queries.

    @property
    def names(self) -> tuple[str, ...]:
        """The participants and the host."""
        return (*self.participants, self.plan.host)

    @property
    def num_rounds(self) -> int:
        """Number of rounds that have begun, including rounds of ballots."""
        return self._floor.num_rounds

    @property
    def num_turns(self) -> int:
        """Number of turns that have been assigned."""
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
        """The vote under way, if any."""
        return self._vote

    def context(self, name: str) -> tuple[Entry, ...]:
        """Return a participant's context in its own order; it only grows, except on a rewind."""
        return self._contexts.of(self._known(name))

    def system(self, name: str) -> str:
        """Return a participant's system prompt."""
        return self._systems[self._known(name)]

    def prompt(self, name: str, *, partial: Entry | None = None, cue: bool = True) -> tuple[Message, ...]:
        """Return a participant's prompt; `partial` is being said right now. `cue`: it will speak, not only listen."""
        prompt = prompt_layout.messages(self.system(name), self.context(name), partial=partial)
        if cue and self.plan.layout == "trailing_cue":
            return prompt_layout.with_trailing_cue(prompt, name, self.plan.host)
        return prompt

    def stops(self, name: str) -> tuple[str, ...]:
        """Return the stop strings for a participant's replies."""
        return prompt_layout.stops((self.plan.host, *self.participants), self._known(name))

    def heard_by(self, name: str) -> list[Utterance]:
        """Return the utterances that reached a participant, including its own, in the order they were said."""
        return self._transcript.heard_by(self._known(name))

    def begun(self) -> list[Turn]:
        """Return turns that have begun and not ended; after a stop they are generated again from the same context."""
        return self._floor.begun()

    def expected(self) -> tuple[str, ...]:
        """Return who speaks next, as far as that is known."""
        return self._floor.expected()

    def next_round(self, request: RoundRequest = ANY) -> RoundBegun:
        """Return the event that begins a round in this topology, or in the requested one."""
        return next_round(self.plan, self._floor.seats, self._known_in(request))

    def next_turn(self, request: RoundRequest = ANY) -> RoundBegun:
        """Return the event that begins a single turn; BadRequest if the speaker has to be named."""
        return next_turn(self.plan, self._floor.seats, self._known_in(request))

    def check_message(self, event: MessagePosted) -> None:
        """Raise what posting this message would raise."""
        for name in event.to or ():
            self._known(name)
        self._transcript.check_message(event)

    def check_fork(self, event: Forked) -> Participant:
        """Return the participant that would join; raises what forking would raise."""
        return forked(self.participants, self.plan.host, self._require_silent(event.source), event)

    # Events.

    def apply(self, event: Event) -> list[Directive]:
        """Apply an event and return the directives to carry out now."""
        done: list[Directive] = []
        match event:
            case MessagePosted():
                self.check_message(event)
                done.append(self._transcript.post(event))
            case RoundBegun():
                self._floor.begin(event, done)
            case TurnEnded() | TurnFailed():
                for message in event.then:
                    self.check_message(message)
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
        identity = f"From now on you are {joined.name}, no longer {event.source}.{persona}"
        done.append(self._host_says(identity, (joined.name,)))
        self._contexts.mark_joined(joined.name)

    def _host_says(self, text: str, to: Audience) -> Hear:
        return self._transcript.publish(self.plan.host, text, to)

    def _known(self, name: str) -> str:
        if name not in self.participants:
            raise NotFound(f"nobody here is called {name!r}: {', '.join(self.participants)} are", param="name")
        return name

    def _known_in(self, request: RoundRequest) -> RoundRequest:
        for name in (*(request.speakers or ()), *(request.to or ())):
            self._known(name)
        return request

    def _require_silent(self, name: str) -> Participant:
        if self._contexts.is_speaking(self._known(name)):
            raise Conflict(f"{name} is speaking: wait for the end of the turn")
        return self.participants[name]

    def snapshot(self) -> tuple[Any, ...]:
        """Return all state as plain values, for comparison."""
        vote = None if self._vote is None else self._vote.snapshot()
        said = (tuple(self.utterances), tuple(self.decisions), self._contexts.snapshot())
        return (*said, tuple(self.participants.values()), self._floor.snapshot(), vote)

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        self._floor.check()
        self._contexts.check()
        for name in self.participants:
            kinds = [entry.kind for entry in self._contexts.of(name)]
            assert kinds[0] != "said", f"{name} spoke before it heard anything"
            assert ("said", "said") not in list(pairwise(kinds)), f"{name} speaks twice in a row"
        assert [each.number for each in self.utterances] == list(range(len(self.utterances))), "numbers count up"
        assert self._vote is None or self._floor.round is not None, "a vote without a round of ballots"


def _earlier(prelude: Prelude) -> tuple[Entry, ...]:
    """Return the entries of earlier sessions without their numbers, which mean nothing here."""
    return tuple(Entry(each.kind, each.text, each.by, each.private, each.thought) for each in prelude.entries)
