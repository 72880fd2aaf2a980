"""What a template made of a sample call: the material that forms of calls are recognised in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rekindle.text.messages import GUARD

ASKED, SAID, THOUGHT = "probe question.", "probe answer.", "probe thought."
TOOL, ARGUMENTS, SHORT_ID = "probe_tool", '{"probe_number": 7, "probe_word": "probe value"}', "probe1234"
VALUES = json.loads(ARGUMENTS)
# What may be a mark: <name>, [NAME], or the first line of a fenced block; behind a guard, if it is a special token.
MARK = rf"{GUARD}?(?:<[^<>\s{GUARD}]{{1,40}}>|\[[A-Z_/]{{2,30}}\])"
FENCE = r"```\w*"


@dataclass(frozen=True, slots=True)
class CallSample:
    """`body`: structured text of a reply with one call, as rendered behind the cue (empty: the template takes none).

    `plain`: a question and a reply without a call. `specials`: how tokens flagged special stand in structured text.
    """

    body: str
    plain: str
    specials: frozenset[str]

    @property
    def behind_question(self) -> str:
        """What follows the question."""
        return self.plain.partition(ASKED)[2]

    def split_at(self, start: int, end: int) -> tuple[str, str, str]:
        """What stands between the text and the call at [start, end), its blanks before it, what follows it."""
        has_said = SAID in self.body[:start]
        between = self.body[:start].rpartition(SAID)[2]
        gap = between[: len(between) - len(between.lstrip())] if has_said else ""
        return between, gap, self._after(end)

    def _after(self, end: int) -> str:
        """What follows, without what ends every reply."""
        after, plain_end = self.body[end:], self.plain.partition(SAID)[2]
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
