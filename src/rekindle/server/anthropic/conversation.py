"""Conversion of Anthropic's messages into those of this project, with the breakpoints that a client sets.

Owns the conversion of each content block. One of their messages may become several: each tool result is a separate
message, the text around it another. Consecutive turns of one role are merged, as Anthropic documents. Blocks that
a text model cannot see become a line of text. Knows no template, only what it accepts (see `habits`).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from rekindle.engine.types import Breakpoint
from rekindle.errors import BadRequest
from rekindle.server.anthropic.bodies import CacheControl
from rekindle.text.messages import Message, ToolCall, are_next_to_mark, arguments_json, check_text, shown_text
from rekindle.text.omissions import Omissions
from rekindle.text.prompt import PromptEncoder

MAX_BREAKPOINTS = 4  # Anthropic's own limit
_WORD = "quicksilver"  # that a probe of a template looks for
# Separators between the blocks of one turn: the client's are paragraphs; a reply continues without a break.
_JOINTS = {"system": "\n", "user": "\n", "tool": "\n", "assistant": ""}
MERGED = ("system", "user")  # roles that a prompt may end with, and that the next message may be merged into
Block = Mapping[str, Any]
_SHOWN, _HIDDEN = "rekindle-1-", "rekindle-2-"


# Signatures of thinking blocks: opaque to clients, which send them back unchanged.
#
# They prove nothing: any client of this server may supply reasoning. If the thinking is hidden, the signature carries
# it, so that the next prompt can include it.


def sign(reasoning: str, *, hidden: bool) -> str:
    """Return the signature of a thinking block; if `hidden`, its length grows with the text."""
    raw = reasoning.encode("utf-8", "replace")
    if hidden:
        return _HIDDEN + base64.urlsafe_b64encode(raw).decode("ascii")
    return _SHOWN + base64.urlsafe_b64encode(hashlib.blake2b(raw, digest_size=18).digest()).decode("ascii")


def reasoning_of(signature: object) -> str:
    """Return the reasoning that a signature carries; empty if it carries none or another server wrote it."""
    if not isinstance(signature, str) or not signature.startswith(_HIDDEN):
        return ""
    try:
        return base64.urlsafe_b64decode(signature.removeprefix(_HIDDEN).encode("ascii")).decode()
    except ValueError:
        return ""


@dataclass(slots=True)
class _Turn:
    """A message being assembled."""

    role: str
    tool_call_id: str | None = None
    texts: list[str] = field(default_factory=list)
    num_chars: int = 0
    calls: list[ToolCall] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)

    def add_text(self, text: str) -> None:
        joint = _JOINTS[self.role] if self.num_chars and text and not are_next_to_mark(self.texts[-1], text) else ""
        self.texts.append(joint + text)
        self.num_chars += len(joint) + len(text)

    def message(self) -> Message:
        return Message(
            role=self.role,
            content="".join(self.texts),
            tool_calls=tuple(self.calls),
            tool_call_id=self.tool_call_id,
            reasoning="".join(self.reasoning) or None,
        )


@dataclass(frozen=True, slots=True)
class _Mark:
    """A breakpoint: after `num_chars` characters of `turn`, or after the tools if `turn` is None."""

    turn: _Turn | None
    num_chars: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation to reply to; `prefix` is the given beginning of the reply."""

    messages: tuple[Message, ...]
    breakpoints: tuple[Breakpoint, ...]
    prefix: str

    @property
    def echoes_reasoning(self) -> bool:
        """Whether the client sends reasoning back, judging by its history; True, as documented, without replies."""
        replies = [message for message in self.messages if message.role == "assistant"]
        return not replies or any(message.reasoning is not None for message in replies)


class Conversation:
    """Builds a prompt: add tools, system and messages in this order, then call `finish`."""

    def __init__(
        self, habits: TemplateHabits, omissions: Omissions, deferred: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self.loaded: dict[str, Mapping[str, Any]] = {}  # deferred tools that the history has found
        self._deferred = deferred or {}
        self._habits = habits
        self._omissions = omissions
        self._turns: list[_Turn] = []
        self._marks: list[_Mark] = []

    def add_tools(self, tools: Sequence[Block]) -> None:
        """Record the breakpoints set on tools."""
        for index, tool in enumerate(tools):
            self._mark(tool, None, f"tools[{index}]")

    def add_system(self, system: str | Sequence[Block]) -> None:
        """Add the system prompt: a text or text blocks."""
        self._texts(system, self._open("system"), "system")

    def add_messages(self, messages: Sequence[Block]) -> None:
        """Add all messages, in order."""
        for index, message in enumerate(messages):
            self._add(message, f"messages[{index}]")

    def finish(self, last: CacheControl | None) -> Prompt:
        """Return the prompt; `last` is a breakpoint at its end, unless there is one already."""
        end = self._turns[-1] if self._turns else None
        if (
            last is not None
            and end is not None
            and all((m.turn, m.num_chars) != (end, end.num_chars) for m in self._marks)
        ):
            self._marks.append(_Mark(end, end.num_chars, last.ttl_s))
        self._check_marks()
        prefix = self._prefix()
        if not any(turn.role != "system" for turn in self._turns):
            raise BadRequest("messages: send at least one message of the user", param="messages")
        return Prompt(tuple(turn.message() for turn in self._turns), tuple(self._breakpoints()), prefix)

    def _add(self, message: Block, where: str) -> None:
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise BadRequest(f"{where}.role is {str(role)[:80]!r}: use user or assistant", param=f"{where}.role")
        for extra in (key for key in message if key not in ("role", "content")):
            self._omissions.key(extra, where)
        content, where = message.get("content"), f"{where}.content"
        if role == "system":
            self._texts(content, self._open("system"), where)
        elif isinstance(content, str):
            self._open(role).add_text(check_text(content, where))
        else:
            for block, place in _blocks(content, where):
                self._block(role, block, place)

    def _open(self, role: str) -> _Turn:
        """Return the last turn if it has this role, else a new one."""
        if role == "system" and self._turns and not self._habits.takes_late_system:
            role = "user"
        last = self._turns[-1] if self._turns else None
        if last is not None and last.role == role:
            return last
        self._turns.append(_Turn(role))
        return self._turns[-1]

    def _block(self, role: str, block: Block, where: str) -> None:
        match role, block.get("type"):
            case _, "text":
                turn = self._open(role)
                turn.add_text(_text(block, where))
            case "user", "tool_result":
                turn = _Turn("tool", _string(block, "tool_use_id", where))
                self._turns.append(turn)
                self._result(block, turn, where)
            case "assistant", "tool_use":
                turn = self._open(role)
                turn.calls.append(_call(block, where))
            case "assistant", "thinking":
                reasoning = _string(block, "thinking", where) or reasoning_of(block.get("signature"))
                self._open(role).reasoning.append(check_text(reasoning, where))
                return
            case "assistant", "redacted_thinking":
                return  # encrypted by another server
            case _:
                turn = self._open(role)
                turn.add_text(self._shown(block, where))
        self._mark(block, turn, where)

    def _result(self, block: Block, turn: _Turn, where: str) -> None:
        content = block.get("content")
        if content is not None:
            self._texts(content, turn, f"{where}.content")
        if not turn.num_chars and block.get("is_error") is True:
            turn.add_text("error")  # without any text the model would take it for a success

    def _texts(self, content: Any, turn: _Turn, where: str) -> None:
        """Add a text, or a list of text blocks."""
        if isinstance(content, str):
            turn.add_text(check_text(content, where))
            return
        for block, place in _blocks(content, where):
            is_text = block.get("type") == "text"
            turn.add_text(_text(block, place) if is_text else self._shown(block, place))
            self._mark(block, turn, place)

    def _shown(self, block: Block, where: str) -> str:
        """Return the text in place of a block: a deferred tool is defined where it is found first."""
        name = block.get("tool_name") if block.get("type") == "tool_reference" else None
        if not isinstance(name, str) or name not in self._deferred:
            return shown_text(block, where, self._omissions)
        if name in self.loaded:
            return name
        self.loaded[name] = self._deferred[name]
        return json.dumps(self.loaded[name], ensure_ascii=False)

    def _mark(self, block: Block, turn: _Turn | None, where: str) -> None:
        given = block.get("cache_control")
        if given is None:
            return
        where = f"{where}.cache_control"
        if block.get("text") == "":
            raise BadRequest(f"{where}: an empty text cannot be marked", param=where)
        try:
            control = CacheControl.model_validate(given)
        except ValidationError:
            message = f"{where}: use {{'type': 'ephemeral'}}, with a ttl of '5m' or '1h' if you like"
            raise BadRequest(message, param=where) from None
        self._marks.append(_Mark(turn, turn.num_chars if turn is not None else 0, control.ttl_s))

    def _check_marks(self) -> None:
        """Refuse more breakpoints than Anthropic allows, and any with a longer ttl than one before it."""
        if len(self._marks) > MAX_BREAKPOINTS:
            message = f"cache_control: at most {MAX_BREAKPOINTS} blocks can be marked, not {len(self._marks)}"
            raise BadRequest(message, param="cache_control")
        times = [mark.ttl_s for mark in self._marks]
        if times != sorted(times, reverse=True):
            message = "cache_control: a block with ttl '1h' must not come after one with '5m' (tools, system, messages)"
            raise BadRequest(message, param="cache_control")

    def _prefix(self) -> str:
        """Remove and return the last turn if it is the assistant's: the reply continues it."""
        last = self._turns[-1] if self._turns else None
        if last is None or last.role != "assistant":
            return ""
        where = "messages"
        if last.calls:
            raise BadRequest("messages: the last message calls tools: send a tool_result for each call", param=where)
        if last.reasoning:
            message = "messages: the last message is the assistant's and thinks: a reply can be begun with text only"
            raise BadRequest(message, param=where)
        prefix = last.message().content
        if prefix != prefix.rstrip():
            raise BadRequest("messages: final assistant content cannot end with trailing whitespace", param=where)
        self._turns.pop()
        return prefix

    def _breakpoints(self) -> Iterator[Breakpoint]:
        places = {id(turn): index for index, turn in enumerate(self._turns)}
        for mark in self._marks:
            if mark.turn is None:
                yield Breakpoint(None, None, mark.ttl_s)
            elif (index := places.get(id(mark.turn))) is None:  # in the prefix: use the end of the prompt
                yield Breakpoint(len(self._turns) - 1, None, mark.ttl_s)
            else:
                whole = mark.num_chars == mark.turn.num_chars
                yield Breakpoint(index, None if whole else mark.num_chars, mark.ttl_s)


def _blocks(content: Any, where: str) -> Iterator[tuple[Block, str]]:
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a string or a list of blocks", param=where)
    for index, block in enumerate(content):
        place = f"{where}[{index}]"
        if not isinstance(block, Mapping):
            raise BadRequest(f"{place} must be an object with a type", param=place)
        yield block, place


def _string(block: Block, key: str, where: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise BadRequest(f"{where}.{key} must be a string", param=f"{where}.{key}")
    return check_text(value, f"{where}.{key}")


def _text(block: Block, where: str) -> str:
    return _string(block, "text", where)


def _call(block: Block, where: str) -> ToolCall:
    given = block.get("input")
    if not isinstance(given, Mapping):
        raise BadRequest(f"{where}.input must be an object", param=f"{where}.input")
    arguments = check_text(arguments_json(given), f"{where}.input")
    return ToolCall(_string(block, "id", where), _string(block, "name", where), arguments)


# Detection of chat templates that silently drop parts of Anthropic's conversations.
#
# Owns one habit that raises no error: dropping system messages in the middle. It is probed once, by rendering. Messages
# that a template refuses are moved to where it accepts them, for every dialect (see text/messages).


@dataclass(frozen=True, slots=True)
class TemplateHabits:
    """`takes_late_system` False: system messages in the middle are sent as the user's."""

    takes_late_system: bool


def find_habits(encoder: PromptEncoder) -> TemplateHabits:
    """Probe the template of this encoder."""
    asked, word = Message("user", "Look, please."), Message("user", _WORD)
    answered = Message("assistant", "Nothing there.")
    late = _shown(encoder, [asked, answered, Message("system", _WORD), asked])
    return TemplateHabits(
        # If the template refuses it, it is sent as the user's.
        takes_late_system=late is not None and late != _shown(encoder, [asked, answered, word, asked])
    )


def _shown(encoder: PromptEncoder, messages: Sequence[Message]) -> str | None:
    """Render the messages; None if the template refuses them or the word is not in the text exactly once."""
    tool = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
    try:
        text = encoder.readable(encoder.render_chat(messages, [tool]).key)
    except BadRequest:
        return None
    return text if text.count(_WORD) == 1 else None
