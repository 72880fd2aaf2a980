"""Requests as their agents would have sent them, before or after a summary of their history.

Owns what of an agent's preamble and history is put where. Whether a candidate takes the place of what was sent is up to
`rewrites`, which looks at what is stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rekindle.engine.intake.quotes import OPEN, unquoted
from rekindle.engine.memory.preambles import Preamble, names_of
from rekindle.engine.types import Breakpoint, GenerationRequest
from rekindle.text.messages import Message, leading_system
from rekindle.text.normalise import Removed
from rekindle.text.places import Place
from rekindle.text.tails import as_begun

COMPACTION = "compaction"  # a kind of normalisation
SUMMARY = re.compile("summar|compaction", re.IGNORECASE)  # in what Codex, opencode, Qwen Code and Cline ask with
ASKING_CHARS = 4096  # at either end of a text, in which it says what it asks for; between them may be a history
BETWEEN = "\n\n"  # a system text or a tail, and the words that it is put before


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request with what its agent had before, and what to report of it.

    `said`: the messages whose reasoning its prompt must say, as it was taken out of a quote; None: nothing was quoted.
    """

    request: GenerationRequest
    kept: tuple[Removed, ...]
    said: tuple[Message, ...] | None = None


def reported(at: int | None, text: str) -> Removed:
    """Return what to report of a text that was put elsewhere; `at`: the message that had it, None: the tools."""
    return Removed(COMPACTION, at, text, "", Place(None, None))


def asks_for_summary(messages: Sequence[Message], own: Sequence[str]) -> bool:
    """Whether the newest message asks for a summary, or a system text in the place of one of the agent's `own`."""
    asking = [each.content for each in leading_system(messages) if each.content not in own]
    asking += [each.content for each in messages[-1:] if each.role == "user"]
    return any(SUMMARY.search(text[:ASKING_CHARS]) or SUMMARY.search(text[-ASKING_CHARS:]) for text in asking)


def candidates(request: GenerationRequest, known: Preamble) -> Iterator[Candidate]:
    """Yield a request with its agent's tools, its head put back where it is to be, then with its system text, too."""
    tools = reported(None, names_of(known.tools))
    messages = request.messages or ()
    found = None if request.breakpoints else with_head(messages, known.system)
    if found is not None:
        whole, at = found
        kept = (tools, reported(at, messages[at].content))
        yield Candidate(replace(request, messages=whole, tools=known.tools), kept)
    yield Candidate(replace(request, tools=known.tools), (tools,))
    leading = leading_system(messages)
    sent = tuple(message.content for message in leading)
    if sent == known.system or len(sent) != len(known.system) or messages[-1].role != "user":
        return
    own = [replace(message, content=text) for message, text in zip(leading, known.system, strict=True)]
    newest = replace(messages[-1], content=BETWEEN.join((*sent, messages[-1].content)))
    changed = with_messages(request, (*own, *messages[len(own) : -1], newest))
    moved = (reported(at, text) for at, text in enumerate(sent))
    yield Candidate(replace(changed, tools=known.tools), (tools, *moved))


def with_quoted(request: GenerationRequest, known: Preamble, history: Sequence[Message]) -> Iterator[Candidate]:
    """Yield a request with the messages of its agent's history in place of what its only message quotes of them.

    First without the reasoning that it quotes, for templates that write it.
    """
    *leading, newest = request.messages or ()
    talk = history[len(leading) :]
    if [each.role for each in leading] != ["system"] * len(known.system) or newest.role != "user":
        return
    own = history[: len(leading)]
    for with_reasoning in (True, False):
        found = unquoted(talk, newest.content, with_reasoning=with_reasoning)
        if found is None:
            continue
        sent = tuple(each.content for each in leading)
        short = replace(newest, content=BETWEEN.join((*sent, found.text)))
        before = talk[: found.num_messages]
        changed = with_messages(request, (*own, short))
        at = len(leading)
        marks = tuple(
            replace(each, message_index=at + len(before)) if each.message_index == at else each
            for each in changed.breakpoints
        )
        changed = replace(changed, messages=(*own, *before, short), breakpoints=marks, tools=known.tools)
        moved = (reported(at, text) for at, text in enumerate(sent))
        quote = reported(len(leading), newest.content[newest.content.index(OPEN) :])
        said = tuple(each for each in before if each.reasoning and with_reasoning)
        yield Candidate(changed, (reported(None, names_of(known.tools)), *moved, quote), said)


def heads(request: GenerationRequest, known: Preamble) -> Iterator[Candidate]:
    """Yield a request with what its agent's client writes later since a summary where a conversation begins with it:
    the end of the system text, or a message after the first words of the user."""
    messages = request.messages or ()
    found = None if request.breakpoints else with_head(messages, known.system)
    if found is not None:
        changed, at = found
        yield Candidate(replace(request, messages=changed), (reported(at, messages[at].content),))
    first = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
    to = first + 1
    later = ((at, as_begun(each.content)) for at, each in enumerate(messages) if each.role == "system" and at >= to)
    at, text = next(((at, text) for at, text in later if text is not None), (to, None))
    if at > to and text is not None and messages[first].role == "user":
        begun = replace(messages[at], content=text)
        changed = (*messages[:to], begun, *messages[to:at], *messages[at + 1 :])
        marks = tuple(_with_one_before(each, to, at) for each in request.breakpoints)
        yield Candidate(replace(request, messages=changed, breakpoints=marks), (reported(at, messages[at].content),))


def _with_one_before(mark: Breakpoint, to: int, at: int) -> Breakpoint:
    """Return where a breakpoint is when the message `at` has moved `to` an earlier place."""
    index = mark.message_index
    if index == at:
        return replace(mark, message_index=to, num_chars=None)
    return replace(mark, message_index=index + 1) if index is not None and to <= index < at else mark


def with_head(messages: Sequence[Message], system: Sequence[str]) -> tuple[tuple[Message, ...], int] | None:
    """Return messages with the end of their agent's `system` texts, sent in one later system message, at its place
    again, and which message that was; None if that is not what they are."""
    head = leading_system(messages)
    if not head or len(head) != len(system) or [each.content for each in head[:-1]] != [*system[:-1]]:
        return None
    before = f"{head[-1].content}{BETWEEN}"
    if not system[-1].startswith(before):
        return None
    later = ((at, each) for at, each in enumerate(messages) if each.role == "system" and at >= len(head))
    at = next((at for at, each in later if each.content == system[-1][len(before) :]), None)
    if at is None:
        return None
    whole = replace(head[-1], content=system[-1])
    return (*head[:-1], whole, *messages[len(head) : at], *messages[at + 1 :]), at


def with_messages(request: GenerationRequest, changed: tuple[Message, ...]) -> GenerationRequest:
    """Return a request with the texts of its messages changed, one for one, and its breakpoints where they are now."""
    messages, found = request.messages or (), []
    for each in request.breakpoints:
        index, num_chars = each.message_index, each.num_chars
        if index is not None and num_chars is not None:
            num_chars = moved(num_chars, messages[index].content, changed[index].content)
        found.append(replace(each, num_chars=num_chars))
    return replace(request, messages=changed, breakpoints=tuple(found))


def moved(place: int, before: str, after: str) -> int:
    """Return where a place in `before`, in characters, is in `after`, in which one part of it is another."""
    same = next((at for at, (one, other) in enumerate(zip(before, after, strict=False)) if one != other), None)
    if same is None or place <= same:
        return min(place, len(after))
    return max(same, place + len(after) - len(before))
