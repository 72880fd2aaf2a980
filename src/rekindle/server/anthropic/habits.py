"""Detection of chat templates that silently drop parts of Anthropic's conversations.

Owns one habit that raises no error: dropping system messages in the middle. It is probed once, by rendering. Messages
that a template refuses are moved to where it accepts them, for every dialect (see text/messages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.errors import BadRequest
from rekindle.text.messages import Message
from rekindle.text.prompt import PromptEncoder

_WORD = "quicksilver"


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
