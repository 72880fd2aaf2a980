"""Texts of a given number of tokens, from a seed: the same in every run, process and arm.

Words are joined by blanks and texts are cut between words, so an extended text begins with the ids of the short one.
"""

from __future__ import annotations

import bisect
import random

import numpy as np

from rekindle.text.prompt import PromptEncoder

WORDS = (
    "the lamp keeper walked down to the harbour and wrote a letter about winter rain and seven boats that had come "
    "home late with salt on every rope while children counted stones beside an old wall near our river because "
    "nobody knew when morning would bring bread or news from the hills again"
).split()


class Workload:
    """Prompts for one model: `base` texts of about `context` tokens, and texts that share a part with them.

    "About" means the largest number of words that does not exceed it.
    """

    def __init__(self, encoder: PromptEncoder, *, context: int, seed: int) -> None:
        self._encoder = encoder
        self._context = context
        self._seed = seed

    def ids(self, text: str) -> np.ndarray:
        """Return the ids of a fresh encoding (uint32)."""
        return self._encoder.encode(self._encoder.render_text(text))

    def base(self, number: int) -> str:
        """Return the text of one conversation; different numbers differ from the first words on."""
        return self._fit("", f"base {number}", self._context)

    def extended(self, text: str, num_tokens: int, number: int) -> str:
        """Return `text` and about `num_tokens` more tokens, different for every `number`."""
        return self._fit(text, f"extended {number}", len(self.ids(text)) + num_tokens)

    def diverged(self, text: str, share: float, number: int) -> str:
        """Return the first `share` of the words of `text`, then different ones up to the context."""
        words = text.split(" ")
        kept = " ".join(words[: int(len(words) * share)])
        return self._fit(kept, f"diverged {share} {number}", self._context)

    def _fit(self, start: str, what: str, num_tokens: int) -> str:
        """Return `start` and as many random words as fit into `num_tokens` tokens in total."""
        chooser = random.Random(f"{self._seed} {what}")
        words = [chooser.choice(WORDS) for _ in range(num_tokens)]

        def text(count: int) -> str:
            return " ".join([start, *words[:count]] if start else words[:count])

        count = bisect.bisect_right(range(1, num_tokens + 1), num_tokens, key=lambda n: len(self.ids(text(n))))
        return text(count)
