"""The body of POST /v1/responses, as a model that validates and describes it.

Owns names and types, and which of OpenAI's parameters cannot change an answer here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from rekindle.server.answers.options import RekindleOptions, with_sampling
from rekindle.server.answers.validation import Items, OpenModel, StrictModel
from rekindle.server.responses.call_items import KINDS
from rekindle.server.responses.items import ITEM_TYPES

# Naming, billing, routing, or bounds for tools that run elsewhere; no answer depends on them.
HARMLESS = frozenset(
    "client_metadata max_tool_calls prompt_cache_key prompt_cache_retention safety_identifier service_tier user".split()
)
# Not implemented, but harmless at the value that means "off".
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled", "auto"),
}
ENCRYPTED = "reasoning.encrypted_content"
# Includable parts of tools and media that no answer here has.
NOTHING_TO_INCLUDE = frozenset(
    "code_interpreter_call.outputs computer_call_output.output.image_url file_search_call.results "
    "message.input_image.image_url web_search_call.action.sources web_search_call.results".split()
)
_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": {"type": "string"}},
}
_TEXT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]}
ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"enum": [*ITEM_TYPES, "item_reference"]},
        "id": {"type": "string"},
        "role": {"enum": ["system", "developer", "user", "assistant"], "description": "of messages"},
        "content": {**_TEXT, "description": "of messages and reasoning"},
        "call_id": {"type": "string", "description": "of calls and their outputs"},
        "name": {"type": "string", "description": "of calls"},
        "arguments": {"type": "string", "description": "of function calls"},
        "input": {"type": "string", "description": "of custom tools' calls"},
        "action": {"type": "object", "description": "of calls of a shell"},
        "operation": {"type": "object", "description": "of calls that patch files"},
        "output": {"anyOf": [*_TEXT["anyOf"], {"type": "array"}], "description": "of calls' outputs"},
        "encrypted_content": {"type": "string", "description": "of reasoning, as an answer had it"},
    },
}
TOOL: dict[str, Any] = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": [*(kind.tool for kind in KINDS), "namespace"]},
        "name": {"type": "string"},
        "description": {"type": "string"},
        "parameters": {"type": "object", "description": "a JSON schema"},
        "format": {"type": "object", "description": "of a custom tool: text, or a grammar of its input"},
        "tools": {"type": "array", "items": {"type": "object"}, "description": "of a namespace"},
    },
}
Input = Annotated[
    str | Items[dict[str, Any]], WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": ITEM}]})
]
Tools = Annotated[Items[dict[str, Any]], WithJsonSchema({"type": "array", "items": TOOL})]
Pairs = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class ResponseStreamOptions(StrictModel):
    """`include_obfuscation` is accepted and ignored: events are not padded here."""

    include_obfuscation: bool = False


class Reasoning(StrictModel):
    """Reasoning effort, for the chat template. Reasoning is returned whole, so the choice of summary has no effect.

    The template decides which earlier reasoning the model sees again, so a context of the turn alone is refused.
    """

    effort: str | None = None
    context: Literal["auto", "all_turns"] | None = None
    mode: Literal["standard"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class CacheOptions(OpenModel):
    """`comparison_response_id`: the answer says what differs from the request of that response. Where prompts are kept,
    and for how long, is decided here: the other options have no effect."""

    comparison_response_id: str | None = None


class TextOptions(StrictModel):
    """Replies are plain text, or with a `format` JSON of its schema."""

    format: dict[str, Any] | None = Field(default=None, description="text, json_object, or json_schema with its schema")


@with_sampling("responses")
class _Drawn(StrictModel):
    model: str | None = Field(default=None, description="the served name, the path it was loaded from, or `default`")
    input: Input | None = None
    instructions: str | None = Field(default=None, description="a system message of this response alone")
    previous_response_id: str | None = Field(default=None, description="a stored response to continue")
    store: bool | None = Field(default=None, description="store the response; the default is true")
    tools: Tools | None = None
    tool_choice: Annotated[Any, WithJsonSchema({"description": "auto, none, required, or a function"})] = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    include: Items[str] | None = None
    metadata: Pairs | None = None
    prompt_cache_options: CacheOptions | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    top_k: int | None = Field(default=None, description="0: no limit; this and the ones below are not OpenAI's")


class ResponseBody(_Drawn):
    """POST /v1/responses; null everywhere means "not given"."""

    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="variables of the chat template")
    rekindle: RekindleOptions | None = None

    @property
    def compared_with(self) -> str | None:
        """The id of the response whose request this one is to be compared with."""
        return None if self.prompt_cache_options is None else self.prompt_cache_options.comparison_response_id
