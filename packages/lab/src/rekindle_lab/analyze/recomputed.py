"""The part of a prompt that was computed again, and the line that caused it.

After the first difference nothing can be reused: text that also occurs in the stored text is recomputed, the rest is
new. The two are distinguished line by line, so a log of any size costs a few passes over its text. The cause and its
wording are the server's own (`matching/explain`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from rekindle.cache.trie.radix import common_prefix
from rekindle.matching.explain import Explanation, explain
from rekindle.text.normalise import without_dates
from rekindle.text.prompt import PromptEncoder
from rekindle.text.vocabulary import MARK
from rekindle_lab.analyze.memory import Reuse

# Causes in which one line changes without new content: the line itself counts as recomputed too.
LINES = frozenset(("attribution_header", "date_line", "tool_order"))
_ENDS = re.compile(rb"\n|" + MARK + rb"....", re.DOTALL)
_WORDS = re.compile(rb"\w+")
MIN_PIECE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Tokens computed again and why; `line`: for a date line, its unchanging part."""

    num_tokens: int
    explanation: Explanation
    role: str
    line: str

    @property
    def cause(self) -> str:
        """The cause's name in explanations."""
        return self.explanation.cause


def recomputed_by(reuse: Reuse, encoder: PromptEncoder) -> Recomputed | None:
    """Return what a prompt computes again; None if it continues what is stored, or shares only its kind with others."""
    difference = reuse.match.difference
    if difference is None:
        return None
    # The reader of a log may see all of it, so other agents' text is quoted like the agent's own.
    messages = reuse.normal.as_sent
    match = replace(reuse.match, difference=replace(difference, source="own"))
    explanation = explain(match, reuse.rendered, messages, encoder=encoder)
    if (
        explanation is None
        or explanation.cause == "not_stored"
        or (difference.source != "own" and explanation.cause not in LINES)
    ):
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
    """Return the line of a quote that contains the difference."""
    return (quote or "").strip("\n").split("\n", 1)[0]


def _repeated_tokens(reuse: Reuse, stored: bytes, position: int, *, cause: str, ends: np.ndarray) -> int:
    """Count tokens after the reused ones whose text also occurs in the stored text, from the difference on.

    `ends`: where each token of the prompt ends in its key.
    """
    key, computed = reuse.rendered.key, ends[reuse.num_reused :]
    start = min(position, int(ends[reuse.num_reused - 1]) if reuse.num_reused else 0)
    left = min(start, common_prefix(key, stored))
    available = Counter(_identity(stored[first:end], cause) for first, end in _pieces(stored, left))
    starts: list[int] = []
    stops: list[int] = []
    continues = False  # a short piece occurs anywhere, so it counts only after a known one
    for first, end in _pieces(key, start):
        identity = _identity(key[first:end], cause)
        continues = available[identity] > 0 and (continues or end - first >= MIN_PIECE_BYTES)
        continues = continues or (cause in LINES and first <= position < end)
        if continues:
            available[identity] -= 1
            starts.append(first)
            stops.append(end)
    counts = np.searchsorted(computed, stops, side="right") - np.searchsorted(computed, starts, side="right")
    return int(counts.sum())


def _pieces(key: bytes, start: int) -> Iterator[tuple[int, int]]:
    """Yield lines, cut at control tokens, as (first byte, end)."""
    for found in _ENDS.finditer(key, start):
        yield start, found.end()
        start = found.end()
    if start < len(key):
        yield start, len(key)


def _identity(piece: bytes, cause: str) -> object:
    """Return a value that equal pieces share: for reordered tools, their sorted words."""
    return tuple(sorted(_WORDS.findall(piece))) if cause == "tool_order" else piece
