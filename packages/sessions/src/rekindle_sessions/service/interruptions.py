"""Interruptions: messages posted right after the turns they cut short, before anybody else speaks.

Owns which message waits for which turns to end. For one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rekindle.errors import RekindleError
from rekindle_sessions.log.journal import Durable
from rekindle_sessions.machine.types import Directive, Hear, MessagePosted, Utterance
from rekindle_sessions.service.turn import Voice


@dataclass(frozen=True, slots=True)
class Posted:
    """A message that was posted after a turn."""

    utterance: Utterance
    durable: Durable


Answer = asyncio.Future[Posted | None]  # None: the run ended first, and nothing was posted


@dataclass(frozen=True, slots=True, eq=False)
class Interruption:
    """A message, and the interrupted `voices` that have not ended."""

    message: MessagePosted
    voices: set[Voice]
    answer: Answer


class Interruptions:
    """The interruptions of one run, in order of arrival."""

    def __init__(self) -> None:
        self._waiting: list[Interruption] = []

    def add(self, message: MessagePosted, voices: Iterable[Voice]) -> Answer:
        """Post a message after the last of these voices; return a future of the result."""
        each = Interruption(message, set(voices), asyncio.get_running_loop().create_future())
        self._waiting.append(each)
        if not each.voices:
            self._answer([each], None)
        return each.answer

    def ended(self, voice: Voice) -> None:
        """Record that a voice has ended."""
        for each in self._waiting:
            each.voices.discard(voice)

    def take(self, check: Callable[[MessagePosted], None]) -> list[Interruption]:
        """Remove and return the interruptions due now; if `check` fails, the sender gets the error."""
        due: list[Interruption] = []
        for each in [each for each in self._waiting if not each.voices]:
            self._waiting.remove(each)
            try:
                check(each.message)
            except RekindleError as error:
                if not each.answer.done():
                    each.answer.set_exception(error)
                continue
            due.append(each)
        return due

    def resolve(self, taken: Sequence[Interruption], done: tuple[Sequence[Directive], Durable] | None) -> None:
        """Resolve the taken ones with the machine's directives and their durability; None: nothing was applied."""
        heard: list[Utterance] = []
        if done is not None:
            heard = [each.utterance for each in done[0] if isinstance(each, Hear) and each.utterance.turn is None]
            for each, utterance in zip(taken, heard, strict=False):  # the host may say more
                self._answer([each], Posted(utterance, done[1]))
        self._answer(taken[len(heard) :], None)

    def end(self) -> None:
        """Resolve all that still wait with None: the run has ended."""
        self._answer(self._waiting, None)

    def _answer(self, those: Iterable[Interruption], posted: Posted | None) -> None:
        for each in list(those):
            if each in self._waiting:
                self._waiting.remove(each)
            if not each.answer.done():
                each.answer.set_result(posted)
