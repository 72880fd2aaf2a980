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

COMPLETION, PROPS, SLOTS = "/completion", "/props", "/slots"
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


class Drawn:
    """How many tokens of a reply were drawn, by what llama-server says with each event, and which it has left out.

    It counts each token when it sends it. Older builds that draft (`may_draft`) count all that they accepted of a draft
    before they send one after the other under that number: what is ahead of a token was left out before it, or is to
    come. Its text shows whether any was left out, as it covers them, and how many only if no more than one is ahead.
    """

    def __init__(self, gaps: Gaps, *, may_draft: bool) -> None:
        self._gaps = gaps
        self._counted = 0  # by the last event
        self._num_tokens = 0  # that came or were left out; fewer than counted while the rest of a draft is to come
        self._least = 0  # as many there must be at least: those that came, and one where the last draft has a gap
        self._has_drafts = may_draft

    @property
    def is_whole(self) -> bool:
        """Whether nothing that was counted is to come."""
        return self._num_tokens == self._counted

    def add(self, ids: tuple[int, ...], counted: int, text: str) -> Filling:
        """Count the tokens of an event; return what was left out before them. ValueError if the numbers do not fit."""
        is_next, num_ahead = counted > self._counted, counted - self._num_tokens - len(ids)
        is_own = num_ahead > 0 and self._gaps.is_own(ids[0], text) if ids else False
        self._least = (self._num_tokens if is_next else self._least) + len(ids) + (num_ahead > 0 and not is_own)
        if not ids or counted < self._counted or self._least > counted:
            raise ValueError(f"{counted} tokens after {self._counted} and {len(ids)} more")
        was_whole, before = self.is_whole or not is_next, self._counted
        self._counted = counted
        self._has_drafts |= is_own or not is_next
        if num_ahead > 0:
            return self._came(ids, was_whole, before) if is_own else self._gap(num_ahead, ids, text)
        self._num_tokens = counted
        return Filling((), is_only=num_ahead == 0)  # below: fewer were left out in this draft than there seemed to be

    def _came(self, ids: tuple[int, ...], was_whole: bool, before: int) -> Filling:
        """Nothing was left out here, so that what is missing of an earlier draft is lost."""
        self._num_tokens = (self._num_tokens if was_whole else before) + len(ids)
        return Filling((), is_only=was_whole)

    def _gap(self, num_ahead: int, ids: tuple[int, ...], text: str) -> Filling:
        """Some of those ahead were left out: all of them, without drafts."""
        found, is_known = self._gaps.fill(num_ahead, ids[0], text), num_ahead == 1 or not self._has_drafts
        self._num_tokens = self._counted if is_known else self._least
        return Filling(found.ids, is_only=found.is_only and is_known)


class EventReader:
    """Reads the events of one stream, in order, which answers `num_prompt` tokens: what it leaves out `gaps` finds. Its
    server `may_draft`.

    A token without text waits for the next event, as the one that ends a reply is none of it; and those of a draft wait
    until all that were counted came, as before that it is not certain that none is missing.
    """

    def __init__(self, gaps: Gaps, num_prompt: int, *, may_draft: bool = False) -> None:
        self._num_prompt = num_prompt
        self._drawn = Drawn(gaps, may_draft=may_draft)
        self._held = Piece()

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
        kind, held = str(event["stop_type"])[:MOST_REASON_CHARS], self._held
        if kind == "eos":
            held = replace(held, token_ids=held.token_ids[:-1], scores=held.scores[:-1])
        if held.token_ids and not self._drawn.is_whole:
            held = replace(held, is_certain=False)
        cached = count((event.get("timings") or {}).get("cache_n"))
        return replace(held, reason=ENDS.get(kind, kind), cached_tokens=cached)

    def _tokens(self, event: Mapping[str, Any]) -> Piece:
        """Return the tokens of an event, and before them those that were left out or are held back."""
        ids, text, held = tuple(map(whole, event["tokens"])), event["content"], self._held
        found = self._drawn.add(ids, whole(event["tokens_predicted"]), text)
        scores: tuple[ScoredToken | None, ...] = tuple(map(_score, event.get("completion_probabilities") or ()))
        scores = (None,) * len(found.ids) + scores if scores else ()
        is_certain = held.is_certain and found.is_only
        piece = Piece(held.token_ids + found.ids + ids, held.scores + scores, is_certain=is_certain)
        is_sent = text and (self._drawn.is_whole or not is_certain)
        sent, self._held = (piece, Piece()) if is_sent else (Piece(), piece)
        return sent


def _score(entry: Mapping[str, Any]) -> ScoredToken:
    top = {whole(each["id"]): finite(each["logprob"]) for each in entry.get("top_logprobs") or ()}
    return ScoredToken(finite(entry["logprob"]), top)
