"""Turns a body of the responses API into a request to the engine.

A parameter that would change the answer and is not implemented is refused by name; a short list that cannot change it
is ignored. null means "not given", but only for a known parameter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from rekindle.engine.tool_choice import ToolChoice
from rekindle.engine.types import GenerationRequest
from rekindle.errors import BadRequest
from rekindle.model.params import SamplingParams
from rekindle.model.sampling_defaults import NOTHING_SAID, SamplingDefaults
from rekindle.server.answers.options import RekindleOptions, read_format, sampling_in, template_fields, template_kwargs
from rekindle.server.answers.validation import short, validated
from rekindle.server.gate.caller import Caller
from rekindle.server.responses.bodies import ENCRYPTED, HARMLESS, NEUTRAL, NOTHING_TO_INCLUDE, Reasoning, ResponseBody
from rekindle.server.responses.item_fields import Item
from rekindle.server.responses.items import ItemReader, check_outputs, messages_of
from rekindle.server.responses.stored import StoredResponse
from rekindle.server.responses.tools import OfferedTools, read_choice, read_tools
from rekindle.text.messages import Message, check_json, check_text
from rekindle.text.omissions import Omissions

# Stored items have no pictures: why a model that sees is not shown one, and what to do.
UNSEEN = ("pictures are seen only with store: false", "send that, or its text")


class ResponseLookup(Protocol):
    """Finds stored responses: the server's, or those of a request log."""

    def chain(self, namespace: str, id: str) -> list[StoredResponse]:
        """The conversation up to and including a response."""

    def item(self, namespace: str, id: str) -> Item | None:
        """The stored item of an id."""


@dataclass(frozen=True, slots=True)
class ResponseCall:
    """A parsed body: what to generate, how to parse the reply, and which request fields the answer repeats.

    `items`: those of this request, stored with the response. `seals`: reasoning is also sent as `encrypted_content`.
    `compared_with`: the id of the response whose request the answer is to be compared with.
    """

    request: GenerationRequest
    model: str | None
    stream: bool
    store: bool
    return_ids: bool
    seals: bool
    parallel: bool
    tools: OfferedTools
    tool_choice: ToolChoice
    items: tuple[Item, ...]
    echo: dict[str, Any]
    compared_with: str | None = None

    @property
    def read_tools(self) -> Sequence[Any]:
        """Definitions of the tools whose calls are parsed in the reply."""
        return self.tools.shown if self.tool_choice.kind != "none" else ()


def parse_response(
    body: Any,
    caller: Caller,
    lookup: ResponseLookup,
    *,
    defaults: SamplingDefaults = NOTHING_SAID,
    strict: bool = False,
    sees: bool = False,
) -> ResponseCall:
    """Parse a JSON body and look up what it refers to; BadRequest names the parameter to change.

    `defaults`: for the sampling that it leaves open. `strict`: what would be left out or ignored is refused. `sees`:
    pictures are read, unless the response is stored.
    """
    omissions = _omissions(body, strict=strict, sees=sees)
    asked = validated(ResponseBody, body, omissions=omissions, harmless=HARMLESS, neutral=NEUTRAL)
    options, reasoning = asked.rekindle or RekindleOptions(), asked.reasoning or Reasoning()
    chain, history, items = _items(asked, caller, lookup, omissions)
    messages, tools = _messages(asked, [*history, *items]), read_tools(asked.tools, omissions)
    _check_repeated(tools=asked.tools, tool_choice=asked.tool_choice)
    choice = read_choice(asked.tool_choice, tools)
    request = GenerationRequest(
        messages=messages,
        agent=caller.agent,
        namespace=caller.namespace,
        tools=list(tools.shown) or None,
        params=_params(asked, defaults),
        reuse=options.reuse,
        parent=caller.parent or _parent(caller, chain),
        **template_fields(_template_kwargs(asked, reasoning), asked.chat_template_kwargs, "reasoning.effort"),
        constraint=None if choice.is_forced else read_format(asked.text.format if asked.text else None, "text.format"),
        structured=True,
        echoes_thoughts=True if chain or all(message.role != "assistant" for message in messages) else None,
        omitted=omissions.all(),
        pictures=omissions.pictures,
    )
    return ResponseCall(
        request=request,
        model=asked.model,
        stream=bool(asked.stream),
        store=asked.store is not False,
        return_ids=options.return_ids,
        seals=_seals(asked),
        parallel=asked.parallel_tool_calls is not False and choice.name is None,
        tools=tools,
        tool_choice=choice,
        items=tuple(items),
        echo=_echo(asked, request, reasoning),
        compared_with=asked.compared_with,
    )


def _omissions(body: Any, *, strict: bool, sees: bool) -> Omissions:
    if not sees:
        return Omissions(strict=strict)
    if isinstance(body, dict) and body.get("store") is False:
        return Omissions(strict=strict, sees=True)
    return Omissions(strict=strict, unseen=UNSEEN)


def _items(
    asked: ResponseBody, caller: Caller, lookup: ResponseLookup, omissions: Omissions
) -> tuple[list[StoredResponse], list[Item], list[Item]]:
    """The stored responses that a request continues, their items, and its own."""
    chain = lookup.chain(caller.namespace, asked.previous_response_id) if asked.previous_response_id else []
    items = ItemReader(cache(lambda id: lookup.item(caller.namespace, id)), omissions).read(asked.input)
    history = [item for stored in chain for item in stored.all_items]
    check_outputs(history, items)
    return chain, history, items


def _parent(caller: Caller, chain: Sequence[StoredResponse]) -> str | None:
    """The agent that remembers the conversation a named caller continues, if that is another agent."""
    holder = chain[-1].agent if chain and caller.agent is not None else None
    return None if holder == caller.agent else holder


def _messages(asked: ResponseBody, items: list[Item]) -> tuple[Message, ...]:
    instructions = asked.instructions and check_text(asked.instructions, "instructions")
    messages = messages_of(items, instructions)
    if not messages:
        raise BadRequest("input is empty: send text or items", param="input")
    return messages


def _template_kwargs(asked: ResponseBody, reasoning: Reasoning) -> dict[str, Any]:
    try:
        return template_kwargs(asked.chat_template_kwargs, reasoning.effort)
    except BadRequest as error:
        if error.param == "reasoning_effort":
            message = str(error).replace("reasoning_effort", "reasoning.effort")
            raise BadRequest(message, param="reasoning.effort") from None
        raise


def _params(asked: ResponseBody, defaults: SamplingDefaults) -> SamplingParams:
    return defaults.params("openai", {"max_tokens": asked.max_output_tokens, **sampling_in(asked)})


def _seals(asked: ResponseBody) -> bool:
    """Whether reasoning is requested in the form that stateless clients send back."""
    wanted = set(asked.include or ())
    strange = sorted(wanted - NOTHING_TO_INCLUDE - {ENCRYPTED})
    if strange:
        message = f"include: {short(strange[0])} is not supported; logprobs are given by chat completions"
        raise BadRequest(message, param="include")
    return ENCRYPTED in wanted


def _repeated_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool with every field that clients look for."""
    return {"parameters": None, "strict": False, **tool} if tool.get("type") == "function" else tool


def _check_repeated(**values: Any) -> None:
    """BadRequest if the answer could not repeat these as JSON: broken Unicode, or numbers that JSON does not have."""
    for name, value in values.items():
        check_json(value, name)
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise BadRequest(f"{name}: NaN and Infinity are no JSON: send finite numbers", param=name) from None


def _echo(asked: ResponseBody, request: GenerationRequest, reasoning: Reasoning) -> dict[str, Any]:
    """The request fields that OpenAI's responses repeat."""
    return {
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
        "store": asked.store is not False,
        "temperature": request.params.temperature,
        "text": {"format": (asked.text.format if asked.text else None) or {"type": "text"}},
        "tool_choice": asked.tool_choice or "auto",
        "tools": [_repeated_tool(tool) for tool in asked.tools or ()],
        "top_p": request.params.top_p,
        "truncation": "disabled",
    }
