"""A run: play a turn, a round or a vote, and publish events as they happen.

Designed to minimize the gap between two speakers. On the last delta of a turn, its event is applied to the machine and
the next turn's request is submitted within one step of the event loop; meanwhile the turn is written, and published
when it is durable. Events keep their order: those after a turn's end wait for it.

    deltas ─▶ voices ─▶ machine ─▶ voices …      immediately
                  └────▶ outbox ─▶ caller and watchers      in order, once durable

A stopped run leaves its turns begun: they are generated again from the same context. An interrupting message is posted
after the last of the turns it cut short.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from rekindle.errors import Cancelled, Conflict, RekindleError, RequestFailed
from rekindle.model.params import SamplingParams
from rekindle.worker import MEANT_FOR_THE_LOOP
from rekindle_sessions.log.journal import Durable, failure
from rekindle_sessions.machine.coordination import Coordination
from rekindle_sessions.machine.types import (
    Decided,
    Directive,
    Event,
    Hear,
    MessagePosted,
    RoundComplete,
    RoundDropped,
    Speak,
    Turn,
    TurnEnded,
    TurnFailed,
)
from rekindle_sessions.service.events import SessionEvent, Spoken, of_decision, of_failure, of_start, of_utterance
from rekindle_sessions.service.interruptions import Answer, Interruptions
from rekindle_sessions.service.session import Session
from rekindle_sessions.service.turn import Tally, Voice, request_of

logger = logging.getLogger(__name__)
PAUSE_S = 1.0  # after the last turn: a run that begins later follows a pause, not a gap


class Outbox:
    """Calls `emit` with each event in order; stops for good once a write has failed."""

    def __init__(self, emit: Callable[[SessionEvent], None]) -> None:
        self._emit = emit
        self._items: asyncio.Queue[tuple[SessionEvent, Durable | None] | None] = asyncio.Queue()
        self._is_closed = False

    def put(self, event: SessionEvent, durable: Durable | None) -> bool:
        """Queue an event; False if the outbox is closed."""
        if not self._is_closed:
            self._items.put_nowait((event, durable))
        return not self._is_closed

    def close(self) -> None:
        """Accept no more events."""
        self._is_closed = True
        self._items.put_nowait(None)

    async def drain(self) -> None:
        """Emit queued events until the outbox is closed and empty."""
        is_lost = False
        while (item := await self._items.get()) is not None:
            event, durable = item
            if durable is not None and not durable.done():
                await asyncio.wait([durable])
            is_lost = is_lost or (durable is not None and failure(durable) is not None)
            if not is_lost:
                self._emit(event)


class Run:
    """Carries out directives until the machine has no more. `begin` once; `events` ends with None."""

    def __init__(self, session: Session, params: SamplingParams) -> None:
        self.events: asyncio.Queue[SessionEvent | None] = asyncio.Queue()
        self.failure: RekindleError | None = None
        self._session = session
        self._params = params
        self._voices: dict[asyncio.Task[TurnEnded | TurnFailed | None], Voice] = {}
        self._ended: dict[int, Voice] = {}  # ended, not published yet
        self._tallies: dict[int, Tally] = {}
        self._interruptions = Interruptions()
        self._outbox = Outbox(self._emit)
        self._is_stopped = False
        self._is_dropped = False
        self._task: asyncio.Task[None] | None = None

    def begin(self, directives: Sequence[Directive], durable: Durable | None) -> None:
        """Start with these directives. Until it ends, this is the session's run."""
        assert self._session.run is None, "one thing at a time is played"
        self._session.run = self
        spoke_last_at = self._session.spoke_last_at
        if spoke_last_at is not None and self._session.shared.timer() - spoke_last_at > PAUSE_S:
            self._session.spoke_last_at = None
        if durable is not None:
            durable.add_done_callback(self._written)
        try:
            self._carry_out(directives, durable)
        except MEANT_FOR_THE_LOOP:
            raise
        except BaseException as error:
            self._defect(error)
        self._task = asyncio.create_task(self._play())

    def announce(self, event: SessionEvent, durable: Durable) -> bool:
        """Publish an outside event in order among the run's own events; False: the run is over."""
        durable.add_done_callback(self._written)
        return self._outbox.put(event, durable)

    async def stop(self) -> None:
        """Cancel within a step and wait for the end; turns stay begun. Stopping twice, or at the end, is safe."""
        self._stop_voices()
        await self.wait()

    async def wait(self) -> None:
        """Wait for the end, without raising its error."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def result(self) -> None:
        """Raise the error that ended the run early, if any."""
        if self._task is not None and self._task.done():
            self._task.result()
        if self.failure is not None:
            raise self.failure
        if self._is_stopped:
            raise Cancelled("the run was stopped; unfinished turns can be resumed")

    def interrupt(self, message: MessagePosted) -> Answer:
        """End all current turns with the text so far, post `message`, and continue with the next turns."""
        self._cut()
        return self._interruptions.add(message, self._voices.values())

    def _cut(self) -> None:
        for voice in self._voices.values():
            voice.interrupt()

    async def drop(self) -> None:
        """End all current turns with the text so far, and start no more."""
        self._is_dropped = True
        self._cut()
        await self.wait()

    def _stop_voices(self) -> None:
        self._is_stopped = True
        for voice in self._voices.values():
            voice.stop()

    def _fail(self, error: RekindleError) -> None:
        self.failure = self.failure or error
        self._stop_voices()

    def _defect(self, error: BaseException) -> None:
        """Border: an unexpected error ends this run and nothing else."""
        logger.error("what was played in session %s ended", self._session.id, exc_info=error)
        failed = RequestFailed(f"what was played ended unexpectedly: {error!r}")
        failed.__cause__ = error
        self._fail(failed)

    async def _play(self) -> None:
        session = self._session
        drain = asyncio.create_task(self._outbox.drain())
        try:
            await self._listen_to_voices()
        except MEANT_FOR_THE_LOOP:
            raise
        except BaseException as error:
            self._defect(error)
        finally:
            try:
                await self._wind_up(drain)
            finally:
                session.run = None
                self.events.put_nowait(None)
                self._interruptions.end()
        session.catch_up()

    async def _listen_to_voices(self) -> None:
        while self._voices:
            ended, _ = await asyncio.wait(self._voices, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in self._voices if task in ended]:
                self._end(task, self._voices.pop(task))
        if self._is_dropped and not self._is_stopped and self._session.machine.is_unfinished:
            self._commit(RoundDropped())

    async def _wind_up(self, drain: asyncio.Task[None]) -> None:
        for voice in self._voices.values():
            voice.stop()
        await asyncio.gather(*self._voices, return_exceptions=True)
        self._outbox.close()
        await drain
        if self.failure is not None:
            self._session.publish(SessionEvent("error", {"message": str(self.failure)}))

    def _end(self, task: asyncio.Task[TurnEnded | TurnFailed | None], voice: Voice) -> None:
        """Handle the end of a turn: apply its event and carry out what follows."""
        self._interruptions.ended(voice)
        try:
            event = task.result()
        except RekindleError as error:
            self._fail(error)
            return
        if self._is_stopped or (self._is_dropped and voice.turn.purpose != "speak"):
            return  # it stays begun, or is dropped with its round: an interrupted vote decides nothing
        if event is None:
            self._fail(Cancelled("the engine stopped the turn; unfinished turns can be resumed"))
            return
        self._session.spoke_last_at = voice.last_at or self._session.spoke_last_at
        if isinstance(event, TurnEnded):
            self._ended[voice.turn.number] = voice
        failures = [of_failure(voice.turn, event.reason, self._spoken(voice))] if isinstance(event, TurnFailed) else []
        due = self._interruptions.take(self._session.machine.check_message)
        done = self._commit(replace(event, then=tuple(each.message for each in due)), *failures)
        self._interruptions.resolve(due, done)

    def _commit(self, event: Event, *published: SessionEvent) -> tuple[list[Directive], Durable] | None:
        """Apply an event, publish these for it, and carry out its directives; None: the run has failed."""
        try:
            done, durable = self._session.commit(event)
        except RekindleError as error:
            self._fail(error)
            return None
        durable.add_done_callback(self._written)
        for each in published:
            self._outbox.put(each, durable)
        self._carry_out(done, durable)
        return done, durable

    def _written(self, durable: Durable) -> None:
        error = failure(durable)
        if isinstance(error, RekindleError):
            self._fail(error)

    def _carry_out(self, directives: Sequence[Directive], durable: Durable | None) -> None:
        """Start speakers first: everything else can wait."""
        for directive in directives:
            if isinstance(directive, Speak):
                self._speak(directive.turn)
        for directive in directives:
            for event in self._described(directive):
                self._outbox.put(event, durable)

    def _described(self, directive: Directive) -> list[SessionEvent]:
        match directive:
            case Speak():
                if self._is_stopped or self._is_dropped:
                    return []
                return [of_start(directive.turn, self._session.speaker(directive.turn.speaker).agent)]
            case Decided():
                return [of_decision(directive.decision)]
            case RoundComplete():
                tally = self._tallies.pop(directive.round, Tally())
                return [SessionEvent("round_complete", {"round": directive.round, **tally.as_dict()})]
            case Hear():
                return self._described_words(directive)

    def _described_words(self, heard: Hear) -> list[SessionEvent]:
        utterance = heard.utterance
        if utterance.turn is None:
            return [of_utterance(utterance)]
        voice = self._ended.pop(utterance.turn, None)
        if voice is None:
            return [of_utterance(utterance)]  # ended in a run that was stopped before its turn could be published
        self._tallies.setdefault(voice.turn.round or 0, Tally()).add(voice)
        return [SessionEvent("turn_complete", voice.described(utterance), self._spoken(voice))]

    def _spoken(self, voice: Voice) -> Spoken:
        return voice.spoken(self._session.agent(voice.turn.speaker))

    def _speak(self, turn: Turn) -> None:
        session = self._session
        if self._is_stopped or self._is_dropped:
            return
        session.listening.hold()
        taken_in_tokens = session.listening.begins(turn.speaker)
        request = request_of(session.speaker(turn.speaker), turn, session.machine.prompt(turn.speaker), self._params)
        voice = Voice.begin(
            session.shared.engine,
            replace(request, waits_aside=bool(self._voices)),  # turns that begin together count as one waiting request
            turn,
            timer=session.shared.timer,
            spoke_last_at=session.spoke_last_at,
            taken_in_tokens=taken_in_tokens,
        )
        self._voices[asyncio.create_task(self._follow(voice))] = voice

    async def _follow(self, voice: Voice) -> TurnEnded | TurnFailed | None:
        """Stream a turn to its end; return the event to apply, or None if it stays begun."""
        try:
            async for delta in voice.generation:
                is_first = voice.first_at is None
                text = voice.take(delta)
                if text:
                    data = {"turn": voice.turn.number, "speaker": voice.turn.speaker, "text": text}
                    self._outbox.put(SessionEvent("token", data), None)
                if delta.finish_reason is None and self._session.listens:
                    self._let_listen(voice, is_first=is_first)
        except RekindleError as error:
            return voice.failed(error)
        if voice.report is not None:
            num_tokens = voice.report.prompt_tokens + voice.num_tokens
            self._session.listening.num_tokens[voice.turn.speaker] = num_tokens
        return voice.ended()

    def _let_listen(self, voice: Voice, *, is_first: bool) -> None:
        """Have the next speaker absorb the text so far; at the first token, have the others prefill what they heard."""
        session = self._session
        speaking = {each.turn.speaker for each in self._voices.values()}
        coming = [name for name in session.machine.expected() if name not in speaking][:1]
        if is_first:
            session.catch_up(but=[*speaking, *coming])
        if len(self._voices) == 1 and coming and session.listening.is_due(coming[0], voice.num_tokens):
            partial = voice.heard_by(coming[0], session.machine.participants)
            session.listening.overhear(coming[0], partial, voice.num_tokens)

    def _emit(self, event: SessionEvent) -> None:
        self.events.put_nowait(event)
        self._session.publish(event)


def check_no_vote(machine: Coordination) -> None:
    """Raise Conflict if a vote is unfinished."""
    if machine.voting is not None:
        raise Conflict("a vote is unfinished: resume it with a vote without a question, or interrupt it")
