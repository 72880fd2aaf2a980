"""What llama-server is sent and sends at `/completion`: token ids, sampling by our rules, the events of a stream.

Owns the shape of bodies and events. Everything that changes what is drawn is sent, as the defaults of llama-server are
not neutral: samplers that we do not have are left out of `samplers`, the others are in our order, which is not its own
(temperature first). Opens no connection.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rekindle.errors import BackendFailed
from rekindle_backends.llama.gaps import Filling, Gaps
from rekindle_backends.wire import (
    MOST_REASON_CHARS,
    OTHER_PROMPT,
    Piece,
    ScoredToken,
    count,
    error_text,
    finite,
    no_chunk,
    whole,
)

COMPLETION, PROPS = "/completion", "/props"
SAMPLERS = ("penalties", "temperature", "top_k", "top_p", "min_p")
NEUTRAL: Mapping[str, Any] = {
    "samplers": SAMPLERS,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repeat_last_n": 0,
    "logit_bias": (),
    "ignore_eos": False,
    "mirostat": 0,
    "dynatemp_range": 0.0,
    "min_keep": 0,
}
ENDS = {"eos": "stop", "word": "stop", "limit": "length"}


def completion_body(prompt_ids: Sequence[int], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body that asks for a stream of token ids; `options` are fields of it, neutral where they are left out.

    `n_cache_reuse` 0: chunks that were moved to other positions would not be what was computed there.
    """
    return {
        "prompt": list(prompt_ids),
        "stream": True,
        "return_tokens": True,
        "return_progress": True,
        "cache_prompt": True,
        "n_cache_reuse": 0,
        **NEUTRAL,
        **options,
    }


class EventReader:
    """Reads the events of one stream, in order, which answers `num_prompt` tokens: what it leaves out `gaps` finds.

    A token without text waits for the next event, as the one that ends a reply is none of it.
    """

    def __init__(self, gaps: Gaps, num_prompt: int) -> None:
        self._gaps = gaps
        self._num_prompt = num_prompt
        self._num_tokens = 0  # that were drawn, those left out too
        self._silent = Piece()

    def read(self, data: str) -> Piece:
        """Read the data of one event; BackendFailed for an error in it, and for what is no event of a completion."""
        try:
            event = json.loads(data)
            if "error" in event:
                raise BackendFailed(f"the backend failed: {error_text(event)}")
            if "prompt_progress" in event:  # which has a token that is none
                progress = event["prompt_progress"]
                if progress.get("total", self._num_prompt) != self._num_prompt:
                    raise BackendFailed(OTHER_PROMPT)
                return Piece(cached_tokens=count(progress["cache"]), done_tokens=count(progress["processed"]))
            return self._end(event) if event["stop"] else self._tokens(event)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise no_chunk(data, error) from error

    def _end(self, event: Mapping[str, Any]) -> Piece:
        """Return the end; ids that were left out before it end inside a character, and stay unknown."""
        kind, silent = str(event["stop_type"])[:MOST_REASON_CHARS], self._silent
        if kind == "eos":
            silent = Piece(silent.token_ids[:-1], silent.scores[:-1])
        cached = count((event.get("timings") or {}).get("cache_n"))
        return replace(silent, reason=ENDS.get(kind, kind), cached_tokens=cached)

    def _tokens(self, event: Mapping[str, Any]) -> Piece:
        """Return the tokens of an event, and before them those that were left out or had no text."""
        ids, num_tokens = tuple(map(whole, event["tokens"])), whole(event["tokens_predicted"])
        num_missing = num_tokens - self._num_tokens - len(ids)
        if not ids or num_missing < 0:
            raise ValueError(f"{num_tokens} tokens after {self._num_tokens} and {len(ids)} more")
        self._num_tokens = num_tokens
        scores: tuple[ScoredToken | None, ...] = tuple(map(_score, event.get("completion_probabilities") or ()))
        found, silent = Filling((), is_only=True), self._silent
        if num_missing:
            found = self._gaps.fill(num_missing, ids[0], event["content"])
            scores = (None,) * len(found.ids) + scores if scores else ()
        piece = Piece(silent.token_ids + found.ids + ids, silent.scores + scores, is_certain=found.is_only)
        sent, self._silent = (piece, Piece()) if event["content"] else (Piece(), piece)
        return sent


def _score(entry: Mapping[str, Any]) -> ScoredToken:
    top = {whole(each["id"]): finite(each["logprob"]) for each in entry.get("top_logprobs") or ()}
    return ScoredToken(finite(entry["logprob"]), top)
