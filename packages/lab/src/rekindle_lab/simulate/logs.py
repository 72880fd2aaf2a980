"""A log as a trace: each prompt as the server would have rendered it, in the ids its matcher would have chosen.

Owns the sequence of events: a reply is stored before the next request arrives. `rekindle analyze` decides what is a
request, which conversation it belongs to, and its ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rekindle.cache import TokenIds
from rekindle.config import CacheSettings, PromptSettings
from rekindle.errors import BadRequest, ConfigError
from rekindle.model.checkpoint import Source
from rekindle.text.messages import Message
from rekindle.text.prompt import PromptEncoder
from rekindle.text.replies import fit
from rekindle_lab.analyze.analysis import UNDATED
from rekindle_lab.analyze.bodies import BodyReader, session_of
from rekindle_lab.analyze.conversations import Conversations
from rekindle_lab.analyze.logfile import Tally, open_log
from rekindle_lab.analyze.memory import Handling, Memory
from rekindle_lab.analyze.shapes import Logged
from rekindle_lab.simulate.trace import LOG, Trace, TraceBuilder, TraceOptions

MAX_NOTES = 5


def read_log(path: Path, options: TraceOptions, progress: Callable[[], None]) -> Trace:
    """Return the trace of a log or recorded day, with tokens as counted by `options.model`, else the bundled model.

    Requests that cannot be rendered are left out and mentioned in its notes; ConfigError if none remain.
    """
    source = Source.find(options.model, options.revision)
    log, reading = open_log(path), _Reading(source.fetch_description())
    refused = Tally()
    for serial, (place, logged) in enumerate(log):
        try:
            reading.read(serial, logged)
        except BadRequest as error:
            refused.add(str(error), place)
        progress()
    notes = [
        f"{each.count:,} left out: {why} (first: {each.place})" for why, each in {**log.skipped, **refused}.items()
    ]
    if not reading.prompts:
        raise ConfigError(f"{path}: no request can be rendered as {source.name} would: {'; '.join(notes[:MAX_NOTES])}")
    if len(notes) > MAX_NOTES:
        notes[MAX_NOTES:] = [f"and others for {len(notes) - MAX_NOTES:,} more reasons"]
    block_tokens = options.block_tokens or CacheSettings().block_tokens
    return _trace(reading, block_tokens, (path.stem, f"{LOG}, as {source.name} counts tokens"), notes)


@dataclass(slots=True)
class _Prompt:
    """The ids of one prompt of a conversation, and of what is stored once it is answered."""

    session: str
    at_s: float | None
    ids: TokenIds
    stored: TokenIds


class _Reading:
    """Reads a log once, in order, with the memory that a server would have had of it."""

    def __init__(self, directory: Path) -> None:
        self._now = UNDATED
        encoder, form = fit(PromptEncoder.from_dir(directory, clock=lambda: self._now))
        self._reader = BodyReader(encoder, form)
        self._conversations = Conversations()
        self._memory = Memory(encoder, Handling(PromptSettings().kinds()))
        self.prompts: dict[int, _Prompt] = {}

    def read(self, serial: int, logged: Logged) -> None:
        """Read one request; BadRequest if it cannot be rendered."""
        at_s = logged.at_s
        self._now = UNDATED if at_s is None else datetime.fromtimestamp(at_s, UTC).replace(tzinfo=None)
        asked = self._reader.read(logged)
        turn = self._conversations.place(serial, asked.messages, session_of(logged))
        if turn.reply is not None:
            self._reply(turn.reply.serial, turn.reply.message)
        reuse = self._memory.ask(serial, turn.conversation, asked, earlier=turn.earlier)
        self.prompts[serial] = _Prompt(turn.conversation, at_s, reuse.ids, reuse.ids)
        answer = self._reader.answer(logged)
        if answer is not None:
            self._reply(serial, answer)

    def _reply(self, serial: int, message: Message) -> None:
        stored = self._memory.reply(serial, message)
        if stored is not None:
            self.prompts[serial].stored = stored


def _trace(reading: _Reading, block_tokens: int, called: tuple[str, str], notes: Sequence[str]) -> Trace:
    """Build the trace in the order of the log; without times, requests are one second apart."""
    prompts = list(reading.prompts.values())
    is_timed = all(prompt.at_s is not None for prompt in prompts)
    builder = TraceBuilder(block_tokens)
    for number, prompt in enumerate(prompts):
        at_s = prompt.at_s if is_timed and prompt.at_s is not None else float(number)
        builder.add_tokens(at_s, prompt.ids, prompt.stored, session=prompt.session)
    return builder.build(*called, is_timed=is_timed, notes=notes)
