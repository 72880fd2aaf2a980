"""Recorded requests as chat completions, which every server answers.

Owns which requests of another API can be sent as one: Ollama's, unless the prompt was the model's input.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rekindle.errors import BadRequest
from rekindle.model.params import PARAMETERS, SamplingParams
from rekindle.server.dayfile import CHAT, RecordedRequest
from rekindle.server.gate.caller import Caller
from rekindle.server.ollama.calls import ModelSide, Parse, parse_chat, parse_generate
from rekindle.server.ollama.routes import CHAT_PATH, GENERATE_PATH
from rekindle.server.openai.replies import message_of
from rekindle.text.messages import Message
from rekindle.text.replies import ReplyFormat, ThinkingFormat
from rekindle.text.replies.envelope import HERMES, EnvelopeForm

_PARSERS: Mapping[str, Parse] = {CHAT_PATH: parse_chat, GENERATE_PATH: parse_generate}
# A model that can do all that a body may ask for; OpenAI's calls have ids.
_ABLE = ModelSide("", ReplyFormat(ThinkingFormat("", ""), EnvelopeForm(HERMES), call_ids="short"), sys.maxsize)


def as_chat(request: RecordedRequest) -> RecordedRequest | None:
    """Return the request as a chat completion; None if it cannot be one, or was refused."""
    if request.endpoint == CHAT:
        return request
    parse = _PARSERS.get(request.endpoint)
    if parse is None or request.answer is None:
        return None
    try:
        asked = parse(request.body, Caller(), _ABLE).request
    except BadRequest:
        return None
    if asked is None or asked.messages is None:
        return None
    body: dict[str, Any] = {"messages": [_message(message) for message in asked.messages], **_sampling(asked.params)}
    if asked.reply_prefix:
        begun = {"role": "assistant", "content": asked.reply_prefix}
        body |= {"messages": [*body["messages"], begun], "continue_final_message": True, "add_generation_prompt": False}
    if asked.tools:
        body["tools"] = list(asked.tools)
    if asked.constraint is not None:
        schema = {"name": "reply", "schema": asked.constraint.value}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if asked.template_kwargs:
        body["chat_template_kwargs"] = dict(asked.template_kwargs)
    if "rekindle" in request.body:
        body["rekindle"] = request.body["rekindle"]
    return replace(request, endpoint=CHAT, body=body)


def _sampling(params: SamplingParams) -> dict[str, Any]:
    names = ["max_tokens", "seed", *(name for name, known in PARAMETERS.items() if known.openai or known.makers)]
    given = {name: value for name in names if (value := getattr(params, name)) is not None}
    return given | ({"stop": list(params.stop)} if params.stop else {})


def _message(message: Message) -> dict[str, Any]:
    named = {"name": message.name, "tool_call_id": message.tool_call_id}
    return message_of(message) | {name: value for name, value in named.items() if value is not None}
