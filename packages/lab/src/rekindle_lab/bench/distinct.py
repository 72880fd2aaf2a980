"""Distinct conversations of about a given number of tokens, reproducible from a seed."""

from __future__ import annotations

import random
from typing import Any

from rekindle.text.messages import normalise_messages
from rekindle.text.prompt import PromptEncoder
from rekindle_pocket.conversations import recall_case, story

Messages = list[dict[str, Any]]
MIN_TOKENS = 100  # a system prompt, a fact, a document of one sentence and a question about the fact
SENTENCES = 40


class Distinct:
    """Conversations by number, each of at most `tokens` tokens and little less, ending with a user's question."""

    def __init__(self, encoder: PromptEncoder, *, tokens: int, seed: int) -> None:
        self._encoder = encoder
        self._tokens = tokens
        self._seed = seed
        longer, shorter = self._drawn(0, 1 + SENTENCES), self._drawn(0, 1)
        self._sentence_tokens = (self.count(longer) - self.count(shorter)) / SENTENCES

    def messages(self, number: int) -> Messages:
        """Return conversation `number`: a fact, a document about other things, and a question about the fact."""
        base = self.count(self._drawn(number, 1))
        sentences = 2 + max(0, int((self._tokens - base) / self._sentence_tokens))
        while sentences > 1 and self.count(self._drawn(number, sentences)) > self._tokens:
            sentences -= 1
        return self._drawn(number, sentences)

    def count(self, messages: Messages) -> int:
        """Count the tokens of these messages as a prompt."""
        return len(self._encoder.encode(self._encoder.render_chat(normalise_messages(messages))))

    def _drawn(self, number: int, sentences: int) -> Messages:
        r = random.Random(self._seed * 1_000_003 + number)
        first, *fact, question = recall_case(r, 0)["messages"]
        return [
            {**first, "content": f"Desk {number}. {first['content']}"},
            *fact,
            {"role": "user", "content": f"Document: {story(r, sentences)}"},
            {"role": "assistant", "content": "I have read it. It holds no facts."},
            question,
        ]
