"""Ends of system texts that change between conversations: the state of a repository, the environment of a run.

Owns the headings of known clients. Many templates write tools after the system text, so one new line there costs all of
them: thousands of tokens at every start. Moved to the head of the first user message it costs itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Where such a part begins, at the start of a line, and what ends it; None: the end of the text.
_KNOWN: tuple[tuple[re.Pattern[str], str | None], ...] = (
    (re.compile(r"^gitStatus:", re.MULTILINE), None),  # Claude Code
    (re.compile(r"^Here is (?:some )?useful information about the environment[^\n]*\n<env>", re.MULTILINE), "</env>"),
)


def volatile_spans(content: str) -> list[tuple[int, int]]:
    """Return where the parts of a system text that known clients change begin and end, in order and disjoint."""
    spans: list[tuple[int, int]] = []
    for start, end in sorted(span for heading, stop in _KNOWN for span in _spans(content, heading, stop)):
        if not spans or start >= spans[-1][1]:
            spans.append((start, end))
    return spans


def _spans(content: str, heading: re.Pattern[str], end: str | None) -> Iterator[tuple[int, int]]:
    at = 0
    while (found := heading.search(content, at)) is not None:
        stop = content.find(end, found.end()) if end is not None else len(content)
        if stop < 0:
            return
        at = stop + len(end or "")
        yield found.start(), at
