"""Whose turn it is: seats, the turns of one round, the ballots of one vote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rekindle.agents.machine import decisions
from rekindle.agents.machine.decisions import Again, Ballot, Decision, Question
from rekindle.agents.machine.types import Audience, Plan, RoundBegun, Topology, Turn, TurnEnded, TurnFailed
from rekindle.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of a round or a turn beside what the topology says; `topology` None: the session's own.

    `speakers` bound who speaks, or who may be picked; `to` bounds who hears it, `()` being nobody but the speaker.
    """

    speakers: tuple[str, ...] | None = None
    to: Audience = None
    topology: Topology | None = None


class Seats:
    """The order in which participants sit, whose turn it would be, and who has been silent for how long."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._next = 0
        self._num_spoken = 0
        self._last_spoke: dict[str, int] = {}

    @property
    def next(self) -> str:
        """Whose turn it is, going round."""
        return self.names[self._next]

    def after(self, name: str) -> str:
        """Who sits behind somebody."""
        return self.names[(self.names.index(name) + 1) % len(self.names)]

    def going_round(self) -> tuple[str, ...]:
        """Everybody once, from the one whose turn it is."""
        return self.names[self._next :] + self.names[: self._next]

    def spoke(self, name: str) -> None:
        """It has had its turn."""
        self._num_spoken += 1
        self._last_spoke[name] = self._num_spoken
        self._next = (self.names.index(name) + 1) % len(self.names)

    def join(self, name: str) -> None:
        """Somebody sits down behind all others."""
        self.names = (*self.names, name)

    def longest_silent(self, names: Sequence[str]) -> str:
        """Of these, who has not spoken for the longest time."""
        return min(names, key=lambda name: self._last_spoke.get(name, 0))

    def snapshot(self) -> tuple[Any, ...]:
        """The state as plain values."""
        return self.names, self._next, tuple(sorted(self._last_spoke.items()))


@dataclass(slots=True)
class Round:
    """One round under way. Of one that is spoken `together` the words are published in the order of the seats."""

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
        """The turns that begin now."""
        if not self.together and self.speaking:
            return []
        begun = self.waiting if self.together else self.waiting[:1]
        self.waiting = self.waiting[len(begun) :]
        self.speaking |= {turn.number: turn for turn in begun}
        self.unpublished += begun
        return begun

    def end(self, turn: Turn, event: TurnEnded | TurnFailed) -> list[tuple[Turn, TurnEnded | TurnFailed]]:
        """Note a turn's end; those that are published now, each behind all that sit before it."""
        del self.speaking[turn.number]
        self.ended.append((turn, event))
        events = {each.number: words for each, words in self.ended}
        published = []
        while self.unpublished and self.unpublished[0].number in events:
            each = self.unpublished.pop(0)
            published.append((each, events[each.number]))
        return published

    def drop(self) -> list[tuple[Turn, TurnEnded]]:
        """What was said and is not published yet."""
        events = {each.number: words for each, words in self.ended}
        left = [(turn, events.get(turn.number)) for turn in self.unpublished]
        return [(turn, words) for turn, words in left if isinstance(words, TurnEnded)]

    def expected(self, moderator: str | None) -> tuple[str, ...] | None:
        """Who speaks after those who speak now; None: that is not for this round to say."""
        if self.waiting:
            return (self.waiting[0].speaker,)
        if any(turn.purpose == "pick" for turn in self.speaking.values()):
            return ()
        if self.picks_left and moderator is not None:
            return (moderator,)
        return None

    def snapshot(self) -> tuple[Any, ...]:
        """The state as plain values."""
        speaking, ended = tuple(self.speaking.values()), tuple(self.ended)
        asked = (self.number, self.together, self.to, self.picks_left, self.candidates)
        return (*asked, tuple(self.waiting), speaking, ended, tuple(self.unpublished))


class Vote:
    """A vote under way: its ballots, round by round."""

    def __init__(self, question: Question, voters: tuple[str, ...]) -> None:
        self.question = question
        self.voters = voters
        self._rounds: list[tuple[Ballot, ...]] = []

    def audience(self, everybody: tuple[str, ...]) -> Audience:
        """Who hears of it: all voters and the coordinator; None where that is everybody."""
        hear = set(self.voters) | ({self.question.coordinator} if self.question.coordinator else set())
        return None if hear >= set(everybody) else tuple(name for name in everybody if name in hear)

    def instructions(self) -> str:
        """What voters are told."""
        return decisions.instructions(self.question)

    def count(self, ended: Sequence[tuple[Turn, TurnEnded | TurnFailed]]) -> Decision | Again:
        """Add a round of ballots, in the order of their turns; who failed has said nothing."""
        self._rounds.append(
            tuple(
                decisions.read_ballot(self.question, turn.speaker, words.text if isinstance(words, TurnEnded) else "")
                for turn, words in sorted(ended, key=lambda pair: pair[0].number)
            )
        )
        return decisions.judge(self.question, self._rounds)

    def announcement(self, decision: Decision) -> str:
        """What everybody is told of it."""
        return decisions.announcement(decision)

    def snapshot(self) -> tuple[Any, ...]:
        """The state as plain values."""
        return self.question, self.voters, tuple(self._rounds)


def next_round(plan: Plan, seats: Seats, asked: Asked) -> RoundBegun:
    """What a round is in a topology: who speaks, to whom, and whether to the same state."""
    topology, speakers = asked.topology or plan.topology, asked.speakers
    if topology == "moderated":
        candidates = tuple(name for name in speakers or seats.names if name != plan.moderator)
        return RoundBegun(speakers or (), to=asked.to, picks=len(candidates))
    if speakers is None:
        speakers = seats.going_round() if topology in ("round_robin", "whisper") else seats.names
    if topology == "whisper" and asked.to is None:
        return RoundBegun(speakers, addressees=tuple(_behind(seats, speakers, name) for name in speakers))
    return RoundBegun(speakers, together=topology == "broadcast", to=asked.to)


def next_turn(plan: Plan, seats: Seats, asked: Asked) -> RoundBegun:
    """What one turn is in a topology; of `asked.speakers` the first speaks, or one of them is picked."""
    topology = asked.topology or plan.topology
    if topology == "moderated":
        alone = asked.speakers is not None and len(asked.speakers) == 1
        return RoundBegun(asked.speakers or (), to=asked.to, picks=0 if alone else 1)
    if asked.speakers is None and topology == "turn_by_turn":
        raise BadRequest("in a turn-by-turn session the speaker has to be named", param="agent")
    speaker = asked.speakers[0] if asked.speakers else seats.next
    return replace(next_round(plan, seats, replace(asked, speakers=(speaker,))), together=False)


def _behind(seats: Seats, speakers: tuple[str, ...], name: str) -> str:
    """Whom somebody whispers to: the next of those who speak, or the next at the table."""
    if len(speakers) > 1 and name in speakers:
        return speakers[(speakers.index(name) + 1) % len(speakers)]
    return seats.after(name)
