"""Drafts: tokens that a text is likely to continue with, because a stored text did so before.

Prompt lookup: what followed the last tokens of a sequence earlier in it, or in other texts of its agent, is proposed as
its next tokens (Saxena 2023, Prompt Lookup Decoding). Repeated tool calls, quoted files and requests that are sent
again are continued right; how often a sequence is, `Acceptance` measures. Knows ids only, no model and no steps.

    text     ... [ a b c ] d e f g ...            the longest match of the end, of these the last one
    ids      ................... [ a b c ]  ->  d e f g
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rekindle.text.pictures import PICTURE_IDS

MIN_MATCH, MAX_MATCH = 2, 16
DECAY = 0.9  # of the weight of a guess with each later one: about the last ten count
CLASSES = 3  # of matches: 2 or 3 tokens, 4 to 7, 8 and more


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed next tokens, perhaps none, and how many tokens before them matched."""

    ids: tuple[int, ...]
    num_matched: int


NO_DRAFT = Draft((), 0)


def find_draft(ids: np.ndarray, texts: Sequence[np.ndarray] = (), *, most: int) -> Draft:
    """Return up to `most` tokens that followed the end of `ids` (uint32 [n]) earlier in it or in one of `texts`.

    The longest match up to `MAX_MATCH` tokens counts, in `ids` before `texts`, the last before earlier ones; less than
    `MIN_MATCH` is none. A text that repeats itself up to its end is continued as often as needed. Costs one comparison
    with every token.
    """
    if not len(ids) or most < 1:
        return NO_DRAFT
    num_matched, text, start = MIN_MATCH - 1, ids, 0
    for other in (ids, *texts):
        matched, end = _longest_match(ids, other)
        if matched > num_matched:
            num_matched, text, start = matched, other, end
    if num_matched < MIN_MATCH:
        return NO_DRAFT
    following = text[start : start + most]
    if text is ids and len(following) < most:
        following = np.resize(following, most)
    pictures = np.flatnonzero(following >= PICTURE_IDS)
    following = following[: pictures[0]] if len(pictures) else following  # no model can say one
    return Draft(tuple(following.tolist()), num_matched)


def _longest_match(ids: np.ndarray, text: np.ndarray) -> tuple[int, int]:
    """Return how many tokens at the end of `ids` are in `text` before its last token, and where the last such match
    ends; (0, 0) if not even one is."""
    at = np.flatnonzero(text[:-1] == ids[-1])  # positions of the match's last token
    if not len(at):
        return 0, 0
    num_matched = 1
    while num_matched < min(MAX_MATCH, len(ids)):
        longer = at[at >= num_matched]
        longer = longer[text[longer - num_matched] == ids[-1 - num_matched]]
        if not len(longer):
            break
        at, num_matched = longer, num_matched + 1
    return num_matched, int(at[-1]) + 1


class Acceptance:
    """How often the drafts of one sequence were right, by the length of their match.

    Starts at one half, as if two guesses had been seen.
    """

    def __init__(self) -> None:
        self._seen = np.full(CLASSES, 2.0)
        self._right = np.full(CLASSES, 1.0)

    def observe(self, num_matched: int, *, right: bool) -> None:
        """Learn whether the token after a match was right."""
        at = _class_of(num_matched)
        self._seen[at] = DECAY * self._seen[at] + 1
        self._right[at] = DECAY * self._right[at] + right

    def judge(self, draft: Draft, following: Sequence[int]) -> int:
        """Learn from the tokens that followed in truth, up to the first that differs; return how many were right."""
        for index, (guessed, token) in enumerate(zip(draft.ids, following, strict=False)):
            self.observe(draft.num_matched + index, right=guessed == token)
            if guessed != token:
                return index
        return min(len(draft.ids), len(following))

    def chances(self, draft: Draft) -> np.ndarray:
        """Return for each token of a draft the probability that it and all before it are right; never increases."""
        classes = _class_of(draft.num_matched + np.arange(len(draft.ids)))
        return np.cumprod((self._right / self._seen)[classes])

    def check(self) -> None:
        """Assert that there are not more right guesses than guesses."""
        assert (self._right >= 0).all() and (self._right <= self._seen).all(), f"{self._right} of {self._seen} right"


def _class_of(num_matched: int | np.ndarray) -> np.ndarray:
    """Classes of matches by their length, each for twice the tokens of the one before; of its argument's shape."""
    classes: np.ndarray = np.minimum(np.frexp(num_matched)[1] - 2, CLASSES - 1)
    return classes
