"""Who has the floor: the round under way, turn by turn.

Owns turn and round numbers and the seats; keeps a speaker's context unchanged while it speaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rekindle.errors import BadRequest, Conflict
from rekindle_sessions.machine.contexts import SILENCE
from rekindle_sessions.machine.participants import named
from rekindle_sessions.machine.rounds import Round, Seats
from rekindle_sessions.machine.transcript import Transcript
from rekindle_sessions.machine.types import (
    Audience,
    Directive,
    Entry,
    Plan,
    Purpose,
    RoundBegun,
    RoundComplete,
    Speak,
    Turn,
    TurnEnded,
    TurnFailed,
)


class Floor:
    """The turns of one session. Directives are appended to the lists that callers pass in."""

    def __init__(self, plan: Plan, transcript: Transcript, known: Callable[[str], str]) -> None:
        self.num_rounds = 0
        self.num_turns = 0
        self.round: Round | None = None
        self.seats = Seats(tuple(each.name for each in plan.participants))
        self._plan = plan
        self._transcript = transcript
        self._known = known

    def begun(self) -> list[Turn]:
        """Return turns that have begun and not ended."""
        return [] if self.round is None else list(self.round.speaking.values())

    def expected(self) -> tuple[str, ...]:
        """Return who speaks next, as far as that is known."""
        moderator = self._plan.moderator
        if self.round is not None and (coming := self.round.expected(moderator)) is not None:
            return coming
        if self._plan.topology == "broadcast":
            return self.seats.names
        if self._plan.topology == "moderated":
            return (moderator,) if moderator else ()
        running = self.begun()
        return (self.seats.after(running[-1].speaker) if running else self.seats.next,)

    def begin(self, event: RoundBegun, done: list[Directive]) -> None:
        """Begin a round; BadRequest, NotFound or Conflict if that is not possible."""
        if self.round is not None:
            raise Conflict("a round is under way: let it end, or interrupt it with stop=round")
        self._check(event)
        current = self._new_round(event.together, event.to)
        if event.picks:
            everybody = event.speakers or self.seats.names
            current.candidates = tuple(name for name in everybody if name != self._plan.moderator)
            current.picks_left = event.picks
            self._ask_pick(done)
            return
        alone: list[Audience] = [(each,) for each in event.addressees]
        to = alone or [event.to] * len(event.speakers)
        self._line_up(zip(event.speakers, to, strict=True), "speak", done)

    def begin_ballots(self, voters: Iterable[str], to: Audience, hear: Audience, done: list[Directive]) -> None:
        """Begin a round of simultaneous ballots, each heard by `to` only."""
        self._new_round(True, hear)
        self._line_up(((voter, to) for voter in voters), "ballot", done)

    def end_turn(self, event: TurnEnded | TurnFailed, done: list[Directive]) -> Round | None:
        """End a turn and start the next; return the round if it ended. Conflict if the turn is not under way."""
        turn = self.round.speaking.get(event.turn) if self.round is not None else None
        if turn is None or self.round is None:
            raise Conflict(f"turn {event.turn} is not being spoken", param="turn")
        said = None
        if isinstance(event, TurnEnded):
            said = Entry("said", event.text or SILENCE, turn.speaker, thought=event.thought, turn=turn.number)
        self._transcript.contexts.end(turn.speaker, said)
        for ended, words in self.round.end(turn, event):
            if ended.purpose == "speak":
                self.seats.spoke(ended.speaker)
            if isinstance(words, TurnEnded):
                done.append(self._transcript.publish_turn(ended, words))
        done.extend(self._transcript.post(message) for message in event.then)
        return self._advance(turn, event, done)

    def drop(self, done: list[Directive]) -> None:
        """Drop the rest of the round; publish what was already said in it."""
        current, self.round = self.round, None
        if current is None:
            raise Conflict("no round is under way: there is nothing to stop")
        for turn in current.speaking.values():
            self._transcript.contexts.end(turn.speaker, None)
        for ended, words in current.drop():
            if ended.purpose == "speak":
                self.seats.spoke(ended.speaker)
            done.append(self._transcript.publish_turn(ended, words))

    def _check(self, event: RoundBegun) -> None:
        for name in (*event.speakers, *event.addressees, *(event.to or ())):
            self._known(name)
        if not event.speakers and not event.picks:
            raise BadRequest("a round needs speakers, or a number of picks", param="speakers")
        if event.together and len(set(event.speakers)) < len(event.speakers):
            raise BadRequest("who speaks together with others speaks once", param="speakers")
        if event.addressees and len(event.addressees) != len(event.speakers):
            raise BadRequest("name one addressee for each speaker", param="addressees")
        if event.picks < 0 or (event.picks and self._plan.moderator is None):
            raise BadRequest("only a moderator picks speakers: give the session one", param="picks")
        if event.picks and set(event.speakers) == {self._plan.moderator}:
            raise BadRequest("the moderator cannot pick itself: name others", param="speakers")

    def _new_round(self, together: bool, to: Audience) -> Round:
        self.num_rounds += 1
        self.round = Round(self.num_rounds, together, to)
        return self.round

    def _line_up(self, turns: Iterable[tuple[str, Audience]], purpose: Purpose, done: list[Directive]) -> None:
        """Number these turns and begin the first, or all of them in a `together` round."""
        assert self.round is not None
        for speaker, to in turns:
            self.num_turns += 1
            self.round.waiting.append(Turn(self.num_turns, speaker, to, purpose, self.round.number))
        self._begin_waiting(self.round, done)

    def _begin_waiting(self, current: Round, done: list[Directive]) -> None:
        for turn in current.begin():
            self._transcript.contexts.begin(turn.speaker, self._plan.host)
            done.append(Speak(turn))

    def _advance(self, turn: Turn, event: TurnEnded | TurnFailed, done: list[Directive]) -> Round | None:
        """After a turn, begin the next or the picked one, or end the round and return it."""
        current = self.round
        assert current is not None
        if turn.purpose == "pick":
            text = event.text if isinstance(event, TurnEnded) else ""
            picked = named(text, current.candidates) or self.seats.longest_silent(current.candidates)
            self._line_up([(picked, current.to)], "speak", done)
        elif current.speaking or current.waiting:
            self._begin_waiting(current, done)
        elif current.picks_left:
            self._ask_pick(done)
        else:
            self.round = None
            done.append(RoundComplete(current.number))
            return current
        return None

    def _ask_pick(self, done: list[Directive]) -> None:
        current, moderator = self.round, self._plan.moderator
        assert current is not None and moderator is not None
        current.picks_left -= 1
        question = f"Who speaks next? Answer with one name of: {', '.join(current.candidates)}."
        done.append(self._transcript.publish(self._plan.host, question, (moderator,)))
        self._line_up([(moderator, ())], "pick", done)

    def snapshot(self) -> tuple[Any, ...]:
        """Return the state as plain values, for comparison."""
        current = None if self.round is None else self.round.snapshot()
        return current, self.seats.snapshot(), self.num_rounds, self.num_turns

    def check(self) -> None:
        """Assert that exactly the begun turns are marked as speaking, and that a round under way has a speaker."""
        speaking = {turn.speaker for turn in self.begun()}
        for name in self.seats.names:
            is_marked = self._transcript.contexts.is_speaking(name)
            assert is_marked == (name in speaking), f"{name} is marked as speaking: {is_marked}"
        assert self.round is None or self.round.speaking, "a round in which nobody speaks"
