"""Sampling parameters: names, ranges, defaults. Each default is written here, once.

Ids are checked against the vocabulary, if it is known, when the request is prepared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from rekindle.errors import BadRequest

LEAST_REPETITION = 0.01  # scores are divided by it: a smaller one makes infinities of them
MAX_STOPS = 64  # clients of completions send a dozen; each is searched in every piece of a reply
MAX_STOP_IDS = 64
MAX_BIASES = 1024
MAX_LOGPROBS = 20
SEED_LIMIT = 1 << 63


def _need(holds: bool, param: str, message: str) -> None:
    if not holds:
        raise BadRequest(f"{param} {message}", param=param)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_bias(entry: object) -> bool:
    """Whether this is (token id, -100 to 100)."""
    if not (isinstance(entry, tuple) and len(entry) == 2):
        return False
    token, bias = entry
    return _is_int(token) and token >= 0 and _is_number(bias) and -100 <= bias <= 100


class SamplingKeywords(TypedDict, total=False):
    """The fields of `SamplingParams`, as keyword arguments."""

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: Sequence[str]
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Sequence[tuple[int, float]]
    logprobs: int | None
    prompt_logprobs: int | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_tokens: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request picks its tokens, and where it stops.

    `max_tokens` None: the rest of the context; `top_k` 0 and `min_p` 0: no limit. Presence and frequency penalties
    count the tokens of the reply (OpenAI), the repetition penalty those of prompt and reply (transformers).
    `stop` is one text or several; the reply ends before the first that occurs. `stop`, `stop_token_ids` and
    `logit_bias` (token id and what is added to its score) may be lists and are stored as tuples.
    `logprobs` None: none are returned; else the number of alternatives per token of the reply. `prompt_logprobs` is the
    same for tokens of the prompt; what prompts have in common is scored once. A token of `stop_token_ids` ends the
    reply and, like an end-of-sequence token, is not part of it. With `ignore_eos`, end-of-sequence tokens are ordinary
    tokens. A reply shorter than `min_tokens` ends neither by a token nor by a stop string.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: Sequence[str] = ()
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Sequence[tuple[int, float]] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("stop", "logit_bias", "stop_token_ids"):
            given = getattr(self, name)
            if isinstance(given, list) or (name == "stop" and isinstance(given, str)):
                object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))
        limit = self.max_tokens
        _need(limit is None or (_is_int(limit) and limit >= 1), "max_tokens", "must be an integer ≥ 1")
        _need(_is_number(self.temperature) and self.temperature >= 0, "temperature", "must be a number ≥ 0")
        _need(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", "must lie in (0, 1]")
        _need(_is_int(self.top_k) and self.top_k >= 0, "top_k", "must be an integer ≥ 0 (0: no limit)")
        seed_fits = self.seed is None or (_is_int(self.seed) and -SEED_LIMIT <= self.seed < SEED_LIMIT)
        _need(seed_fits, "seed", "must be a 64-bit integer")
        self._check_adjustments()
        self._check_ends()

    def _check_adjustments(self) -> None:
        """Check what changes the scores before a token is drawn, and what is reported of them."""
        _need(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", "must lie in 0 to 1 (0: no limit)")
        for name, value in (
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ):
            _need(_is_number(value) and -2 <= value <= 2, name, "must lie in -2 to 2")
        repetition = self.repetition_penalty
        fits = _is_number(repetition) and LEAST_REPETITION <= repetition <= 1 / LEAST_REPETITION
        _need(fits, "repetition_penalty", f"must lie in {LEAST_REPETITION} to {1 / LEAST_REPETITION:g} (1: none)")
        given: object = self.logit_bias
        biases = isinstance(given, tuple) and all(map(_is_bias, given))
        _need(biases, "logit_bias", "must give token ids numbers in -100 to 100")
        ids = {token for token, _ in self.logit_bias}
        _need(len(ids) == len(self.logit_bias), "logit_bias", "must name each token id once")
        _need(len(ids) <= MAX_BIASES, "logit_bias", f"must name at most {MAX_BIASES} token ids")
        for name, asked in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            fits = asked is None or (_is_int(asked) and 0 <= asked <= MAX_LOGPROBS)
            _need(fits, name, f"must be an integer from 0 to {MAX_LOGPROBS}: how many alternatives a token")

    def _check_ends(self) -> None:
        """Check where a reply ends."""
        stop: object = self.stop
        texts = isinstance(stop, tuple) and all(isinstance(text, str) and text for text in stop)
        _need(texts and len(self.stop) <= MAX_STOPS, "stop", f"must be at most {MAX_STOPS} non-empty strings")
        ids: object = self.stop_token_ids
        whole = isinstance(ids, tuple) and all(_is_int(token) and token >= 0 for token in ids)
        few = whole and len(self.stop_token_ids) <= MAX_STOP_IDS
        _need(few, "stop_token_ids", f"must be at most {MAX_STOP_IDS} token ids")
        _need(isinstance(self.ignore_eos, bool), "ignore_eos", "must be true or false")
        _need(_is_int(self.min_tokens) and self.min_tokens >= 0, "min_tokens", "must be an integer ≥ 0")
        reachable = self.max_tokens is None or self.min_tokens <= self.max_tokens
        _need(reachable, "min_tokens", f"must not be above max_tokens ({self.max_tokens})")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0 or self.top_k == 1
