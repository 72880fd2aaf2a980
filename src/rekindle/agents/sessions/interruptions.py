"""Words that come behind the turns that are cut for them, before anybody else speaks.

Owns who waits for which turns to end. For one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rekindle.agents.log.journal import Durable
from rekindle.agents.machine.types import Directive, Hear, MessagePosted, Utterance
from rekindle.agents.sessions.turn import Voice
from rekindle.errors import RekindleError


@dataclass(frozen=True, slots=True)
class PutIn:
    """Words that were put in behind a turn."""

    utterance: Utterance
    durable: Durable


Answer = asyncio.Future[PutIn | None]  # None: what was played ended before, and nothing was told


@dataclass(frozen=True, slots=True, eq=False)
class Interruption:
    """Words, and the `voices` that were cut for them and have not ended."""

    told: MessagePosted
    voices: set[Voice]
    answer: Answer


class Interruptions:
    """Those of one run, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: list[Interruption] = []

    def add(self, told: MessagePosted, voices: Iterable[Voice]) -> Answer:
        """Have this told behind the last of these; what will come of it."""
        each = Interruption(told, set(voices), asyncio.get_running_loop().create_future())
        self._waiting.append(each)
        if not each.voices:
            self._answer([each], None)
        return each.answer

    def ended(self, voice: Voice) -> None:
        """It speaks no more."""
        for each in self._waiting:
            each.voices.discard(voice)

    def take(self, check: Callable[[MessagePosted], None]) -> list[Interruption]:
        """Those whose words come now; what `check` refuses by now is refused to whoever wanted it."""
        due: list[Interruption] = []
        for each in [each for each in self._waiting if not each.voices]:
            self._waiting.remove(each)
            try:
                check(each.told)
            except RekindleError as error:
                if not each.answer.done():
                    each.answer.set_exception(error)
                continue
            due.append(each)
        return due

    def told(self, taken: Sequence[Interruption], done: tuple[Sequence[Directive], Durable] | None) -> None:
        """What came of those that were taken: what the machine did, and when it is durable; None: it did nothing."""
        heard: list[Utterance] = []
        if done is not None:
            heard = [each.utterance for each in done[0] if isinstance(each, Hear) and each.utterance.turn is None]
            for each, utterance in zip(taken, heard, strict=False):  # the host may say more
                self._answer([each], PutIn(utterance, done[1]))
        self._answer(taken[len(heard) :], None)

    def end(self) -> None:
        """Nothing is played any more."""
        self._answer(self._waiting, None)

    def _answer(self, those: Iterable[Interruption], put_in: PutIn | None) -> None:
        for each in list(those):
            if each in self._waiting:
                self._waiting.remove(each)
            if not each.answer.done():
                each.answer.set_result(put_in)
