"""Arms of `rekindle bench server` with one conversation at a time: first tokens cold, hot and after a restart.

Every repeat has its own conversation, named by X-Agent-ID, so no repeat reuses what another one stored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.errors import RequestFailed
from rekindle_lab.bench.memory import drop_file_cache
from rekindle_lab.bench.replay.client import Answer, OpenAIServer
from rekindle_lab.bench.replay.replay import run_command
from rekindle_lab.bench.server.texts import Messages, ServerTexts, extended, message
from rekindle_lab.record import Measurement

SHARES = (0.25, 0.5, 0.75)
REPLY_TOKENS = 16
SETTLE_S = 2.0  # by then, saves that follow an answer are on disk


@dataclass(frozen=True, slots=True)
class Bench:
    """One server and the sizes to measure, in its own tokens."""

    server: OpenAIServer
    texts: ServerTexts
    arm: str
    context: int
    extension: int
    repeats: int

    def ask(self, agent: str, messages: Messages, max_tokens: int = REPLY_TOKENS, **more: Any) -> Answer:
        """Return a greedy answer; RequestFailed if there is none: a benchmark must not continue with gaps."""
        body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, **more}
        answer = self.server.chat(body, headers={"X-Agent-ID": agent})
        if answer.error is not None:
            raise RequestFailed(f"{self.server.url}: {answer.error}: {answer.problem}")
        return answer

    def first_tokens(self, measure: str, answers: Sequence[Answer], **detail: Any) -> Measurement:
        """Build the measurement of first tokens of one kind, with the last request's counts (None: unknown)."""
        last = answers[-1]
        counts = {"prompt_tokens": last.prompt_tokens, "cached_tokens": last.cached_tokens}
        values = tuple(answer.first_token_s for answer in answers)
        return Measurement(measure, self.arm, "s", values, {**counts, **detail})


@dataclass(frozen=True, slots=True)
class Known:
    """A conversation that the server has answered once."""

    agent: str
    text: str
    messages: Messages
    answer: Answer


def converse(bench: Bench, kind: str) -> list[Known]:
    """Start a fresh, cold conversation per repeat."""
    found = []
    for number in range(bench.repeats):
        agent = f"{kind}-{number}"
        text = bench.texts.text(bench.context, agent)
        messages = [message("user", text)]
        found.append(Known(agent, text, messages, bench.ask(agent, messages)))
    return found


def first_tokens(bench: Bench) -> Iterator[Measurement]:
    """Measure first tokens cold, then hot EXACT, EXTEND, and DIVERGE at several depths."""
    bench.ask("warm-up", [message("user", bench.texts.text(100, "warm up"))])
    known = converse(bench, "base")
    yield bench.first_tokens("cold", [item.answer for item in known])
    yield bench.first_tokens("hot EXACT", [bench.ask(item.agent, item.messages) for item in known])
    yield bench.first_tokens("hot EXTEND", [extend(bench, item) for item in known])
    for share in SHARES:
        answers = []
        for item in known:
            text = bench.texts.diverged(item.text, share, f"{item.agent} diverged {share}")
            answers.append(bench.ask(item.agent, [message("user", text)]))
        yield bench.first_tokens(f"DIVERGE at {share:.0%}", answers)


def extend(bench: Bench, known: Known) -> Answer:
    """Send the next turn of a conversation, with its reply unchanged."""
    text = bench.texts.text(bench.extension, f"{known.agent} extended")
    return bench.ask(known.agent, extended(known.messages, known.answer.message, text))


def after_restart(bench: Bench, command: str, drop_cache: Path | None) -> Iterator[Measurement]:
    """Measure warm EXACT and EXTEND: known conversations, a real restart, then each once more.

    The page cache is as the restart left it, or, with `drop_cache`, dropped for the files of that directory.
    """
    exact, extend_later = converse(bench, "warm-exact"), converse(bench, "warm-extend")
    time.sleep(SETTLE_S)
    began = time.perf_counter()
    run_command(command)
    bench.server.wait_answering()
    yield Measurement("answers again after the restart", bench.arm, "s", (time.perf_counter() - began,))
    bench.ask("warm-up-again", [message("user", bench.texts.text(100, "warm up again"))])
    state = "as the restart left it"
    if drop_cache is not None:
        state = f"forgotten for {drop_file_cache(drop_cache)} files"
    detail = {"page_cache": state}
    yield bench.first_tokens("warm EXACT", [bench.ask(item.agent, item.messages) for item in exact], **detail)
    yield bench.first_tokens("warm EXTEND", [extend(bench, item) for item in extend_later], **detail)
