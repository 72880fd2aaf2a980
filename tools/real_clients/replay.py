"""A recorded session again at a plain llama-server, killed where Rekindle's was: `ids` or `requests`.

`ids`: the prompts that Rekindle sent, token by token, and the script's replies. `requests`: the bodies that the client
sent, which llama-server reads and renders itself; words cannot be chosen there, so a reply has one token, and those
that the script's reply has are computed with the next prompt (`comparison` does not count them).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import httpx

from benchmarks.llama_slots import Plain, SlotsBench
from rekindle.server.dayfile import RecordedRequest, read_day
from rekindle_backends.llama.command import PROGRAM
from rekindle_backends.llama.wire import COMPLETION, completion_body
from tools.real_clients.llama_model import CONTEXT
from tools.real_clients.scripted_llama import grammar
from tools.real_clients.session import KILLS, NUM_SLOTS, RECORD, Turn, read, write

Arm = Literal["ids", "requests"]
TIMEOUT_S = 3600.0
LIMITS = {"/v1/messages": "max_tokens", "/v1/responses": "max_output_tokens", "/v1/chat/completions": "max_tokens"}


@dataclass(frozen=True, slots=True)
class Words:
    """The ids of a prompt and of its reply."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]

    @classmethod
    def read(cls, directory: Path) -> list[Words]:
        """Return those of a session, in order."""
        found = (json.loads(each.read_text("utf-8")) for each in sorted(directory.glob("ids-*.json")))
        return [cls(tuple(each["prompt"]), tuple(each["reply"])) for each in found]

    def num_new(self, before: Words) -> int:
        """Return how many tokens of the prompt follow what it has in common with an earlier one and its reply."""
        pairs = zip(self.prompt, (*before.prompt, *before.reply), strict=False)
        return len(self.prompt) - sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def replay(
    arm: Arm, directory: Path, model: Path, flags: str, *, most: int | None = None, context: int = CONTEXT
) -> None:
    """Send at most so many requests of a session to a llama-server of its own; write what they computed.

    Its slots have `context` tokens each, as those of the session.
    """
    words, kills = Words.read(directory)[:most], read(directory / KILLS)
    bodies = _bodies(directory)[:most] if arm == "requests" else []
    turns: dict[int, Any] = {}
    with _plain(directory, model, flags, context) as plain:
        for number, each in enumerate(words):
            if number in kills:
                plain.kill(PROGRAM)
            turn = _asked(plain, each) if arm == "ids" else _sent(plain, bodies[number])
            turns[number] = asdict(turn)
            write(directory / f"{arm}.json", turns)


@contextmanager
def _plain(directory: Path, model: Path, flags: str, context: int) -> Iterator[Plain]:
    plain = Plain(SlotsBench(model, slots=NUM_SLOTS, context=context, flags=flags), directory / "plain.log")
    plain.start()
    try:
        yield plain
    finally:
        plain.end()


def _asked(plain: Plain, words: Words) -> Turn:
    """Send ids, and have the script's reply said."""
    options = {"n_predict": len(words.reply) + 8, "temperature": 0, "grammar": grammar(words.reply)}
    body = completion_body(words.prompt, options) | {"return_progress": False}
    began, first = time.perf_counter(), 0.0
    with httpx.stream("POST", f"{plain.url}{COMPLETION}", json=body, timeout=TIMEOUT_S) as answer:
        for line in answer.raise_for_status().iter_lines():
            if line.startswith("data: "):
                first = first or time.perf_counter() - began
                event = json.loads(line.removeprefix("data: "))
    return Turn(len(words.prompt), event["timings"]["prompt_n"], first)


def _bodies(directory: Path) -> list[RecordedRequest]:
    """Return the requests of a session that were answered, in order of their arrival."""
    return [each for each in read_day(directory / RECORD).requests if each.endpoint in LIMITS and each.answer]


def _sent(plain: Plain, request: RecordedRequest) -> Turn:
    """Send a body as the client sent it, for one token of a reply."""
    body = {**request.body, "stream": False, LIMITS[request.endpoint]: 1}
    began = time.perf_counter()
    answer = httpx.post(f"{plain.url}{request.endpoint}", json=body, timeout=TIMEOUT_S)
    if answer.is_error:
        return Turn(0, 0, 0.0, f"{answer.status_code} {answer.text[:200]}")
    seconds, (prompt, computed) = time.perf_counter() - began, _usage(answer.json()["usage"])
    return Turn(prompt, computed, seconds)


def _usage(usage: Mapping[str, Any]) -> tuple[int, int]:
    """Return tokens of a prompt, and those that were computed, in the words of the dialect."""
    if "cache_read_input_tokens" in usage:  # Anthropic's, whose input tokens leave out those of the cache
        return usage["cache_read_input_tokens"] + usage["input_tokens"], usage["input_tokens"]
    prompt = usage.get("input_tokens", usage.get("prompt_tokens"))
    details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details")
    return prompt, prompt - details["cached_tokens"]
