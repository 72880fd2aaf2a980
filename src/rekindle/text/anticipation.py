"""The prefix of the next prompt of a conversation, whatever its next message is.

Renders two prompts that continue differently; the next prompt shares what they have in common. That prefix ends where
encoding may be cut: its ids do not depend on what follows. Knows no branches and no KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

from rekindle.errors import BadRequest
from rekindle.text.controls import WHITE_SPACE
from rekindle.text.messages import Message
from rekindle.text.prompt import PromptEncoder, RenderedPrompt
from rekindle.text.vocabulary import MARK, agreeing

# What follows: a user message, results of the calls, results and then a user message, or more text in the last message
# itself.
Probes = Literal["user", "tool", "tool_user", "more"]
# They share no prefix, so that nothing of them is in what both prompts have in common; nor do their calls' ids, which
# have nine letters and digits because some templates accept no others.
_PROBES = (("Yes, go on.", "a"), ("4 of them.", "b"))
_MORE = (" more", "\n4")
_LONGEST_RUN = 8  # bytes that hold any two blanks


def anticipated(
    encoder: PromptEncoder,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    *,
    template_kwargs: Mapping[str, Any],
    probes: Probes,
    call_ids: Sequence[str] = (),
) -> RenderedPrompt | None:
    """Return the common prefix of all prompts that continue `messages` with a user message or with tool results.

    "tool" probes answer every call of the last message; "tool_user" ones end with a user message, which some
    templates treat as the end of the previous work. `call_ids`: the ids that its calls will have when it is sent
    back; without them, nothing that depends on them counts as common. None if the template refuses such a
    conversation, or if nothing is common. Costs two renderings.
    """
    try:
        one, other = (
            encoder.render_chat(_continued(messages, probes, call_ids, number), tools, **template_kwargs).key
            for number in (0, 1)
        )
    except BadRequest:
        return None
    agreed = agreeing(one, other)
    cut = next(cut for cut in encoder.safe_cuts(one, agreed, agreed) if _is_independent(one, cut))
    return RenderedPrompt(one[:cut]) if cut else None


def _is_independent(key: bytes, cut: int) -> bool:
    """Whether the text before a safe cut is split the same way if nothing follows it.

    Splitters look one character past a run of blanks: two or more may be one token at the end of a text, but are
    divided before words. Next to a control token a text ends in any case.
    """
    before = key[max(0, cut - _LONGEST_RUN) : cut].decode("utf-8", "replace")
    return key.startswith(MARK, cut) or len(before) - len(before.rstrip(WHITE_SPACE)) < 2


def _continued(messages: Sequence[Message], probes: Probes, call_ids: Sequence[str], number: int) -> list[Message]:
    text, letter = _PROBES[number]
    if probes == "user" or not messages:
        return [*messages, Message("user", text)]
    *earlier, last = messages
    if probes == "more":
        return [*earlier, replace(last, content=f"{last.content}{_MORE[number]}")]
    ids = call_ids or [f"{letter}{index:08d}" for index in range(len(last.tool_calls))]
    calls = tuple(replace(call, id=call_id) for call, call_id in zip(last.tool_calls, ids, strict=True))
    results = [Message("tool", text, tool_call_id=each) for each in ids]
    words = [Message("user", text)] if probes == "tool_user" else []
    return [*earlier, replace(last, tool_calls=calls), *results, *words]


def likely_probes(messages: Sequence[Message]) -> tuple[Probes, ...]:
    """Return what may follow the last message, the likeliest first.

    After calls: results, alone or followed by a user message; first the form that followed the previous calls.
    """
    *earlier, reply = messages
    if not reply.tool_calls:
        return ("user",)
    followers = [after.role for before, after in pairwise(earlier) if before.role == "tool" and after.role != "tool"]
    return ("tool_user", "tool") if followers[-1:] == ["user"] else ("tool", "tool_user")
