"""Logged bodies and answers as conversations, read (after `pruning`) by the parsers that serve such requests.

Owns the attribution of a request to an agent, and the responses that later ones continue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers

from rekindle.errors import BadRequest
from rekindle.server.anthropic.calls import ModelSide, parse_count
from rekindle.server.anthropic.conversation import find_habits
from rekindle.server.gate.caller import Caller, named_by
from rekindle.server.openai.calls import parse_chat, parse_completion
from rekindle.server.responses.calls import parse_response
from rekindle.server.responses.item_fields import Item
from rekindle.server.responses.items import ItemReader, messages_of
from rekindle.server.responses.stored import StoredResponse
from rekindle.text.messages import Message, map_strings, normalise_messages, sound
from rekindle.text.omissions import Omissions
from rekindle.text.prompt import PromptEncoder
from rekindle.text.replies import ReplyFormat
from rekindle_lab.analyze.pruning import (
    chat_body,
    chat_message,
    first_prompt,
    messages_body,
    messages_message,
    ollama_body,
    response_items,
    responses_body,
)
from rekindle_lab.analyze.shapes import Logged, parsed

MAX_STORED_RESPONSES = 2_048  # responses that later bodies may continue
_ANONYMOUS = Caller()


@dataclass(frozen=True, slots=True)
class LoggedPrompt:
    """The prompt of a body: messages with tools, or text in which control tokens are recognised."""

    messages: tuple[Message, ...] = ()
    text: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class BodyReader:
    """Reads the bodies of one log in order; a response may continue an earlier one of the log."""

    def __init__(self, encoder: PromptEncoder, form: ReplyFormat) -> None:
        self._side = ModelSide(form, find_habits(encoder))
        self._responses = _LoggedResponses()

    def read(self, logged: Logged) -> LoggedPrompt:
        """Return the prompt of one request; raises BadRequest if even the pruned body cannot be served."""
        body = map_strings(logged.body, sound)
        match logged.dialect:
            case "chat":
                request = parse_chat(chat_body(body), _ANONYMOUS).requests[0]
            case "messages":
                request, _ = parse_count(messages_body(body), _ANONYMOUS, self._side)
            case "responses":
                call = parse_response(responses_body(body), _ANONYMOUS, self._responses)
                self._responses.add(call.items, body.get("previous_response_id"), map_strings(logged.answer, sound))
                request = call.request
            case "ollama":
                given = ollama_body(body)
                parse = parse_chat if "messages" in given else parse_completion
                request = parse(given, _ANONYMOUS).requests[0]
            case "completions":
                request = parse_completion({"prompt": first_prompt(body["prompt"])}, _ANONYMOUS).requests[0]
        return LoggedPrompt(request.messages or (), request.text, request.tools, request.template_kwargs)

    def answer(self, logged: Logged) -> Message | None:
        """Return the logged reply; None if there is none that can be read, such as raw stream chunks."""
        try:
            return _answer(map_strings(logged.answer, sound), self._side)
        except BadRequest:
            return None


def session_of(logged: Logged) -> str | None:
    """Return the agent named by the headers, as the server reads them, else the logger's session; None: neither."""
    try:
        plain = {name: value for name, value in logged.headers.items() if name.isascii() and value.isascii()}
        named = named_by(Headers(plain)).agent
    except BadRequest:
        named = None
    return named or logged.session


def _answer(answer: Any, side: ModelSide) -> Message | None:
    """Return the message in an answer of any dialect."""
    if isinstance(answer, str):
        return Message("assistant", answer) if answer.strip() and not answer.startswith(("data:", "event:")) else None
    if not isinstance(answer, Mapping):
        return None
    if isinstance(answer.get("choices"), list) and answer["choices"] and isinstance(answer["choices"][0], Mapping):
        choice = answer["choices"][0]
        answer = choice.get("message") or {"role": "assistant", "content": choice.get("text")}
    if isinstance(answer.get("output"), list):
        return next(iter(messages_of(_read_items(answer["output"]), None)), None)
    if answer.get("role") == "assistant":
        is_blocks = isinstance(answer.get("content"), list) and answer.get("type") == "message"
        if not is_blocks:
            return normalise_messages([chat_message(answer)])[0]
        asked = {
            "messages": [{"role": "user", "content": "?"}, messages_message(answer), {"role": "user", "content": "!"}]
        }
        request, _ = parse_count(asked, _ANONYMOUS, side)
        return next((message for message in request.messages or () if message.role == "assistant"), None)
    inner = next((answer[key] for key in ("body", "content", "message", "text", "response") if answer.get(key)), None)
    return _answer(parsed(inner), side)


def _read_items(items: Sequence[Any]) -> list[Item]:
    return ItemReader(lambda id: None, Omissions()).read(response_items(items))


class _LoggedResponses:
    """The latest responses of the log by id, in the server's form."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def chain(self, namespace: str, id: str) -> list[StoredResponse]:
        """Return the conversation up to and including a response; BadRequest if the log lacks it."""
        found: list[StoredResponse] = []
        wanted: str | None = id
        while wanted is not None:
            stored = self._stored.get(wanted)
            if stored is None:
                raise BadRequest(f"it continues response {wanted[:80]!r}, which the log does not hold")
            found.append(stored)
            wanted = stored.previous
        return found[::-1]

    def item(self, namespace: str, id: str) -> Item | None:
        """Return None: items are not stored individually."""
        return None

    def add(self, items: Sequence[Item], previous: str | None, answer: Any) -> None:
        """Store a request's items with its answer, if the log holds one with an id."""
        if not isinstance(answer, Mapping) or not isinstance(answer.get("id"), str):
            return
        output = answer.get("output")
        replied = _read_items(output) if isinstance(output, list) else []
        response = {"id": answer["id"], "previous_response_id": previous, "output": replied}
        self._stored[answer["id"]] = StoredResponse("", None, response, items)
        while len(self._stored) > MAX_STORED_RESPONSES:
            self._stored.popitem(last=False)
