"""Turn order: seats, the turns of one round, the ballots of one vote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rekindle.errors import BadRequest
from rekindle_sessions.machine import decisions
from rekindle_sessions.machine.decisions import Again, Ballot, Decision, Question
from rekindle_sessions.machine.types import Audience, Plan, RoundBegun, Topology, Turn, TurnEnded, TurnFailed


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """Options of a round or turn in addition to the topology; `topology` None: the session's own.

    `speakers` limits who speaks, or who may be picked; `to` limits who hears it, `()` being nobody but the speaker.
    """

    speakers: tuple[str, ...] | None = None
    to: Audience = None
    topology: Topology | None = None


class Seats:
    """Seating order of the participants, who is next, and how long each has been silent."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._next = 0
        self._num_spoken = 0
        self._last_spoke: dict[str, int] = {}

    @property
    def next(self) -> str:
        """The next speaker in seating order."""
        return self.names[self._next]

    def after(self, name: str) -> str:
        """Return who sits after `name`."""
        return self.names[(self.names.index(name) + 1) % len(self.names)]

    def going_round(self) -> tuple[str, ...]:
        """Return everybody once, starting with the next speaker."""
        return self.names[self._next :] + self.names[: self._next]

    def spoke(self, name: str) -> None:
        """Record that `name` has had its turn."""
        self._num_spoken += 1
        self._last_spoke[name] = self._num_spoken
        self._next = (self.names.index(name) + 1) % len(self.names)

    def join(self, name: str) -> None:
        """Add a participant to the last seat."""
        self.names = (*self.names, name)

    def longest_silent(self, names: Sequence[str]) -> str:
        """Return which of these has not spoken for the longest time."""
        return min(names, key=lambda name: self._last_spoke.get(name, 0))

    def snapshot(self) -> tuple[Any, ...]:
        """Return the state as plain values."""
        return self.names, self._next, tuple(sorted(self._last_spoke.items()))


@dataclass(slots=True)
class Round:
    """One round under way. The turns of a `together` round are published in seating order."""

    number: int
    together: bool
    to: Audience
    picks_left: int = 0
    candidates: tuple[str, ...] = ()  # who may be picked
    waiting: list[Turn] = field(default_factory=list)
    speaking: dict[int, Turn] = field(default_factory=dict)
    ended: list[tuple[Turn, TurnEnded | TurnFailed]] = field(default_factory=list)
    unpublished: list[Turn] = field(default_factory=list)

    def begin(self) -> list[Turn]:
        """Return the turns that begin now."""
        if not self.together and self.speaking:
            return []
        begun = self.waiting if self.together else self.waiting[:1]
        self.waiting = self.waiting[len(begun) :]
        self.speaking |= {turn.number: turn for turn in begun}
        self.unpublished += begun
        return begun

    def end(self, turn: Turn, event: TurnEnded | TurnFailed) -> list[tuple[Turn, TurnEnded | TurnFailed]]:
        """Record a turn's end; return the turns to publish now, each after all turns before it in the order."""
        del self.speaking[turn.number]
        self.ended.append((turn, event))
        events = {each.number: words for each, words in self.ended}
        published = []
        while self.unpublished and self.unpublished[0].number in events:
            each = self.unpublished.pop(0)
            published.append((each, events[each.number]))
        return published

    def drop(self) -> list[tuple[Turn, TurnEnded]]:
        """Return the ended turns that have not been published yet."""
        events = {each.number: words for each, words in self.ended}
        left = [(turn, events.get(turn.number)) for turn in self.unpublished]
        return [(turn, words) for turn, words in left if isinstance(words, TurnEnded)]

    def expected(self, moderator: str | None) -> tuple[str, ...] | None:
        """Return who speaks after the current speakers; None if this round does not determine that."""
        if self.waiting:
            return (self.waiting[0].speaker,)
        if any(turn.purpose == "pick" for turn in self.speaking.values()):
            return ()
        if self.picks_left and moderator is not None:
            return (moderator,)
        return None

    def snapshot(self) -> tuple[Any, ...]:
        """Return the state as plain values."""
        speaking, ended = tuple(self.speaking.values()), tuple(self.ended)
        fixed = (self.number, self.together, self.to, self.picks_left, self.candidates)
        return (*fixed, tuple(self.waiting), speaking, ended, tuple(self.unpublished))


class Vote:
    """A vote under way: its ballots by round."""

    def __init__(self, question: Question, voters: tuple[str, ...]) -> None:
        self.question = question
        self.voters = voters
        self._rounds: list[tuple[Ballot, ...]] = []

    def audience(self, everybody: tuple[str, ...]) -> Audience:
        """Return who hears of the vote: all voters and the coordinator; None if that is everybody."""
        hear = set(self.voters) | ({self.question.coordinator} if self.question.coordinator else set())
        return None if hear >= set(everybody) else tuple(name for name in everybody if name in hear)

    def instructions(self) -> str:
        """Return the instructions to voters."""
        return decisions.instructions(self.question)

    def count(self, ended: Sequence[tuple[Turn, TurnEnded | TurnFailed]]) -> Decision | Again:
        """Add a round of ballots in the order of their turns; a failed turn counts as an empty ballot."""
        self._rounds.append(
            tuple(
                decisions.read_ballot(self.question, turn.speaker, words.text if isinstance(words, TurnEnded) else "")
                for turn, words in sorted(ended, key=lambda pair: pair[0].number)
            )
        )
        return decisions.judge(self.question, self._rounds)

    def announcement(self, decision: Decision) -> str:
        """Return the announcement of the result."""
        return decisions.announcement(decision)

    def snapshot(self) -> tuple[Any, ...]:
        """Return the state as plain values."""
        return self.question, self.voters, tuple(self._rounds)


def next_round(plan: Plan, seats: Seats, request: RoundRequest) -> RoundBegun:
    """Return a round in a topology: who speaks, to whom, and whether all speak from the same state."""
    topology, speakers = request.topology or plan.topology, request.speakers
    if topology == "moderated":
        candidates = tuple(name for name in speakers or seats.names if name != plan.moderator)
        return RoundBegun(speakers or (), to=request.to, picks=len(candidates))
    if speakers is None:
        speakers = seats.going_round() if topology in ("round_robin", "whisper") else seats.names
    if topology == "whisper" and request.to is None:
        return RoundBegun(speakers, addressees=tuple(_addressee(seats, speakers, name) for name in speakers))
    return RoundBegun(speakers, together=topology == "broadcast", to=request.to)


def next_turn(plan: Plan, seats: Seats, request: RoundRequest) -> RoundBegun:
    """Return a single turn in a topology; the first of `request.speakers` speaks, or one of them is picked."""
    topology = request.topology or plan.topology
    if topology == "moderated":
        alone = request.speakers is not None and len(request.speakers) == 1
        return RoundBegun(request.speakers or (), to=request.to, picks=0 if alone else 1)
    if request.speakers is None and topology == "turn_by_turn":
        raise BadRequest("in a turn-by-turn session the speaker has to be named", param="agent")
    speaker = request.speakers[0] if request.speakers else seats.next
    return replace(next_round(plan, seats, replace(request, speakers=(speaker,))), together=False)


def _addressee(seats: Seats, speakers: tuple[str, ...], name: str) -> str:
    """Return whom `name` whispers to: the next of the speakers, or the next in seating order."""
    if len(speakers) > 1 and name in speakers:
        return speakers[(speakers.index(name) + 1) % len(speakers)]
    return seats.after(name)
