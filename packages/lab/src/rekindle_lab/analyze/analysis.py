"""Replay of a log against the memory a server would have had: reused, recomputed and new tokens by conversation.

Owns the sums and the choice of prompt handlings to compare. Every pass rereads the log, so no prompts are held.
Invariant for every request, conversation and the total: prompt = own + others + recomputed + new.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rekindle.config import NORMALISATIONS, PromptSettings
from rekindle.errors import BadRequest
from rekindle.matching.explain import Explanation
from rekindle.text.growth import TemplateGrowth, analyse_growth
from rekindle.text.normalise import normalise
from rekindle.text.prompt import PromptEncoder
from rekindle.text.replies import fit
from rekindle_lab.analyze.bodies import BodyReader, LoggedPrompt, session_of
from rekindle_lab.analyze.conversations import Conversations
from rekindle_lab.analyze.logfile import Log, Tally
from rekindle_lab.analyze.memory import INDEX_BYTES, Handling, Memory, Reuse
from rekindle_lab.analyze.recomputed import Recomputed, recomputed_by
from rekindle_lab.analyze.shapes import Logged, usage_of

UNDATED = datetime(2024, 1, 31, 12)  # the template's clock for requests without a time
MAX_LINES = 10_000  # distinct lines that cause recomputation
Progress = Callable[[], None]


@dataclass(slots=True)
class Sums:
    """Token sums of requests: `recomputed` by cause, `reported_*` as the log's answers report them."""

    num_requests: int = 0
    prompt_tokens: int = 0
    own_tokens: int = 0
    other_tokens: int = 0
    recomputed: Counter[str] = field(default_factory=Counter)
    reported_prompt_tokens: int = 0
    reported_cached_tokens: int = 0

    @property
    def reused_tokens(self) -> int:
        """Tokens that were stored and need no computation."""
        return self.own_tokens + self.other_tokens

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that were computed again."""
        return sum(self.recomputed.values())

    @property
    def new_tokens(self) -> int:
        """Tokens that had never been computed."""
        return self.prompt_tokens - self.reused_tokens - self.recomputed_tokens

    def add(self, reuse: Reuse, recomputed: Recomputed | None, usage: tuple[int, int] | None) -> None:
        """Count one request."""
        self.num_requests += 1
        self.prompt_tokens += len(reuse.ids)
        if reuse.is_own:
            self.own_tokens += reuse.num_reused
        else:
            self.other_tokens += reuse.num_reused
        if recomputed is not None:
            self.recomputed[recomputed.cause] += recomputed.num_tokens
        if usage is not None:
            self.reported_prompt_tokens += usage[0]
            self.reported_cached_tokens += usage[1]


@dataclass(slots=True)
class RecomputedLine:
    """A changing line, identified by its unchanging part, and its tokens; `explanation` is the costliest one."""

    cause: str
    role: str
    explanation: Explanation
    place: str
    num_tokens: int = 0
    num_requests: int = 0
    most_tokens: int = 0

    def add(self, recomputed: Recomputed, place: str) -> None:
        """Count one more request in which this line caused recomputation."""
        self.num_tokens += recomputed.num_tokens
        self.num_requests += 1
        if recomputed.num_tokens > self.most_tokens:
            self.most_tokens, self.explanation, self.place = recomputed.num_tokens, recomputed.explanation, place


@dataclass(frozen=True, slots=True)
class Arm:
    """Prompt tokens and reused tokens under these two settings."""

    normalise: str
    anticipate: str
    prompt_tokens: int
    reused_tokens: int

    @property
    def computed_tokens(self) -> int:
        """Tokens left to compute."""
        return self.prompt_tokens - self.reused_tokens


@dataclass(frozen=True, slots=True)
class Point:
    """The sums after `num_requests` requests, for the plot."""

    num_requests: int
    own_tokens: int
    other_tokens: int
    new_tokens: int
    recomputed: Mapping[str, int]


@dataclass(slots=True)
class Analysis:
    """Everything reported. `refused`: requests that could not be rendered."""

    total: Sums = field(default_factory=Sums)
    conversations: dict[str, Sums] = field(default_factory=dict)
    lines: dict[tuple[str, str, str], RecomputedLine] = field(default_factory=dict)
    arms: list[Arm] = field(default_factory=list)
    refused: Tally = field(default_factory=Tally)
    curve: list[Point] = field(default_factory=list)
    growth: TemplateGrowth | None = None
    num_forgotten: int = 0

    def worst_lines(self) -> list[RecomputedLine]:
        """Lines sorted by cost, highest first."""
        return sorted(self.lines.values(), key=lambda line: -line.num_tokens)


class Analyser:
    """Analyses a log with the tokenizer and template in `directory`. `progress` is called for each request."""

    def __init__(
        self,
        log: Log,
        directory: Path,
        *,
        max_bytes: int = INDEX_BYTES,
        progress: Progress = lambda: None,
    ) -> None:
        self._log = log
        self._now = UNDATED
        self._encoder, self._form = fit(PromptEncoder.from_dir(directory, clock=lambda: self._now))
        self._max_bytes = max_bytes
        self._progress = progress
        self._volatile = _Volatile()
        self._step = max(1, len(log) // 512)

    def run(self) -> Analysis:
        """Run all passes; raises ConfigError or ModelRefused as opening does."""
        analysis = Analysis(growth=analyse_growth(self._encoder.template))
        handling = Handling()
        memory = Memory(self._encoder, handling, max_bytes=self._max_bytes)
        for place, logged, asked, reuse in self._requests(memory, analysis):
            recomputed = recomputed_by(reuse, self._encoder)
            self._volatile.see(asked)
            self._count(analysis, place, logged, reuse, recomputed)
        analysis.num_forgotten = memory.num_forgotten
        self._compare(analysis)
        return analysis

    def _count(
        self, analysis: Analysis, place: tuple[str, str], logged: Logged, reuse: Reuse, recomputed: Recomputed | None
    ) -> None:
        where, conversation = place
        usage = usage_of(logged.answer)
        analysis.total.add(reuse, recomputed, usage)
        analysis.conversations.setdefault(conversation, Sums()).add(reuse, recomputed, usage)
        if recomputed is not None:
            key = (recomputed.cause, recomputed.role, recomputed.line)
            if key not in analysis.lines and len(analysis.lines) >= MAX_LINES:
                key = (recomputed.cause, recomputed.role, "")
            line = analysis.lines.setdefault(
                key, RecomputedLine(recomputed.cause, recomputed.role, recomputed.explanation, where)
            )
            line.add(recomputed, where)
        total = analysis.total
        if total.num_requests % self._step == 0:
            recomputed_so_far = dict(total.recomputed)
            point = (total.num_requests, total.own_tokens, total.other_tokens, total.new_tokens, recomputed_so_far)
            analysis.curve.append(Point(*point))

    def _requests(
        self, memory: Memory, analysis: Analysis | None = None
    ) -> Iterator[tuple[tuple[str, str], Logged, LoggedPrompt, Reuse]]:
        """Yield every request that can be rendered, in order, with its place and conversation."""
        reader, conversations = BodyReader(self._encoder, self._form), Conversations()
        for serial, (place, logged) in enumerate(self._log):
            self._now = (
                UNDATED if logged.at_s is None else datetime.fromtimestamp(logged.at_s, UTC).replace(tzinfo=None)
            )
            self._progress()
            try:
                asked = reader.read(logged)
                turn = conversations.place(serial, asked.messages, session_of(logged))
                if turn.reply is not None:
                    memory.reply(turn.reply.serial, turn.reply.message)
                reuse = memory.ask(serial, turn.conversation, asked, earlier=turn.earlier)
            except BadRequest as error:
                if analysis is not None:
                    analysis.refused.add(str(error), place)
                continue
            yield (place, turn.conversation), logged, asked, reuse
            answer = reader.answer(logged)
            if answer is not None:
                memory.reply(serial, answer)

    def _compare(self, analysis: Analysis) -> None:
        """Repeat the log with each prompt handling of this server; one pass for each that can make a difference."""
        growth = analysis.growth
        rewrites = growth is not None and {growth.plain, growth.thinking, growth.tools, growth.trailing_blank} != {
            "nothing"
        }
        done = {Handling(): (analysis.total.prompt_tokens, analysis.total.reused_tokens)}
        default = PromptSettings().kinds()
        choices = (frozenset[str](), default, frozenset(NORMALISATIONS))
        ways = [(kinds, anticipates) for anticipates in (False, True) for kinds in choices]
        for kinds, anticipates in ways:
            handling = Handling(kinds & self._volatile.kinds, anticipates and rewrites)
            if handling not in done:
                done[handling] = self._tokens(handling)
            named = ",".join(kind for kind in NORMALISATIONS if kind in kinds) or "off"
            analysis.arms.append(Arm(named, "on" if anticipates else "off", *done[handling]))

    def _tokens(self, handling: Handling) -> tuple[int, int]:
        """Count tokens in all prompts and reused tokens, in a separate pass."""
        prompt = reused = 0
        for _, _, _, reuse in self._requests(Memory(self._encoder, handling, max_bytes=self._max_bytes)):
            prompt += len(reuse.ids)
            reused += reuse.num_reused
        return prompt, reused


class _Volatile:
    """Tracks which normalisations can make a difference: their target occurs in the log and varies."""

    def __init__(self) -> None:
        self.kinds: frozenset[str] = frozenset()
        self._seen: set[int] = set()  # messages already searched for dates: most recur with every turn
        self._first_order: dict[bytes, bytes] = {}  # digest of sorted tools -> digest of the tools as first sent

    def see(self, asked: LoggedPrompt) -> None:
        """Inspect one request."""
        signed = normalise(asked.messages, None, frozenset({"attribution"}))
        found = {"attribution"} if signed.removed else set()
        if "dates" not in self.kinds:
            unseen = [message for message in signed.messages if hash(message) not in self._seen]
            self._seen.update(map(hash, unseen))
            found |= {removed.kind for removed in normalise(unseen, None, frozenset({"dates"})).removed}
        if asked.tools and "tools" not in self.kinds:
            in_order = normalise(asked.messages[:0], asked.tools, frozenset({"tools"})).tools
            first = self._first_order.setdefault(_digest(in_order), _digest(asked.tools))
            found |= {"tools"} if first != _digest(asked.tools) else set()
        self.kinds |= found


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(json.dumps(value, default=str).encode(), digest_size=16).digest()
