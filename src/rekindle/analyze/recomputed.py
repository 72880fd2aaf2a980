"""What of a prompt was computed again although it had been computed before, and because of which line.

After the first difference nothing can be reused: what of it is in the stored text is recomputed, the rest is new. They
are told apart by lines, so a log of any size costs a few passes over its text. The cause and its wording are the
server's own (`matching/explain`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from rekindle.analyze.memory import Reuse
from rekindle.cache.trie.radix import common_prefix
from rekindle.matching.explain import Explanation, explain
from rekindle.text.dates import without_dates
from rekindle.text.prompt import PromptEncoder
from rekindle.text.vocabulary import MARK

# Causes of single lines that change although nothing was said: the line itself is recomputed, too.
LINES = frozenset(("attribution_header", "date_line", "tool_order"))
NEW = "new_text"
_ENDS = re.compile(rb"\n|" + MARK + rb"....", re.DOTALL)
_WORDS = re.compile(rb"\w+")
MIN_PIECE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Tokens computed again and why; `line`: of a date's line, what stays of it."""

    num_tokens: int
    explanation: Explanation
    role: str
    line: str

    @property
    def cause(self) -> str:
        """The cause by its name in explanations."""
        return self.explanation.cause


def recomputed_by(reuse: Reuse, encoder: PromptEncoder) -> Recomputed | None:
    """What a prompt computes again; None where it goes on as stored, or shares nothing but its kind with others."""
    difference = reuse.match.difference
    if difference is None:
        return None
    # Whoever reads a log may read all of it: what others stored is quoted like one's own.
    messages = reuse.normal.as_sent
    match = replace(reuse.match, difference=replace(difference, source="own"))
    explanation = explain(match, reuse.rendered, messages, encoder=encoder)
    if explanation is None or (difference.source != "own" and explanation.cause not in LINES):
        return None
    num_tokens = _repeated_tokens(
        reuse,
        reuse.earlier or difference.stored_key,
        difference.position,
        cause=explanation.cause,
        ends=encoder.byte_ends(reuse.ids),
    )
    if not num_tokens:
        return None
    index = explanation.message_index
    role = "tools" if explanation.cause == "tool_order" else ""
    if index is not None:
        role = messages[index].role
    line = without_dates(first_line(explanation.sent)) if explanation.cause == "date_line" else ""
    return Recomputed(num_tokens, explanation, role, line)


def first_line(quote: str | None) -> str:
    """Of a quote, the line with the difference."""
    return (quote or "").strip("\n").split("\n", 1)[0]


def _repeated_tokens(reuse: Reuse, stored: bytes, position: int, *, cause: str, ends: np.ndarray) -> int:
    """Tokens behind what was reused whose pieces of text stand in the stored text, too, from its difference on.

    `ends`: where each token of the prompt ends in its key.
    """
    key, computed = reuse.rendered.key, ends[reuse.num_reused :]
    start = min(position, int(ends[reuse.num_reused - 1]) if reuse.num_reused else 0)
    left = min(start, common_prefix(key, stored))
    available = Counter(_name(stored[first:end], cause) for first, end in _pieces(stored, left))
    starts: list[int] = []
    stops: list[int] = []
    goes_on = False  # short pieces stand everywhere; behind a known one they are what stood behind it, too
    for first, end in _pieces(key, start):
        name = _name(key[first:end], cause)
        goes_on = available[name] > 0 and (goes_on or end - first >= MIN_PIECE_BYTES)
        goes_on = goes_on or (cause in LINES and first <= position < end)
        if goes_on:
            available[name] -= 1
            starts.append(first)
            stops.append(end)
    counts = np.searchsorted(computed, stops, side="right") - np.searchsorted(computed, starts, side="right")
    return int(counts.sum())


def _pieces(key: bytes, start: int) -> Iterator[tuple[int, int]]:
    """Lines, cut at control tokens, as (first byte, end)."""
    for found in _ENDS.finditer(key, start):
        yield start, found.end()
        start = found.end()
    if start < len(key):
        yield start, len(key)


def _name(piece: bytes, cause: str) -> object:
    """What makes two pieces the same: of tools in another order, their words."""
    return tuple(sorted(_WORDS.findall(piece))) if cause == "tool_order" else piece
