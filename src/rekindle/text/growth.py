"""How a chat template renders a growing conversation.

Owns a few sample conversations and the comparison of their renderings: is each next prompt the last one, the reply as
it was generated, and something new? If not, the part from the first difference on is recomputed each turn.
Used by the banner at start and by explanations; knows no tokens and no KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from rekindle.errors import BadRequest
from rekindle.text.template import ChatTemplate

# Where the next prompt first differs from the last one. "refused": the template refuses such a conversation; "missing":
# there is no template.
Lost = Literal["nothing", "reply", "cue", "last_user", "earlier", "refused", "missing"]

_SYSTEM = {"role": "system", "content": "System words."}
_TURNS = (("First question.", "First answer."), ("Second question.", "Second answer."), ("Third question.", ""))
_REASONING = "<think>\nSome reasoning.\n</think>\n\n"
_TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}]
_NOON = datetime(2024, 1, 31, 12, 0, 0)


@dataclass(frozen=True, slots=True)
class TemplateGrowth:
    """What each turn loses: with plain replies, with a blank at their end, with reasoning, with tools.

    `dated`: the rendering depends on the clock. `two_users`: two user messages in a row are accepted.
    """

    plain: Lost
    trailing_blank: Lost
    thinking: Lost
    tools: Lost
    dated: bool
    two_users: bool

    def summary(self) -> str:
        """One line for display."""
        parts = [_WORDS[self.plain]]
        others = {"replies that end in a blank": self.trailing_blank, "thinking": self.thinking, "tools": self.tools}
        parts += [f"with {name}: {_WORDS[lost]}" for name, lost in others.items() if lost != self.plain]
        parts += ["it prints the date: everything after it is recomputed when that changes"] if self.dated else []
        parts += ["it refuses two user messages in a row"] if not self.two_users else []
        return "; ".join(parts)


_WORDS: dict[Lost, str] = {
    "nothing": "every turn continues where the last one ended",
    "reply": "each reply is rendered differently in the next turn and recomputed",
    "cue": "the cue before a reply is rendered differently in the next turn, so each reply is recomputed",
    "last_user": "the last user message changes in the next turn: it and the reply are recomputed",
    "earlier": "text before the last user message changes each turn: most of the prompt is recomputed",
    "refused": "the template refuses such a conversation",
    "missing": "this model has none, so it continues texts (/v1/completions) and takes no messages",
}


def analyse_growth(template: ChatTemplate) -> TemplateGrowth:
    """Render sample conversations turn by turn and compare; a dozen renderings, milliseconds."""
    if not template.exists:
        return TemplateGrowth("missing", "missing", "missing", "missing", dated=False, two_users=True)
    fixed = _at(template, _NOON)
    return TemplateGrowth(
        plain=_lost(fixed, "", "", None),
        trailing_blank=_lost(fixed, "", " \n", None),
        thinking=_lost(fixed, _REASONING, "", None),
        tools=_lost(fixed, "", "", _TOOLS),
        dated=_is_dated(template),
        two_users=_takes(fixed, [_user("One."), _user("Two.")]),
    )


def _lost(template: ChatTemplate, before: str, after: str, tools: Sequence[Any] | None) -> Lost:
    """The earliest part lost in a first and a second turn."""
    order: tuple[Lost, ...] = ("refused", "earlier", "last_user", "cue", "reply", "nothing")
    return min((_lost_after(template, turn, before, after, tools) for turn in (1, 2)), key=order.index)


def _lost_after(template: ChatTemplate, turn: int, before: str, after: str, tools: Sequence[Any] | None) -> Lost:
    messages: list[dict[str, str]] = [_SYSTEM] if _takes(template, [_SYSTEM, _user("Hello.")]) else []
    for question, answer in _TURNS[: turn - 1]:
        messages += [_user(question), {"role": "assistant", "content": before + answer + after}]
    question, answer = _TURNS[turn - 1]
    reply = before + answer + after
    messages.append(_user(question))
    later = [*messages, {"role": "assistant", "content": reply}, _user(_TURNS[turn][0])]
    try:
        prompt = template.render(messages, tools)
        following = template.render(later, tools)
    except BadRequest:
        return "refused"
    # If the cue opens the reasoning, the model continues after that.
    opened = before.split("\n")[0]
    if opened and prompt.rstrip().endswith(opened):
        reply = reply.removeprefix(opened).lstrip("\n") if prompt.endswith("\n") else reply.removeprefix(opened)
    before_last = max((prompt.rfind(answer) + len(answer) for _, answer in _TURNS[: turn - 1]), default=0)
    return _first_change(prompt, reply, following, (before_last, prompt.rfind(question) + len(question)))


def _first_change(prompt: str, reply: str, following: str, last_user: tuple[int, int]) -> Lost:
    stored = prompt + reply
    same = next((at for at, (a, b) in enumerate(zip(stored, following, strict=False)) if a != b), len(following))
    if same >= len(stored):
        return "nothing"
    if same >= len(prompt):
        return "reply"
    start, end = last_user
    if same >= end:
        return "cue"
    return "last_user" if same >= start else "earlier"


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _at(template: ChatTemplate, moment: datetime) -> ChatTemplate:
    return template.with_clock(lambda: moment)


def _is_dated(template: ChatTemplate) -> bool:
    times = [_NOON, _NOON + timedelta(hours=1, minutes=1, seconds=1), _NOON + timedelta(days=400)]
    try:
        return len({_at(template, moment).render([_user("Hello.")]) for moment in times}) > 1
    except BadRequest:
        return False


def _takes(template: ChatTemplate, messages: Sequence[dict[str, str]]) -> bool:
    try:
        template.render(messages)
    except BadRequest:
        return False
    return True
