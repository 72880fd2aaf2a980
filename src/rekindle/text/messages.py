"""Conversations as callers send them, normalised once.

Owns what a message may look like: content parts become text, null becomes empty, `developer` becomes `system`, tool
arguments stay the string the model generated. What cannot be shown is left out (`omissions`), what cannot be served is
refused with the index of the message and what to do about it. Knows no template and no token, only the one character
that prompts may not contain: the guard.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from rekindle.errors import BadRequest, quoted
from rekindle.text.omissions import REFUSE, Omissions, text_in

# A Unicode noncharacter: never assigned, so no text loses anything when it is refused. See text/vocabulary.
GUARD = "\ufdd0"
PIECE_CHARS = 1 << 16  # takes a millisecond to look through
_SURROGATES = re.compile("[\ud800-\udfff]")
ROLES = ("system", "user", "assistant", "tool")
_ROLE_NAMES = {"developer": "system", "function": "tool"}  # other names of these roles
TEXT_PARTS = ("text", "input_text", "output_text")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
KNOWN_KEYS = frozenset(("role", "content", "name", "tool_calls", "tool_call_id", *REASONING_KEYS))
# What clients echo from an answer; none of it belongs in a prompt.
ECHOED_KEYS = frozenset(("refusal", "annotations", "audio", "function_call", "id", "index", "status"))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the model made; `arguments` verbatim as generated, usually a JSON object."""

    id: str | None
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, its content plain text."""

    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None


def leading_system(messages: Sequence[Message]) -> list[Message]:
    """Return the system messages that a conversation begins with."""
    return [*takewhile(lambda message: message.role == "system", messages)]


def plainer_forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield simpler forms of a conversation, for templates that refuse it; the nearest form first, often none.

    System messages at the head become one, later ones become user messages; then consecutive user messages become one,
    and those right after a tool result become part of it. Reasoning next to text and calls becomes the first paragraph
    of the text. In the last forms no system message is left.
    """
    systems = _with_one_system(messages)
    inlined = [_with_reasoning_in_text(message) for message in messages]
    plain = _with_one_system(inlined)
    turns, plain_turns, users = (_joined(form, "user") for form in (systems, plain, _of_user(plain)))
    forms = [systems, turns, _joined(messages, "tool"), _joined(turns, "tool")]
    forms += [inlined, plain_turns, _joined(plain_turns, "tool"), users, _joined(users, "tool")]
    tried = [list(messages)]
    for form in forms:
        if form not in tried:
            tried.append(form)
            yield form


def _with_reasoning_in_text(message: Message) -> Message:
    if not (message.reasoning and message.content and message.tool_calls):
        return message
    return replace(message, content=f"{message.reasoning}\n\n{message.content}", reasoning=None)


def _with_one_system(messages: Sequence[Message]) -> list[Message]:
    num_head = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
    head = [replace(messages[0], content=_paragraphs(messages[:num_head]))] if num_head else []
    return head + _of_user(messages[num_head:])


def _of_user(messages: Sequence[Message]) -> list[Message]:
    return [replace(each, role="user") if each.role == "system" else each for each in messages]


def _joined(messages: Sequence[Message], onto: str) -> list[Message]:
    """Merge user messages into a message of the role `onto` right before them."""
    merged: list[Message] = []
    for message in messages:
        if merged and (merged[-1].role, message.role) == (onto, "user"):
            merged[-1] = replace(merged[-1], content=_paragraphs([merged[-1], message]))
        else:
            merged.append(message)
    return merged


def _paragraphs(messages: Sequence[Message]) -> str:
    return "\n\n".join(message.content for message in messages if message.content)


def normalise_messages(raw: Any, omissions: Omissions = REFUSE) -> tuple[Message, ...]:
    """Convert a list of JSON messages to the form that everything else uses.

    Parts that a text model cannot see become a line of text, keys that nobody knows are ignored, both as `omissions`
    decides. Raises BadRequest, naming the index, for roles, values and characters that cannot be served.
    """
    if isinstance(raw, str | bytes) or not isinstance(raw, Sequence):
        raise BadRequest("messages must be a list of objects with role and content", param="messages")
    if not raw:
        raise BadRequest("messages is empty: send at least one message", param="messages")
    return tuple(_message(item, f"messages[{index}]", omissions) for index, item in enumerate(raw))


def arguments_json(arguments: Any) -> str:
    """Serialize tool arguments that a caller sends as an object, everywhere in the same way."""
    return json.dumps(arguments, ensure_ascii=False)


def check_text(text: str, where: str) -> str:
    """Return `text` if a prompt may contain it: no half of a surrogate pair, no guard character."""
    if GUARD in text:
        raise BadRequest(f"{where} contains U+FDD0, a noncharacter used internally: remove it", param=where)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"U+{ord(text[error.start]):04X} at character {error.start}"
        message = f"{where} contains half of a surrogate pair ({what}): send well-formed Unicode"
        raise BadRequest(message, param=where) from None
    return text


def pieces_of_text(text: str) -> Iterator[str]:
    """Yield a text in pieces: while a pattern is looked for in a text of megabytes, no other thread runs."""
    return (text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS))


def is_sound(text: str) -> bool:
    """Whether a prompt may contain `text`."""
    return text.isascii() or (GUARD not in text and not any(map(_SURROGATES.search, pieces_of_text(text))))


def sound(text: str) -> str:
    """Replace what a prompt may not contain by U+FFFD."""
    if is_sound(text):
        return text
    return "".join(_SURROGATES.sub("\ufffd", piece).replace(GUARD, "\ufffd") for piece in pieces_of_text(text))


def check_json(value: Any, where: str) -> None:
    """Apply `check_text` to every string of a JSON value, keys included."""
    if isinstance(value, str):
        check_text(value, where)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_json(key, where)
            check_json(item, where)
    elif isinstance(value, list | tuple):
        for item in value:
            check_json(item, where)


def sound_values(value: Any, omissions: Omissions, where: str = "") -> Any:
    """Return a JSON value with U+FFFD for what no prompt may contain, recorded; the value itself if that is nothing.

    Clients in JavaScript cut texts in the middle of an emoji, and send the half in every turn from then on. With strict
    `omissions` it stays, for `check_text` to refuse.
    """
    if omissions.strict:
        return value
    if isinstance(value, str):
        return value if is_sound(value) else omissions.unsound(sound(value), where)
    if isinstance(value, dict):
        changed = {
            sound_values(key, omissions, where): sound_values(
                item, omissions, f"{where}.{key[:100]}" if where else key[:100]
            )
            for key, item in value.items()
        }
        return value if all(map(_is_itself, changed.items(), value.items())) else changed
    if isinstance(value, list):
        items = [sound_values(item, omissions, f"{where}[{at}]") for at, item in enumerate(value)]
        return value if all(map(operator.is_, items, value)) else items
    return value


def _is_itself(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
    return one[0] is other[0] and one[1] is other[1]


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with every string in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


def _message(item: Any, where: str, omissions: Omissions) -> Message:
    if not isinstance(item, Mapping):
        raise BadRequest(f"{where} must be an object with role and content", param=where)
    _check_keys(item, where, omissions)
    given = item.get("role")
    role = _ROLE_NAMES.get(given, given) if isinstance(given, str) else None
    if role not in ROLES:
        known = ", ".join((*ROLES, *_ROLE_NAMES))
        raise BadRequest(f"{where}.role is {quoted(given)}: use one of {known}", param=f"{where}.role")
    calls = _tool_calls(_calls_of(item), where)
    if calls and role != "assistant":
        raise BadRequest(f"{where}.tool_calls: only assistant messages call tools", param=f"{where}.tool_calls")
    reasoning = next((item[key] for key in REASONING_KEYS if item.get(key) is not None), None)
    return Message(
        role=role,
        content=content_text(item.get("content"), f"{where}.content", omissions),
        name=_optional_text(item.get("name"), f"{where}.name"),
        tool_calls=calls,
        tool_call_id=_optional_text(item.get("tool_call_id"), f"{where}.tool_call_id"),
        reasoning=_optional_text(reasoning, f"{where}.reasoning_content"),
    )


def _check_keys(item: Mapping[str, Any], where: str, omissions: Omissions) -> None:
    for key in item:
        if key not in KNOWN_KEYS and key not in ECHOED_KEYS and item[key] not in (None, [], {}, ""):
            omissions.key(str(key), where)


def _calls_of(item: Mapping[str, Any]) -> Any:
    """Return the calls of a message, also one in the form before `tool_calls`."""
    old = item.get("function_call")
    return [{"type": "function", "function": old}] if old and not item.get("tool_calls") else item.get("tool_calls")


def _optional_text(value: Any, where: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadRequest(f"{where} must be a string, not {type(value).__name__}", param=where)
    return check_text(value, where)


def content_text(value: Any, where: str, omissions: Omissions = REFUSE) -> str:
    """Content as one text; several parts are joined by a newline, as paragraphs, but for pictures, which stand in it
    as marks."""
    if value is None:
        return ""
    if isinstance(value, str):
        return check_text(value, where)
    if not isinstance(value, list | tuple):
        raise BadRequest(f"{where} must be a string or a list of parts, not {type(value).__name__}", param=where)
    return joined(_part(part, f"{where}[{index}]", omissions) for index, part in enumerate(value))


def joined(texts: Iterable[str]) -> str:
    """Join the texts of parts: as paragraphs, and a mark to what is next to it, as the template then has them."""
    written = ""
    for index, text in enumerate(texts):
        written += text if not index or are_next_to_mark(written, text) else f"\n{text}"
    return written


def are_next_to_mark(before: str, after: str) -> bool:
    """Whether one of two texts is the mark of a picture where they meet."""
    return before.endswith(GUARD) or after.startswith(GUARD)


def _part(part: Any, where: str, omissions: Omissions) -> str:
    if isinstance(part, str):
        return check_text(part, where)
    if not isinstance(part, Mapping):
        raise BadRequest(f"{where} must be a string or an object with a type", param=where)
    kind = part.get("type", "text" if "text" in part else None)
    key = "text" if kind in TEXT_PARTS else "refusal" if kind == "refusal" else None
    if key is None:
        return shown_text(part, where, omissions)
    if not isinstance(part.get(key), str):
        raise BadRequest(f"{where}.{key} must be a string", param=where)
    return check_text(part[key], where)


def shown_text(part: Mapping[str, Any], where: str, omissions: Omissions) -> str:
    """Return what a text model sees of a part that is not text: the text that it holds, or a line in its place."""
    text = text_in(part)
    return check_text(text, where) if text is not None else omissions.part(part, where)


def _tool_calls(value: Any, where: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise BadRequest(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
    return tuple(_tool_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(value))


def _tool_call(call: Any, where: str) -> ToolCall:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where} must be an object with function.name and function.arguments", param=where)
    arguments = function.get("arguments")
    if arguments is None:
        arguments = ""
    elif isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not isinstance(arguments, str):
        raise BadRequest(f"{where}.function.arguments must be a JSON string or an object", param=where)
    check_text(arguments, f"{where}.function.arguments")
    call_id = _optional_text(call.get("id"), f"{where}.id")
    return ToolCall(call_id, check_text(function["name"], f"{where}.function.name"), arguments)
