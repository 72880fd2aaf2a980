"""Conversion of Ollama's messages into those of this project.

Owns what only Ollama has: pictures next to the content, results that name their tool in place of the call's id, and
that a trailing assistant message prefills the reply.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rekindle.errors import BadRequest
from rekindle.text.messages import Message, ToolCall, normalise_messages
from rekindle.text.omissions import Omissions
from rekindle.text.replies.format import SHORT_ID_LENGTH


def messages_of(given: Sequence[Any], omissions: Omissions, *, needs_ids: bool) -> tuple[tuple[Message, ...], str]:
    """Return the messages to reply to, and the beginning of the reply; BadRequest names the message that is wrong.

    `needs_ids`: the chat template accepts no call without an id, which Ollama's Python library drops.
    """
    plain = [_plain(item, f"messages[{index}]", omissions) for index, item in enumerate(given)]
    messages = list(_paired(normalise_messages(plain, omissions), needs_ids=needs_ids))
    last = messages[-1]
    if len(messages) > 1 and last.role == "assistant" and not last.tool_calls and not last.reasoning:
        return tuple(messages[:-1]), last.content
    return tuple(messages), ""


def prompt_messages(
    prompt: str, system: str | None, images: Sequence[str], omissions: Omissions
) -> tuple[Message, ...]:
    """Return the conversation that a prompt is, with its system message and pictures."""
    head = [{"role": "system", "content": system}] if system else []
    asked = {"role": "user", "content": _with_images(prompt, images, "images", omissions)}
    return normalise_messages([*head, asked], omissions)


def _plain(item: Any, where: str, omissions: Omissions) -> Any:
    """Return a message with the keys that the other dialects have; anything but an object as it is."""
    if not isinstance(item, Mapping):
        return item
    message = {key: value for key, value in item.items() if key not in ("images", "tool_name")}
    if isinstance(message.get("role"), str):
        message["role"] = message["role"].lower()
    if item.get("tool_name") is not None and message.get("name") is None:
        message["name"] = item["tool_name"]
    if item.get("images"):
        message["content"] = _with_images(message.get("content"), item["images"], f"{where}.images", omissions)
    return message


def _with_images(content: Any, images: Any, where: str, omissions: Omissions) -> Any:
    """Return content after the lines that stand for its pictures."""
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        raise BadRequest(f"{where} must be a list of pictures in base64", param=where)
    lines = [omissions.part({"type": "image", "data": each}, f"{where}[{at}]") for at, each in enumerate(images)]
    if content is None or isinstance(content, str):
        return "\n".join([*lines, content] if content else lines)
    return [*lines, *(content if isinstance(content, list) else [content])]


def _paired(messages: Sequence[Message], *, needs_ids: bool) -> Iterator[Message]:
    """Yield messages whose results have the ids of their calls: of that name, or the first without a result."""
    left: list[ToolCall] = []
    for at, message in enumerate(messages):
        if message.tool_calls:
            if needs_ids:
                message = replace(message, tool_calls=tuple(_with_ids(message.tool_calls, at)))
            left = list(message.tool_calls)
        elif message.role == "tool":
            call = _call_of(message, left)
            if call is not None:
                left.remove(call)
                message = replace(message, tool_call_id=message.tool_call_id or call.id)
        yield message


def _call_of(result: Message, left: Sequence[ToolCall]) -> ToolCall | None:
    if result.tool_call_id is not None:
        return next((call for call in left if call.id == result.tool_call_id), None)
    return next((call for call in left if result.name in (None, call.name)), None)


def _with_ids(calls: Sequence[ToolCall], at: int) -> Iterator[ToolCall]:
    """Yield calls with ids, the same in every turn; those of a message's place and their own in it."""
    for number, call in enumerate(calls):
        yield call if call.id else replace(call, id=f"{at:06d}{number:03d}"[-SHORT_ID_LENGTH:])
