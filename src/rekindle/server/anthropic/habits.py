"""What a chat template takes of the conversations that Anthropic's clients hold.

Owns the two places where their form is freer than many templates: words of the user right behind a tool's result, and
system messages in the middle. Found once, by rendering; what a template refuses or drops is put where it takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.errors import BadRequest
from rekindle.text.messages import Message, ToolCall
from rekindle.text.prompt import PromptEncoder

_WORD = "quicksilver"


@dataclass(frozen=True, slots=True)
class TemplateHabits:
    """False: the words go into the result before them; the system message is the user's."""

    takes_user_after_tool: bool
    takes_late_system: bool


def find_habits(encoder: PromptEncoder) -> TemplateHabits:
    """Probe the template of this encoder."""
    asked, word = Message("user", "Look, please."), Message("user", _WORD)
    called = Message("assistant", "", tool_calls=(ToolCall("call12345", "look", "{}"),))
    found = Message("tool", "Nothing.", tool_call_id="call12345")
    answered = Message("assistant", "Nothing there.")
    late = _shown(encoder, [asked, answered, Message("system", _WORD), asked])
    return TemplateHabits(
        takes_user_after_tool=_shown(encoder, [asked, called, found, word]) is not None,
        # One that refuses it is given it as the user's.
        takes_late_system=late is not None and late != _shown(encoder, [asked, answered, word, asked]),
    )


def _shown(encoder: PromptEncoder, messages: Sequence[Message]) -> str | None:
    """What the template makes of it; None where it refuses it, or where the word does not stand there once."""
    tool = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
    try:
        text = encoder.readable(encoder.render_chat(messages, [tool]).key)
    except BadRequest:
        return None
    return text if text.count(_WORD) == 1 else None
