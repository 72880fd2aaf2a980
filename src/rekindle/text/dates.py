"""Dates and times as people and programs write them, wherever prompts are compared.

Owns what counts as one, and which whole lines hold nothing else: clients put those into prompts, and they change
without any action of the user.
"""

from __future__ import annotations

import re

_MONTH = r"(?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)[a-z]{0,6}\.?"
DATES = re.compile(
    rf"""(?ix) \d{{4}}-\d\d?-\d\d? (?:t\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:z|[+-]\d\d:?\d\d)?)?
    | \d\d?[/.]\d\d?[/.]\d{{2,4}} | \d{{4}}/\d\d?/\d\d?
    | \d\d?(?:st|nd|rd|th)?\s+{_MONTH}(?:,?\s+\d{{4}})? | {_MONTH}\s+\d\d?(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?
    | \b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b | \b(?:mon|tue|wed|thu|fri|sat|sun)\b
    | \d\d?:\d\d(?::\d\d)?(?:\.\d+)?(?:\s*[ap]\.?m\b)? | \b1[5-9]\d{{8}}(?:\d{{3}})?\b""",
)
_ZONES = re.compile(r"\b(?:UTC|GMT|Z|[A-Z]{1,4}S?T)\b(?:\s*[+-]\s*\d\d?(?:[:.]?\d\d)?)?|\b[A-Z]\w+(?:/[A-Z]\w+)+\b")
_YEAR = re.compile(r"\b20\d\d\b")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_WORDS = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?|\d+")
_NAMES = frozenset("date time datetime today today's todays now timestamp".split())
_AROUND = frozenset("a and as at current currently day for in is it it's iso local of on system the this was".split())
_LONGEST = 200  # characters of a line that holds only a date


def without_dates(text: str) -> str:
    """Replace every date and time in the text by one sign."""
    return DATES.sub("◦", text)


def says_date(line: str) -> bool:
    """Whether a line states the date or time, and nothing else."""
    found = _read(line)
    return found is not None and found[0] and (bool(found[1] & _NAMES) or found[1] == {"it", "is"})


def is_date(line: str) -> bool:
    """Whether a line is a date or time, and nothing else."""
    found = _read(line)
    return found is not None and found[0] and not found[1]


def announces_date(line: str) -> bool:
    """Whether a line is a heading for a date or time."""
    found = _read(line)
    return found is not None and not found[0] and bool(found[1] & _NAMES)


def _read(line: str) -> tuple[bool, set[str]] | None:
    """Whether the line holds a date, and its other words; None if it says anything else."""
    if len(line) > _LONGEST:
        return None
    rest, num_dates = DATES.subn(" ", line)
    rest = _YEAR.sub(" ", _ZONES.sub(" ", rest)) if num_dates else rest
    words = {word.lower().replace("’", "'") for word in _WORDS.findall(_CAMEL.sub(" ", rest))}
    return (num_dates > 0, words) if words <= _NAMES | _AROUND else None
