"""Models of Ollama's request bodies, for validation and for the OpenAPI description.

Owns names and types. `SamplingParams` owns the ranges of numbers, `sampling_defaults` what applies if none is given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from rekindle.model.params import MAX_LOGPROBS, MAX_STOPS
from rekindle.model.sampling_defaults import HABITS
from rekindle.server.answers.options import RekindleOptions, Tool
from rekindle.server.answers.validation import Items, StrictModel

THINKING = ("low", "medium", "high", "max")
# Durations as Go writes them: 5m, 1h30m, -1s.
UNITS_S: Mapping[str, float] = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_SECONDS = {"anyOf": [{"type": "number"}, {"type": "string"}]}
_PART = rf"([0-9]+\.?[0-9]*|\.[0-9]+)({'|'.join(UNITS_S)})"
_FOR_GOOD = re.compile(r"-[0-9]{1,9}")  # Go wants a unit, but this is often written
_DURATION = re.compile(rf"([-+]?)(?:0|(?:{_PART})+)")
# Options for loading a model, which is loaded already; no answer depends on them.
LOADING = frozenset(
    "num_batch num_gpu main_gpu low_vram f16_kv vocab_only logits_all use_mmap use_mlock num_thread numa "
    "draft_num_predict".split()
)
# Samplers that are not here, and other options with an effect, at the values where they have none.
OFF: Mapping[str, tuple[Any, ...]] = {
    "mirostat": (0,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "embedding_only": (False,),
}


def _unset(name: str) -> str:
    return f"not given: the model's own, or else {dict(HABITS['ollama'])[name]}"


def _whole(value: Any) -> Any:
    """Take 8192.0 for 8192: some clients keep all their numbers as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _seconds(value: Any) -> Any:
    """Return a duration in seconds; anything but a text as it is."""
    if not isinstance(value, str):
        return value
    if _FOR_GOOD.fullmatch(value):
        return float(value)
    found = _DURATION.fullmatch(value)
    if found is None:
        raise PydanticCustomError("duration", "use seconds, or a duration such as 5m")
    total = sum(float(number) * UNITS_S[unit] for number, unit in re.findall(_PART, value))
    return -total if found[1] == "-" else total


Whole = Annotated[int, BeforeValidator(_whole)]
KeepAlive = Annotated[float, BeforeValidator(_seconds), WithJsonSchema(_SECONDS)]


class OllamaOptions(StrictModel):
    """How a reply is drawn and where it ends."""

    num_predict: Whole | None = Field(default=None, description="tokens of a reply; below 1: the rest of the context")
    temperature: float | None = Field(
        default=None, description=f"{_unset('temperature')}; 0: always the most likely token"
    )
    top_k: Whole | None = Field(default=None, description=f"{_unset('top_k')}; below 1: no limit")
    top_p: float | None = Field(default=None, description=_unset("top_p"))
    min_p: float | None = Field(
        default=None, description="least share of the most likely token's probability; not given: the model's"
    )
    seed: Whole | None = Field(default=None, description="-1: another one each time")
    stop: str | Items[str] | None = Field(default=None, description=f"end before one of these, at most {MAX_STOPS}")
    repeat_penalty: float | None = Field(
        default=None, gt=0, description="above 1: less of what prompt and reply have, all of it"
    )
    repeat_last_n: Whole | None = Field(
        default=None, description="0: no penalties; -1: of prompt and reply, which is done with any other number, too"
    )
    presence_penalty: float | None = Field(default=None, description="-2 to 2, on tokens that the reply has already")
    frequency_penalty: float | None = Field(default=None, description="-2 to 2, for each time the reply has the token")
    num_ctx: Whole | None = Field(default=None, description="the context is the server's; a larger one is named")


class AskBody(StrictModel):
    """What both of Ollama's generating routes take; null always means "not given"."""

    model: str | None = Field(default=None, description="a name of the served model, with or without `:latest`")
    stream: bool | None = Field(default=None, description="false: one document; else one on each line")
    format: str | dict[str, Any] | None = Field(default=None, description="`json`, or the JSON schema of a reply")
    options: OllamaOptions | None = Field(default=None, description="others are ignored and named")
    think: bool | str | None = Field(
        default=None,
        description=f"whether to reason, or how much: {', '.join(THINKING)}; not given: as the chat template does",
    )
    keep_alive: KeepAlive | None = Field(
        default=None,
        description="seconds, or a duration such as `5m`, below 0 for good; a server of one model keeps it in any case",
    )
    logprobs: bool | None = Field(default=None, description="return the log probability of every token")
    top_logprobs: Whole | None = Field(default=None, ge=0, le=MAX_LOGPROBS, description="alternatives to each token")
    rekindle: RekindleOptions | None = None

    @property
    def stays(self) -> bool:
        """Whether the model is to stay loaded, which a keep_alive of no time denies."""
        return self.keep_alive != 0


_MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "user", "assistant", "tool"]},
        "content": {"type": "string"},
        "thinking": {"type": "string"},
        "images": {"type": "array", "items": {"type": "string"}, "description": "base64"},
        "tool_calls": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["function"],
                "properties": {
                    "id": {"type": "string"},
                    "function": {
                        "type": "object",
                        "required": ["name", "arguments"],
                        "properties": {"name": {"type": "string"}, "arguments": {"type": "object"}},
                    },
                },
            },
        },
        "tool_name": {"type": "string"},
        "tool_call_id": {"type": "string"},
    },
}


class OllamaChatBody(AskBody):
    """POST /api/chat. Without messages nothing is generated."""

    messages: Annotated[Items[Any], WithJsonSchema({"type": "array", "items": _MESSAGE})] | None = Field(
        default=None, description="a last one of the assistant is the beginning of the reply"
    )
    tools: Items[Tool] | None = Field(default=None, description="what the model may call")


class OllamaGenerateBody(AskBody):
    """POST /api/generate. Without a prompt nothing is generated."""

    prompt: str | None = Field(default=None, description="a message of the user")
    system: str | None = Field(default=None, description="the system message before the prompt")
    images: Items[str] | None = Field(default=None, description="base64")
    raw: bool | None = Field(default=None, description="true: the prompt is not a message but the model's input")
    suffix: str | None = Field(default=None, description="refused: what is given is not filled in")
    template: str | None = Field(default=None, description="refused: the model's own template is used")
    context: Items[int] | None = Field(default=None, description="refused, and never returned: send messages")


class OllamaShowBody(StrictModel):
    """POST /api/show; `name` is the older name of `model`."""

    model: str | None = Field(default=None, description="a name of the served model, with or without `:latest`")
    name: str | None = None
