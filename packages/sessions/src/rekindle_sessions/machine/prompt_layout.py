"""Render a participant's context as a prompt that only grows at its end.

Consecutive entries heard form one user message, whose paragraphs name their speakers; own words are assistant messages.
So roles strictly alternate, which every template accepts, and history contains no cue: the template's own generation
prompt is the cue. Each prompt therefore begins with the previous one and the reply to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rekindle.text.messages import Message
from rekindle_sessions.machine.types import Entry, Participant, Plan

HOW = 'What others say reaches you as "Name: words". Answer with your own words only, without a name in front of them.'
_BREAKS = "\n\r\x0b\x0c\x85\u2028\u2029"  # characters that may start a new line
# Soft hyphens, joiners and marks of direction: they change what a line looks like and show nothing themselves.
_UNSEEN = "[\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]"
_BLANKS = rf"(?:[^\S{_BREAKS}]|{_UNSEEN})*"  # without breaks: a run of breaks would be rescanned from each of them
_COLON = "[:\uff1a\ufe55\ufe13\ua789\u2236\u02d0]"  # and what looks like one
_ALONE = r"(?: \(to you alone\))?"


def opening(plan: Plan, participant: Participant) -> str:
    """Return the system prompt: first the part common to all, so that it is computed once, then its own part."""
    return "\n\n".join(part for part in (_common(plan), _own(participant)) if part)


def reopening(plan: Plan, participant: Participant) -> str:
    """Return the opening for a participant with memories: its system prompt stays as it was."""
    parts = ("A new conversation begins.", plan.setting.strip(), _present(plan), _own(participant), first_words(plan))
    return "\n\n".join(part for part in parts if part)


def _common(plan: Plan) -> str:
    return "\n\n".join(part for part in (plan.setting.strip(), f"{_present(plan)} {HOW}") if part)


def _present(plan: Plan) -> str:
    named = (f"{each.name} ({each.role})" if each.role else each.name for each in plan.participants)
    return f"These take part: {', '.join(named)}."


def _own(participant: Participant) -> str:
    return f"You are {participant.name}. {participant.persona.strip()}".rstrip()


def first_words(plan: Plan) -> str:
    """Return the host's opening words."""
    return plan.opening.strip() or "Let us begin."


def spoken(text: str, name: str, names: Iterable[str]) -> str:
    """Return what others hear of a reply: without its own name in front, and cut where it starts to speak for others.

    Words in another's name would be mistaken for that participant's.
    """
    text = re.sub(rf"^\s*{re.escape(name)}\s*:\s*", "", text)
    others = "|".join(_written(each) for each in names if each != name)
    if others:
        text = re.split(rf"[{_BREAKS}]{_BLANKS}(?:{others}){_ALONE}{_BLANKS}{_COLON}", text, maxsplit=1)[0]
    return text.strip()


def quoted(text: str, names: Iterable[str]) -> str:
    """Return text from outside with "> " before each line that looks like a participant speaking."""
    known = "|".join(map(_written, names))
    return re.sub(rf"(?i)(\A|[{_BREAKS}])(?={_BLANKS}(?:{known}){_ALONE}{_BLANKS}{_COLON})", r"\1> ", text.strip())


def _written(name: str) -> str:
    """Return a pattern for a name with anything unseen inside it."""
    return f"{_UNSEEN}*".join(map(re.escape, name))


def stops(names: Iterable[str], name: str) -> tuple[str, ...]:
    """Return stop strings for a reply that continues as another name; `spoken` cuts at what they do not find."""
    return tuple(f"\n{other}:" for other in names if other != name)


def messages(system: str, context: Sequence[Entry], *, partial: Entry | None = None) -> tuple[Message, ...]:
    """Return the prompt for a context; `partial` is what is being said right now, at the open end."""
    prompt = [Message("system", system)] if system else []
    heard: list[str] = []
    for entry in [*context, *([partial] if partial is not None else [])]:
        if entry.kind == "said":
            prompt += [Message("user", "\n\n".join(heard)), Message("assistant", entry.text, reasoning=entry.thought)]
            heard = []
        else:
            heard.append(_paragraph(entry))
    if heard:
        prompt.append(Message("user", "\n\n".join(heard)))
    return tuple(prompt)


def with_trailing_cue(prompt: Sequence[Message], name: str, host: str) -> tuple[Message, ...]:
    """Return the layout for comparison: a cue after the history that is gone in the next prompt."""
    *earlier, last = prompt
    cue = f"{host}: It is {name}'s turn. Answer as {name}."
    return (*earlier, Message(last.role, f"{last.content}\n\n{cue}"))


def _paragraph(entry: Entry) -> str:
    return f"{entry.by} (to you alone): {entry.text}" if entry.private else f"{entry.by}: {entry.text}"
