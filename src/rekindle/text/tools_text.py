"""Tools in the text of a conversation, for templates that have no place for them.

Owns the words that describe tools to the model, and how calls and results are written in messages of the roles that
every template has. What is written of a message depends on it and on those before it alone, so a conversation that
grows is written as it was, with something new at its end. Knows no template; how a call is written comes from the form
that reads calls (`replies/probes`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rekindle.text.messages import Message, ToolCall

_WORDS = """\
You can call tools. These are the tools, with the JSON schemas of their arguments:

{tools}

To call a tool, write this, with the name of the tool and its arguments as JSON, and end your reply with it:

{call}

The result comes in the next message. Without need of a tool, just answer."""
_EXAMPLE = ToolCall(None, "name", '{"argument": "value"}')


@dataclass(frozen=True, slots=True)
class ToolsInText:
    """`write` gives the calls of a message as the model is to write them; `takes_system` False: the template shows no
    system message, so the tools are described in the first message of the user."""

    write: Callable[[Sequence[ToolCall]], str]
    takes_system: bool

    def written(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[Message]:
        """Return a conversation without tools, calls and results, whose text has them."""
        found: list[Message] = []
        names: dict[str, str] = {}
        for message in messages:
            names |= {call.id: call.name for call in message.tool_calls if call.id is not None}
            if message.role != "tool":
                found.append(self._with_calls(message) if message.tool_calls else message)
            elif found and found[-1].role == "tool":
                found[-1] = replace(found[-1], content=f"{found[-1].content}\n{_result(message, names)}")
            else:
                found.append(Message("tool", _result(message, names)))
        found = [replace(each, role="user") if each.role == "tool" else each for each in found]
        return self._described(found, tools) if tools else found

    def _with_calls(self, message: Message) -> Message:
        return replace(message, content=message.content + self.write(message.tool_calls), tool_calls=())

    def _described(self, messages: list[Message], tools: Sequence[Any]) -> list[Message]:
        """Put the tools before the system text, or before what the user says first."""
        shown = "\n".join(json.dumps(_function(tool), ensure_ascii=False) for tool in tools)
        words = _WORDS.format(tools=shown, call=self.write([_EXAMPLE]))
        role = "system" if self.takes_system else "user"
        at = 0 if self.takes_system else next((at for at, each in enumerate(messages) if each.role == role), 0)
        if at < len(messages) and messages[at].role == role:
            first = replace(messages[at], content=f"{words}\n\n{messages[at].content}")
            return [*messages[:at], first, *messages[at + 1 :]]
        return [Message(role, words), *messages]


def _function(tool: Any) -> Any:
    return tool.get("function", tool) if isinstance(tool, Mapping) else tool


def _result(message: Message, names: Mapping[str, str]) -> str:
    """One result between its marks, with the name of the tool if it is known: several may come at once."""
    name = message.name or names.get(message.tool_call_id or "")
    of = f" name={json.dumps(name, ensure_ascii=False)}" if name else ""
    return f"<tool_response{of}>\n{message.content}\n</tool_response>"
