"""What a chat template takes of the conversations that Anthropic's clients hold.

Owns what no refusal tells: templates that silently drop system messages in the middle. Found once, by rendering. What a
template refuses is put where it takes it for every dialect (see text/messages).
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
    """False: a system message in the middle is the user's."""

    takes_late_system: bool


def find_habits(encoder: PromptEncoder) -> TemplateHabits:
    """Probe the template of this encoder."""
    asked, word = Message("user", "Look, please."), Message("user", _WORD)
    answered = Message("assistant", "Nothing there.")
    late = _shown(encoder, [asked, answered, Message("system", _WORD), asked])
    return TemplateHabits(
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
