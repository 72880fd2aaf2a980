"""A sample call as a template renders it: forms of calls are recognised in this."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rekindle.text.messages import GUARD

QUESTION, REPLY, REASONING = "probe question.", "probe answer.", "probe reasoning."
TOOL, ARGUMENTS, SHORT_ID = "probe_tool", '{"probe_number": 7, "probe_word": "probe value"}', "probe1234"
VALUES = json.loads(ARGUMENTS)
# What may be a mark: <name>, [NAME], or the first line of a fenced block; after a guard, if it is a special token.
MARK = rf"{GUARD}?(?:<[^<>\s{GUARD}]{{1,40}}>|\[[A-Z_/]{{2,30}}\])"
FENCE = r"```\w*"


@dataclass(frozen=True, slots=True)
class CallSample:
    """`body`: structured text of a reply with one call, as rendered after the cue (empty: the template refuses one).

    `plain`: a question and a reply without a call. `specials`: how tokens flagged special are in structured text.
    `call_id`: that of the call.
    """

    body: str
    plain: str
    specials: frozenset[str]
    call_id: str = SHORT_ID

    @property
    def after_question(self) -> str:
        """What follows the question."""
        return self.plain.partition(QUESTION)[2]

    def split_at(self, start: int, end: int) -> tuple[str, str, str]:
        """What is between the text and the call at [start, end), its leading blanks, and what follows the call."""
        has_text = REPLY in self.body[:start]
        between = self.body[:start].rpartition(REPLY)[2]
        gap = between[: len(between) - len(between.lstrip())] if has_text else ""
        return between, gap, self._after(end)

    def _after(self, end: int) -> str:
        """What follows, without what ends every reply."""
        after, plain_end = self.body[end:], self.plain.partition(REPLY)[2]
        num = 0
        while num < min(len(after), len(plain_end)) and after[-1 - num] == plain_end[-1 - num]:
            num += 1
        return after[: len(after) - num]


def json_objects(text: str) -> list[tuple[int, int, dict[str, Any]]]:
    """Start, end and value of the JSON objects in a text, outermost only."""
    decoder, found, at = json.JSONDecoder(strict=False), [], 0
    while (at := text.find("{", at)) >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        found.append((at, end, value))
        at = end
    return found
