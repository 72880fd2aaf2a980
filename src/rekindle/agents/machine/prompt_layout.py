"""A participant's context as a prompt that only grows at its end.

What was heard in a row is one user message, whose paragraphs name their speakers; own words are the assistant's. So the
roles alternate strictly, which every template takes, and there is no cue where history grows: the template's own prompt
for a reply is the cue. Each prompt therefore begins with the one before and the reply to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rekindle.agents.machine.types import Entry, Participant, Plan
from rekindle.text.messages import Message

HOW = 'What others say reaches you as "Name: words". Answer with your own words only, without a name in front of them.'
MOST_STOPS = 8  # that a request may have
_BREAKS = "\n\r\x0b\x0c\x85\u2028\u2029"  # where a reader may see a new line begin
_BLANKS = rf"[^\S{_BREAKS}]*"  # none of these: a run of them would be looked at from each of its places
_ALONE = r"(?: \(to you alone\))?"


def opening(plan: Plan, participant: Participant) -> str:
    """The system prompt: what all are told, so that it is computed once, and then who this one is."""
    return "\n\n".join(part for part in (_common(plan), _own(participant)) if part)


def reopening(plan: Plan, participant: Participant) -> str:
    """What somebody is told who comes in with memories: its system prompt stays as it was."""
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
    """How the host opens."""
    return plan.opening.strip() or "Let us begin."


def spoken(text: str, name: str, names: Iterable[str]) -> str:
    """What others hear of a reply: without its own name in front, and up to where it speaks for others.

    Words put into another's mouth would be taken for that one's.
    """
    text = re.sub(rf"^\s*{re.escape(name)}\s*:\s*", "", text)
    others = "|".join(re.escape(each) for each in names if each != name)
    if others:
        text = re.split(rf"[{_BREAKS}]{_BLANKS}(?:{others}){_ALONE}{_BLANKS}:", text, maxsplit=1)[0]
    return text.strip()


def quoted(text: str, names: Iterable[str]) -> str:
    """Words from outside, in which no line looks like somebody speaking."""
    known = "|".join(re.escape(each) for each in names)
    return re.sub(rf"(?i)(\A|[{_BREAKS}])(?={_BLANKS}(?:{known}){_ALONE}{_BLANKS}:)", r"\1> ", text.strip())


def stops(names: Iterable[str], name: str) -> tuple[str, ...]:
    """Where a reply ends because it goes on as somebody else; `spoken` cuts what more names would have stopped."""
    return tuple(f"\n{other}:" for other in names if other != name)[:MOST_STOPS]


def messages(system: str, context: Sequence[Entry], *, partial: Entry | None = None) -> tuple[Message, ...]:
    """The prompt of somebody with this context; `partial` is what is being said right now, at the open end."""
    told = [Message("system", system)] if system else []
    heard: list[str] = []
    for entry in [*context, *([partial] if partial is not None else [])]:
        if entry.kind == "said":
            told += [Message("user", "\n\n".join(heard)), Message("assistant", entry.text, reasoning=entry.thought)]
            heard = []
        else:
            heard.append(_paragraph(entry))
    if heard:
        told.append(Message("user", "\n\n".join(heard)))
    return tuple(told)


def with_trailing_cue(prompt: Sequence[Message], name: str, host: str) -> tuple[Message, ...]:
    """The other layout, to be compared with: a cue behind the history, that is gone in the next prompt."""
    *earlier, last = prompt
    cue = f"{host}: It is {name}'s turn. Answer as {name}."
    return (*earlier, Message(last.role, f"{last.content}\n\n{cue}"))


def _paragraph(entry: Entry) -> str:
    return f"{entry.by} (to you alone): {entry.text}" if entry.private else f"{entry.by}: {entry.text}"
