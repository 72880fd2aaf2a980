"""Ends of system texts that change between conversations: the state of a repository, the environment of a run.

Owns the headings of known clients, and finds those of others in two versions of a text. Many templates write tools
after the system text, so one new line there costs all of them: thousands of tokens at every start. Moved to the head of
the first user message it costs itself.

The other way round, known clients write what does not change in a system message after the first words of a user, so
that it is computed again for each conversation: `is_late` says which.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MOST_TAIL = 1 << 14  # characters of a known part without an end: Claude Code cuts its status at 2,000
# Where such a part begins: the words at the start of a line, what follows them, and what ends it; None: the text.
_KNOWN: tuple[tuple[str, re.Pattern[str], str | None], ...] = (
    ("gitStatus:", re.compile(""), None),  # Claude Code
    ('<context name="gitStatus">', re.compile(""), "</context>"),  # Continue
    ("Git snapshot at conversation start.", re.compile(r"[^\n]*\n```text$", re.MULTILINE), "\n```"),  # Qwen Code
    ("Here is ", re.compile(r"(?:some )?useful information about the environment[^\n]*\n<env>"), "</env>"),
)
# How a system message begins that Claude Code writes after a user's words, and with what it ends. After a summary the
# parts in between come first.
_LATE = "# Environment\nYou have been invoked in the following environment"
_LATE_END = "\n\nToday's date is "
LONGEST_TITLE = 80  # characters; a longer one is no heading for a setting
LONGEST_LABEL = 40  # characters; more before a colon are a sentence
# A setting has several separated by commas.
_LABEL = re.compile(rf"[ \t]*(?:[-*•>#]+[ \t]+)?\w[^:=,\n]{{1,{LONGEST_LABEL - 2}}}[:=]")
_TITLE = re.compile(r"[ \t]*(?:#+[ \t]*\w|<\w[\w-]*>[ \t]*\Z|\w[^\n]{1,58}:[ \t]*\Z)")
MOST_SHARE = 0.5  # of a system text; what is more is no end of it


@dataclass(frozen=True, slots=True)
class ChangingTail:
    """Where a system text keeps changing: how its first line begins, which no earlier line does."""

    heading: str

    def line_in(self, content: str) -> int | None:
        """Return which line of a text begins with it, from 1; None: no line does."""
        found = _heading(self.heading).search(content)
        return None if found is None else content.count("\n", 0, found.start()) + 1


def volatile_spans(content: str, headings: Sequence[str] = ()) -> list[tuple[int, int]]:
    """Return where the parts of a system text that clients change begin and end, in order and disjoint.

    Parts of known clients, and from a line that begins with one of the `headings` to the end.
    """
    spans: list[tuple[int, int]] = []
    found = [(span, True) for place in _KNOWN for span in _spans(content, *place)]
    for heading in headings:
        # A text of megabytes is searched for words ten times faster than for a line that begins with them.
        first = _heading(heading).search(content) if heading in content else None
        found += [((first.start(), len(content)), False)] if first is not None else []
    for (start, end), is_known in sorted(found):
        if is_known and end - start > MOST_TAIL:
            continue
        if not spans or start >= spans[-1][1]:
            spans.append((start, end))
    return spans


def is_late(content: str) -> bool:
    """Whether a system message is one that a known client writes after the first words of a user."""
    return content.startswith(_LATE)


def as_begun(content: str) -> str | None:
    """Return a late system message of a later request with its parts in the order of a first one; None: it is none."""
    start = 0 if is_late(content) else content.find(f"\n\n{_LATE}") + 2
    if start == 1:
        return None
    end = content.find(_LATE_END, start)
    end = len(content) if end < 0 else end
    others = content[:start].rstrip()
    return content[start:end] + (f"\n\n{others}" if others else "") + content[end:]


def _heading(heading: str) -> re.Pattern[str]:
    return re.compile(rf"^[ \t]*{re.escape(heading)}", re.MULTILINE)


def _spans(content: str, words: str, rest: re.Pattern[str], end: str | None) -> Iterator[tuple[int, int]]:
    at = 0
    while (start := _line_of(words, content, at)) is not None:
        at = start + len(words)
        found = rest.match(content, at)
        if found is None:
            continue
        stop = content.find(end, found.end()) if end is not None else len(content)
        if stop < 0:
            return
        at = stop + len(end or "")
        yield start, at


def _line_of(words: str, content: str, at: int) -> int | None:
    """Return where a line begins with these words, at `at` or after it; None: none does."""
    if content.startswith(words, at) and content[max(0, at - 1) : at] in ("", "\n"):
        return at
    found = content.find(f"\n{words}", at)
    return None if found < 0 else found + 1


def changing_tail(before: str, now: str) -> ChangingTail | None:
    """Return where two versions of a system text part, if a labelled line or a titled section begins there.

    None if they part inside a sentence, if no heading names the place alone, or if most of the text comes after it.
    """
    lines, others = now.split("\n"), before.split("\n")
    at = _num_common(lines, others)
    here, there = (each[at] if at < len(each) else "" for each in (lines, others))
    same = here[: _num_common(here, there)]
    label = _LABEL.match(same)
    if label is not None:
        heading = label.group().strip()
    elif re.search(r"\w", same) or (title := _title(lines[:at])) is None:
        return None
    else:
        heading = title
    found = _heading(heading).search(now)
    least = sum(len(line) + 1 for line in lines) * (1 - MOST_SHARE)
    if found is None or found.start() < least:
        return None
    is_shared = now[: found.end()] == before[: found.end()]  # so it is the first line of this kind in both
    is_last = label is None or now.count("\n", 0, found.start()) == at
    return ChangingTail(heading) if is_shared and is_last else None


def _num_common(one: Sequence[str], other: Sequence[str]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _title(lines: Sequence[str]) -> str | None:
    """Return the title of the section that ends with these lines: no blank line comes between."""
    for line in reversed(lines):
        if not line.strip():
            return None
        if _TITLE.match(line):
            title = line.strip().partition(",")[0]
            return title if len(title) <= LONGEST_TITLE else None
    return None
