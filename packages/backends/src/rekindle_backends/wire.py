"""What a backend is sent and sends: a call, the pieces of its answer, and OpenAI's completions as vLLM extends them.

Owns the shape of bodies and of the chunks of a stream; llama-server's own are in `llama/wire`. Opens no connection.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.errors import BackendFailed, PromptTooLong

COMPLETIONS, MODELS, TOKENIZE = "/v1/completions", "/v1/models", "/tokenize"
MOST_LINE_BYTES = 16 << 20  # of an event: one token with its scores takes a few kilobytes
MOST_BODY_BYTES = 16 << 20  # of an answer that is read whole: a list of models, the tokens of a text, an error
MOST_IDLE_BYTES = 1 << 20  # of lines that bring a request nothing: a sign of life every second, for a day
MOST_REASON_CHARS = 100
OTHER_PROMPT = "the backend answered another prompt than it was sent"
ID_KEY = "token_id:"  # how tokens are written with `return_tokens_as_token_ids`


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """The log probability of a token, and the likeliest ones at its position: token id -> log probability."""

    logprob: float
    top: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk of a reply. `reason` ends it; `cached_tokens` of the prompt were reused (None: not said).

    `scores`, if they were requested, has one for each token, None where there is none. `is_certain` False: the backend
    left ids out, and not even its text says which; the text of `token_ids` is right. `done_tokens`: so many of the
    prompt are computed or were reused. `prompt_ids`: the prompt that this answers, where the backend says it.
    """

    token_ids: tuple[int, ...] = ()
    scores: tuple[ScoredToken | None, ...] = ()
    reason: str | None = None
    cached_tokens: int | None = None
    is_certain: bool = True
    done_tokens: int | None = None
    prompt_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A request to a backend: its path, body and headers; `read` takes the data of its stream's events, in order."""

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    read: Callable[[str], Piece]


def completion_body(model: str, prompt_ids: Sequence[int], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body that asks for a stream of token ids; `options` are its other fields."""
    return {
        "model": model,
        "prompt": list(prompt_ids),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **options,
    }


class EventLines:
    """Server-sent events out of the bytes of a stream, split at line feeds alone: JSON may contain other breaks."""

    def __init__(self) -> None:
        self._rest = bytearray()  # of a line without its end

    def push(self, data: bytes) -> list[str]:
        """Return the data of the events that these bytes complete; BackendFailed for a line without an end."""
        first, *others = data.split(b"\n")
        self._rest += first
        if len(self._rest) > MOST_LINE_BYTES:
            raise BackendFailed(f"the backend sent a line of more than {MOST_LINE_BYTES >> 20} MiB")
        if not others:
            return []
        *lines, rest = [bytes(self._rest), *others]
        self._rest = bytearray(rest)
        return [line[5:].strip().decode("utf-8", "replace") for line in lines if line.startswith(b"data:")]


def read_piece(data: str) -> Piece:
    """Read the data of one event; BackendFailed for an error in it, and for what is no chunk of a completion."""
    try:
        chunk = json.loads(data)
        if "error" in chunk:
            raise BackendFailed(f"the backend failed: {error_text(chunk)}")
        choices, usage = chunk["choices"], chunk.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if not choices:
            return Piece(cached_tokens=count(cached))
        (choice,) = choices
        ids, reason = tuple(map(whole, choice.get("token_ids") or ())), choice.get("finish_reason")
        if not isinstance(reason, str | None) or len(reason or "") > MOST_REASON_CHARS:
            raise ValueError("finish_reason is no word")
        asked = choice.get("prompt_token_ids")
        prompt = None if asked is None else tuple(map(whole, asked))
        scores = _scores(choice.get("logprobs"), len(ids))
        return Piece(ids, scores, reason, count(cached), prompt_ids=prompt)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise no_chunk(data, error) from error


def no_chunk(data: str, error: Exception) -> BackendFailed:
    """Return the error for the data of an event that cannot be read."""
    return BackendFailed(f"the backend sent what is no chunk of a completion ({error}): {data[:200]}")


def whole(value: Any) -> int:
    """Return a whole number of up to 64 bits; ValueError for anything else."""
    if type(value) is not int or value.bit_length() > 63:
        raise ValueError(f"{str(value)[:40]!r} is no whole number")
    return value


def count(value: Any) -> int | None:
    """Return a number of tokens, None if it was not said."""
    if value is not None and whole(value) < 0:
        raise ValueError(f"{value} tokens")
    return None if value is None else whole(value)


def _scores(found: Mapping[str, Any] | None, num_tokens: int) -> tuple[ScoredToken, ...]:
    if not found or not num_tokens:
        return ()
    top = found.get("top_logprobs") or [None] * num_tokens
    each = zip(found["token_logprobs"], top, strict=True)
    scores = tuple(ScoredToken(finite(logprob), _by_id(others or {})) for logprob, others in each)
    if len(scores) != num_tokens:
        raise ValueError(f"{len(scores)} log probabilities for {num_tokens} tokens")
    return scores


def _by_id(others: Mapping[str, float]) -> dict[int, float]:
    """Return the log probabilities by id; ValueError for keys that are text, which names no token."""
    if not all(key.startswith(ID_KEY) for key in others):
        raise ValueError("log probabilities name tokens by text, not by id (return_tokens_as_token_ids)")
    return {int(key.removeprefix(ID_KEY)): finite(value) for key, value in others.items()}


def finite(value: Any) -> float:
    """Return a log probability; ValueError for NaN and infinities, which Python's JSON has and no client's."""
    if not math.isfinite(found := float(value)):
        raise ValueError(f"a log probability is {found}")
    return found


def parsed(data: bytes) -> Any:
    """Return the JSON of a whole answer; None if it is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def too_long(body: Any) -> PromptTooLong | None:
    """Return the error of an answer in which a llama-server says that its slots are too short for a prompt, in our
    words, which clients look for to shorten their history; None for other answers."""
    match body:
        case {"error": {"type": "exceed_context_size_error", "n_prompt_tokens": int(num_tokens), "n_ctx": int(most)}}:
            return PromptTooLong.of(num_tokens, most)
        case _:
            return None


def error_text(body: Any) -> str:
    """Return the message of an error body, or what there is of it, shortened. None: a body that is no JSON."""
    if body is None:
        return "no reason given"
    found = body.get("error", body) if isinstance(body, dict) else body
    message = found.get("message", found) if isinstance(found, dict) else found
    return str(message)[:500]
