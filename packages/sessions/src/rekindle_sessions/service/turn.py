"""One turn being generated: its request, and its output so far.

Owns the split of a reply into text and reasoning, and the times of its first and last delta. Tool calls are read as
text: participants have no tools.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import Any

from rekindle.engine.api import Engine
from rekindle.engine.generation import Generation
from rekindle.engine.types import Delta, FinishReason, GenerationRequest, Report, Reuse
from rekindle.errors import BadRequest, Cancelled, Overloaded, RekindleError, StoreError, Unavailable
from rekindle.model.params import MAX_STOPS, SamplingParams
from rekindle.text.messages import Message
from rekindle.text.replies import ParsedReply, ReplyFormat, ReplyStream, TextDelta
from rekindle_sessions.machine import prompt_layout
from rekindle_sessions.machine.types import Entry, Turn, TurnEnded, TurnFailed, Utterance
from rekindle_sessions.service.events import Spoken

MAX_TOKENS = 512  # default per reply: conversations of agents have no reader to stop them
UNSAID = "interrupted before anything was said"
OPEN_CHARS = 16  # at the end of a partial text: they may be the start of something longer
_LAST_WORD = re.compile(r"\S+\Z")  # which may continue


@dataclass(frozen=True, slots=True)
class Speaker:
    """A speaker as the engine needs it: the memory it continues, and where its replies end."""

    namespace: str
    agent: str
    stops: tuple[str, ...]
    reuse: Reuse | None


def sampling_of(*given: Mapping[str, Any]) -> SamplingParams:
    """Merge fields of `SamplingParams`, later ones taking precedence; BadRequest if one is unknown or invalid."""
    asked: dict[str, Any] = {"max_tokens": MAX_TOKENS}
    for each in given:
        asked |= each
    try:
        return SamplingParams(**asked)
    except TypeError as error:
        known = ", ".join(each.name for each in fields(SamplingParams))
        raise BadRequest(f"sampling takes {known}: {error}", param="sampling") from error


def request_of(speaker: Speaker, turn: Turn, prompt: tuple[Message, ...], params: SamplingParams) -> GenerationRequest:
    """Return the engine request of a turn. The seed varies by turn, else all would draw the same numbers."""
    stop = tuple(dict.fromkeys((*params.stop, *speaker.stops)))[:MAX_STOPS]
    seed = None if params.seed is None else (params.seed + turn.number) % (1 << 62)
    return GenerationRequest(
        messages=prompt,
        agent=speaker.agent,
        namespace=speaker.namespace,
        params=replace(params, stop=stop, seed=seed),
        reuse=speaker.reuse,
        structured=True,
        echoes_thoughts=True,  # the layout sends reasoning back, to templates that accept it
    )


@dataclass(slots=True, eq=False)
class Voice:
    """A turn being generated; times are those of `timer`, in seconds. `cut`: it was interrupted."""

    turn: Turn
    generation: Generation
    begun_at: float
    spoke_last_at: float | None  # when the last delta of the previous turn came
    taken_in_tokens: int
    timer: Callable[[], float]
    form: ReplyFormat
    cut: bool = False
    first_at: float | None = None
    last_at: float | None = None
    num_tokens: int = 0
    report: Report | None = None
    finish: FinishReason | None = None
    error: RekindleError | None = None  # why it said nothing
    reply: ParsedReply = field(default_factory=ParsedReply)
    _stream: ReplyStream | None = None

    @classmethod
    def begin(
        cls,
        engine: Engine,
        request: GenerationRequest,
        turn: Turn,
        *,
        timer: Callable[[], float],
        spoke_last_at: float | None,
        taken_in_tokens: int,
    ) -> Voice:
        """Submit the request to the engine."""
        generation = engine.submit(request)
        return cls(turn, generation, timer(), spoke_last_at, taken_in_tokens, timer, engine.reply_format)

    def take(self, delta: Delta) -> str:
        """Record a delta; return its text without reasoning."""
        self.last_at = self.timer()
        if self.first_at is None:
            self.first_at = self.last_at
        self.num_tokens += len(delta.token_ids)
        self.report = delta.report or self.report
        self.finish = delta.finish_reason or self.finish
        if self._stream is None:  # only now is it known how much of the reply the prompt has begun
            self._stream = ReplyStream(self.form, tools=False, opening=self.generation.opening)
        events = self._stream.push(delta.text)
        if delta.finish_reason is not None:
            events = events + self._stream.finish()
        for event in events:
            self.reply.take(event)
        return "".join(event.text for event in events if isinstance(event, TextDelta))

    def heard_by(self, listener: str, names: Iterable[str]) -> Entry | None:
        """Return what a listener has heard so far, without the last word, which may continue; None: nothing.

        Scripts without blanks lose their last OPEN_CHARS characters.
        """
        to, text = self.turn.to, self.reply.text
        if self.turn.purpose != "speak" or not (to is None or listener in to):
            return None
        whole = text[:-OPEN_CHARS] + _LAST_WORD.sub("", text[-OPEN_CHARS:])
        words = prompt_layout.spoken(whole, self.turn.speaker, names)
        is_alone = to is not None and set(to) - {self.turn.speaker} == {listener}
        return Entry("heard", words, self.turn.speaker, is_alone) if words else None

    def stop(self) -> None:
        """End it within a step."""
        self.generation.cancel()

    def interrupt(self) -> None:
        """End it within a step, keeping the text so far."""
        self.cut = True
        self.generation.cancel()

    def ended(self) -> TurnEnded | TurnFailed | None:
        """Return the event of its end; None: it was stopped and may be generated again."""
        if self.finish == "cancelled" and not self.cut:
            return None
        if self.finish == "cancelled" and not self.reply.text.strip():
            return self._unsaid(Cancelled(UNSAID))
        cut = self.cut and self.finish == "cancelled"
        return TurnEnded(self.turn.number, self.reply.text, self.reply.reasoning or None, cut)

    def failed(self, error: RekindleError) -> TurnFailed | None:
        """Return the event of an error; None: the turn stays begun. Raises errors that are not this turn's fault."""
        if isinstance(error, Cancelled):
            return self._unsaid(Cancelled(UNSAID)) if self.cut else None
        if isinstance(error, Overloaded | StoreError | Unavailable):
            raise error
        return self._unsaid(error)

    def _unsaid(self, error: RekindleError) -> TurnFailed:
        self.error = error
        return TurnFailed(self.turn.number, str(error))

    def spoken(self, agent: str) -> Spoken:
        """Return how it ended, for request observers; `agent` is the id of the speaker's memory."""
        return Spoken(agent, self.generation.id, self.report, self.finish, self.error)

    @property
    def gap_ms(self) -> float | None:
        """Time from the previous turn's last delta to this one's first; None if there was none, or after a pause."""
        if self.first_at is None or self.spoke_last_at is None:
            return None
        return (self.first_at - self.spoke_last_at) * 1000

    def described(self, utterance: Utterance) -> dict[str, Any]:
        """Return the event data of an ended turn, published as `utterance`."""
        first_ms = None if self.first_at is None else (self.first_at - self.begun_at) * 1000
        return {
            "turn": self.turn.number,
            "speaker": self.turn.speaker,
            "purpose": self.turn.purpose,
            "round": self.turn.round,
            "text": utterance.text,
            "thought": self.reply.reasoning or None,
            "number": utterance.number,
            "to": None if utterance.to is None else list(utterance.to),
            "cut": utterance.cut,
            "rekindle": None if self.report is None else self.report.as_dict(),
            "gap_ms": None if self.gap_ms is None else round(self.gap_ms, 2),
            "first_token_ms": None if first_ms is None else round(first_ms, 2),
            "num_tokens": self.num_tokens,
            "taken_in_tokens": self.taken_in_tokens,
        }


@dataclass(slots=True)
class Tally:
    """Totals over the turns of one round."""

    num_turns: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    gaps_ms: list[float] = field(default_factory=list)

    def add(self, voice: Voice) -> None:
        """Add a turn that has ended."""
        self.num_turns += 1
        if voice.report is not None:
            self.prompt_tokens += voice.report.prompt_tokens
            self.reused_tokens += voice.report.reused_tokens
        if voice.gap_ms is not None:
            self.gaps_ms.append(voice.gap_ms)

    def as_dict(self) -> dict[str, Any]:
        """Return the totals as event data."""
        return {
            "num_turns": self.num_turns,
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "reused_share": round(self.reused_tokens / self.prompt_tokens, 4) if self.prompt_tokens else 0.0,
            "gap_ms": round(median(self.gaps_ms), 2) if self.gaps_ms else None,
        }
