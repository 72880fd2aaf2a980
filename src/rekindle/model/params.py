"""The table of sampling parameters: names, types, defaults, ranges, meanings, and which APIs take them.

Request bodies, what a backend is sent, and what is read of generation_config.json are made from it; `sampler` and
`adjustments` use the values. Ids are checked against the vocabulary, if it is known, when the request is prepared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypedDict, TypeVar

from rekindle.errors import BadRequest

LEAST_REPETITION = 0.01  # scores are divided by it: a smaller one makes infinities of them
MAX_STOPS = 64  # clients of completions send a dozen; each is searched in every piece of a reply
MAX_STOP_IDS = 64
MAX_BIASES = 1024
MAX_LOGPROBS = 20
SEED_LIMIT = 1 << 63
T = TypeVar("T")
_KEY = "parameter"

Api = Literal["chat", "responses", "sessions"]
# What bodies take under these names, in the order of their descriptions. What an API has under other names or in other
# forms is in its own module.
BODIES: Mapping[Api, Sequence[str]] = {
    "chat": (
        "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty logit_bias seed stop "
        "stop_token_ids ignore_eos min_tokens"
    ).split(),
    "responses": "min_p seed min_tokens ignore_eos".split(),
    "sessions": (
        "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed stop min_tokens "
        "ignore_eos"
    ).split(),
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A row of the table, without its type and default.

    `wrong` says what a value must be, or nothing if it is; `help` is its meaning in a chat completion. `openai`: every
    server with OpenAI's API knows it. `makers`: generation_config.json may have it.
    """

    wrong: Callable[[Any], str]
    help: str = ""
    openai: bool = False
    makers: bool = False


def _parameter(
    default: T, wrong: Callable[[Any], str], help: str = "", *, openai: bool = False, makers: bool = False
) -> T:
    made: T = field(default=default, metadata={_KEY: Parameter(wrong, help, openai, makers)})
    return made


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _must(message: str, holds: Callable[[Any], bool]) -> Callable[[Any], str]:
    return lambda value: "" if holds(value) else message


def _within(least: float, most: float, note: str = "") -> Callable[[Any], str]:
    return _must(f"must lie in {least:g} to {most:g}{note}", lambda value: _is_number(value) and least <= value <= most)


def _whole_from(least: int, note: str = "") -> Callable[[Any], str]:
    return _must(f"must be an integer ≥ {least}{note}", lambda value: _is_int(value) and value >= least)


def _or_none(wrong: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: "" if value is None else wrong(value)


def _is_bias(entry: object) -> bool:
    """Whether this is (token id, -100 to 100)."""
    if not (isinstance(entry, tuple) and len(entry) == 2):
        return False
    token, bias = entry
    return _is_int(token) and token >= 0 and _is_number(bias) and -100 <= bias <= 100


def _wrong_biases(given: Any) -> str:
    if not (isinstance(given, tuple) and all(map(_is_bias, given))):
        return "must give token ids numbers in -100 to 100"
    num_ids = len({token for token, _ in given})
    if num_ids < len(given):
        return "must name each token id once"
    return "" if num_ids <= MAX_BIASES else f"must name at most {MAX_BIASES} token ids"


def _are_stops(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) <= MAX_STOPS and all(isinstance(one, str) and one for one in given)


def _are_ids(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) <= MAX_STOP_IDS and all(_is_int(one) and one >= 0 for one in given)


_ALTERNATIVES = _must(
    f"must be an integer from 0 to {MAX_LOGPROBS}: how many alternatives a token",
    lambda value: _is_int(value) and 0 <= value <= MAX_LOGPROBS,
)


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

    max_tokens: int | None = _parameter(None, _or_none(_whole_from(1)))
    temperature: float = _parameter(
        1.0,
        _must("must be a number ≥ 0", lambda value: _is_number(value) and value >= 0),
        "0: always the most likely token",
        openai=True,
        makers=True,
    )
    top_p: float = _parameter(
        1.0,
        _must("must lie in (0, 1]", lambda value: _is_number(value) and 0 < value <= 1),
        "draw from the most likely tokens that reach this together",
        openai=True,
        makers=True,
    )
    top_k: int = _parameter(
        0, _whole_from(0, " (0: no limit)"), "draw from this many of the most likely tokens; 0: no limit", makers=True
    )
    seed: int | None = _parameter(
        None,
        _or_none(_must("must be a 64-bit integer", lambda value: _is_int(value) and -SEED_LIMIT <= value < SEED_LIMIT)),
        "choice i is drawn with seed + i",
    )
    stop: Sequence[str] = _parameter(
        (),
        _must(f"must be at most {MAX_STOPS} non-empty strings", _are_stops),
        f"end before one of these, at most {MAX_STOPS}",
    )
    min_p: float = _parameter(
        0.0, _within(0, 1, " (0: no limit)"), "least share of the most likely token's probability", makers=True
    )
    presence_penalty: float = _parameter(
        0.0, _within(-2, 2), "-2 to 2, on tokens that the reply has already", openai=True
    )
    frequency_penalty: float = _parameter(
        0.0, _within(-2, 2), "-2 to 2, for each time the reply has the token", openai=True
    )
    repetition_penalty: float = _parameter(
        1.0,
        _within(LEAST_REPETITION, 1 / LEAST_REPETITION, " (1: none)"),
        "above 1: less of what prompt and reply have",
        makers=True,
    )
    logit_bias: Sequence[tuple[int, float]] = _parameter((), _wrong_biases, "token id to bias, -100 to 100")
    logprobs: int | None = _parameter(None, _or_none(_ALTERNATIVES))
    prompt_logprobs: int | None = _parameter(None, _or_none(_ALTERNATIVES))
    stop_token_ids: Sequence[int] = _parameter(
        (),
        _must(f"must be at most {MAX_STOP_IDS} token ids", _are_ids),
        "end at one of these, which is left out",
    )
    ignore_eos: bool = _parameter(
        False,
        _must("must be true or false", lambda value: isinstance(value, bool)),
        "continue after tokens that end a reply",
    )
    min_tokens: int = _parameter(0, _whole_from(0), "no reply ends before")

    def __post_init__(self) -> None:
        for name in ("stop", "logit_bias", "stop_token_ids"):
            given = getattr(self, name)
            if isinstance(given, list) or (name == "stop" and isinstance(given, str)):
                object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))
        for name, parameter in PARAMETERS.items():
            _refuse(name, parameter.wrong(getattr(self, name)))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", f"must not be above max_tokens ({self.max_tokens})")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0 or self.top_k == 1


def _refuse(name: str, wrong: str) -> None:
    if wrong:
        raise BadRequest(f"{name} {wrong}", param=name)


PARAMETERS: Mapping[str, Parameter] = {item.name: item.metadata[_KEY] for item in fields(SamplingParams)}
