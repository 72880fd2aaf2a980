"""Texts of a wanted number of tokens, from a seed: the same on every run, in every process, for every arm.

Words are joined by blanks and texts are cut between them, so an extended text has the ids of the short one in front.
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
    """Prompts for one model: `base` texts of about `context` tokens and texts that share a part with them.

    "About": the largest number of words that does not exceed it.
    """

    def __init__(self, encoder: PromptEncoder, *, context: int, seed: int) -> None:
        self._encoder = encoder
        self._context = context
        self._seed = seed

    def ids(self, text: str) -> np.ndarray:
        """The ids of a fresh encoding (uint32)."""
        return self._encoder.encode(self._encoder.render_text(text))

    def base(self, number: int) -> str:
        """The text of one conversation; others differ from its first words on."""
        return self._fit("", f"base {number}", self._context)

    def extended(self, text: str, num_tokens: int, number: int) -> str:
        """`text` and about `num_tokens` tokens more, others for every `number`."""
        return self._fit(text, f"extended {number}", len(self.ids(text)) + num_tokens)

    def diverged(self, text: str, share: float, number: int) -> str:
        """The first `share` of the words of `text`, then others, up to the context."""
        words = text.split(" ")
        kept = " ".join(words[: int(len(words) * share)])
        return self._fit(kept, f"diverged {share} {number}", self._context)

    def _fit(self, start: str, what: str, num_tokens: int) -> str:
        """`start` and as many drawn words as fit into `num_tokens` tokens in all."""
        chooser = random.Random(f"{self._seed} {what}")
        words = [chooser.choice(WORDS) for _ in range(num_tokens)]

        def text(count: int) -> str:
            return " ".join([start, *words[:count]] if start else words[:count])

        count = bisect.bisect_right(range(1, num_tokens + 1), num_tokens, key=lambda n: len(self.ids(text(n))))
        return text(count)
