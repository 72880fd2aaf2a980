"""What the next prompt of a conversation will begin with, whatever is said next.

Two prompts that go on differently are rendered; where both agree, the next one will. The end of that is a place where
encoding may be cut: the ids of what comes before it do not depend on what comes after. Knows no branches and no KV.
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

# What follows: a user's words, results of the calls, results and words of the user's behind them, or more words in the
# last message itself.
Probes = Literal["user", "tool", "tool_user", "more"]
# They share no beginning, so that nothing of them stands in what both prompts agree on; nor do their calls' ids, which
# have nine letters and digits because some templates take no others.
_PROBES = (("Yes, go on.", "a"), ("4 of them.", "b"))
_MORE = (" more", "\n4")
_LONGEST_RUN = 8  # bytes that hold two blanks, whatever they are


def anticipated(
    encoder: PromptEncoder,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    *,
    template_kwargs: Mapping[str, Any],
    probes: Probes,
    call_ids: Sequence[str] = (),
) -> RenderedPrompt | None:
    """Return what all prompts have in common that continue `messages` with a user's words or with tool results.

    "tool" probes answer every call of the last message; "tool_user" ones end with words of the user's, which some
    templates take for the end of the work before. `call_ids`: the ids that its calls will have when it is sent
    back; without them nothing counts as common that depends on them. None where the template refuses such a
    conversation, or where nothing is common. Costs two renderings.
    """
    try:
        one, other = (
            encoder.render_chat(_continued(messages, probes, call_ids, number), tools, **template_kwargs).key
            for number in (0, 1)
        )
    except BadRequest:
        return None
    agreed = agreeing(one, other)
    cut = next(cut for cut in encoder.safe_cuts(one, agreed, agreed) if _stands_alone(one, cut))
    return RenderedPrompt(one[:cut]) if cut else None


def _stands_alone(key: bytes, cut: int) -> bool:
    """Whether what is before a safe cut is split as it is here where nothing comes behind it.

    Splitters look one character past a run of blanks: two or more may be one token at the end of a text, and are
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
    """What may follow the last message, the likeliest first.

    Of calls: results, alone or with words behind them, first as it was with the calls before.
    """
    *earlier, reply = messages
    if not reply.tool_calls:
        return ("user",)
    behind = [after.role for before, after in pairwise(earlier) if before.role == "tool" and after.role != "tool"]
    return ("tool_user", "tool") if behind[-1:] == ["user"] else ("tool", "tool_user")
