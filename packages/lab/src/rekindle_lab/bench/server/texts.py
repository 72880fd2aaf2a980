"""Conversations of a given size for a server whose tokenizer is unavailable.

Owns the server's tokens per word, from its counts of two known texts. Texts come from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from rekindle.errors import RequestFailed
from rekindle_lab.bench.replay.client import OpenAIServer
from rekindle_lab.bench.workload import WORDS

PROBE_WORDS = 200
FILL = 0.97  # of the wanted tokens: words vary in tokens, and the context must not overflow
Messages = list[dict[str, Any]]


def message(role: str, content: str) -> dict[str, Any]:
    """Build a message."""
    return {"role": role, "content": content}


class ServerTexts:
    """Texts of about a given number of tokens for one server."""

    def __init__(self, server: OpenAIServer, *, seed: int) -> None:
        self._seed = seed
        short, long = (self._probe(server, count) for count in (PROBE_WORDS // 10, PROBE_WORDS))
        self.tokens_per_word = (long - short) / (PROBE_WORDS - PROBE_WORDS // 10)
        if not 0.2 < self.tokens_per_word < 20:
            raise RequestFailed(f"{server.url} counts {short} and {long} tokens for 20 and 200 words: no use")

    def _probe(self, server: OpenAIServer, num_words: int) -> int:
        return server.count_tokens({"messages": [message("user", self.words(num_words, "probe"))]})

    def words(self, count: int, what: str) -> str:
        """Return `count` words, different for every `what`."""
        chooser = random.Random(f"{self._seed} {what}")
        return " ".join(chooser.choice(WORDS) for _ in range(count))

    def text(self, num_tokens: int, what: str) -> str:
        """Return a text of about `num_tokens` tokens, rather fewer."""
        return self.words(max(int(FILL * num_tokens / self.tokens_per_word), 1), what)

    def diverged(self, text: str, share: float, what: str) -> str:
        """Return the first `share` of a text's words, and different ones in place of the rest."""
        words = text.split(" ")
        kept = words[: int(share * len(words))]
        return " ".join([*kept, self.words(len(words) - len(kept), what)])


def extended(messages: Sequence[dict[str, Any]], reply: dict[str, Any], text: str) -> Messages:
    """Return the conversation with its reply and the next user message."""
    return [*messages, reply, message("user", text)]
