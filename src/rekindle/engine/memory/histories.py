"""The messages of each agent's last request with tools, for clients that quote them when they want a summary.

A branch has its text, but not which messages it is made of. In memory only, those of the most recently used agents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from rekindle.text.messages import Message

MOST_CHARS = 1 << 25  # of all messages; a long conversation of a coding agent has half a million


class Histories:
    """Messages by namespace and agent."""

    def __init__(self, *, most_chars: int = MOST_CHARS) -> None:
        self._most_chars = most_chars
        self._last: OrderedDict[tuple[str, str], tuple[Sequence[Message], int]] = OrderedDict()
        self._num_chars = 0

    def put(self, namespace: str, agent: str, messages: Sequence[Message]) -> None:
        """Remember an agent's messages in place of earlier ones; the oldest agents' are forgotten for their sake."""
        self.drop(namespace, agent)
        num_chars = sum(map(_num_chars, messages))
        self._last[namespace, agent] = messages, num_chars
        self._num_chars += num_chars
        while self._num_chars > self._most_chars:
            self.drop(*next(iter(self._last)))

    def get(self, namespace: str, agent: str) -> Sequence[Message]:
        """Return the messages of an agent's last request that had tools; none if it is not known."""
        return self._last.get((namespace, agent), ((), 0))[0]

    def drop(self, namespace: str, agent: str) -> None:
        """Forget an agent; a no-op if it is not known."""
        self._num_chars -= self._last.pop((namespace, agent), ((), 0))[1]

    def check(self) -> None:
        """Assert that characters are counted, within the bound."""
        num_chars = sum(sum(map(_num_chars, messages)) for messages, _ in self._last.values())
        assert self._num_chars == num_chars <= self._most_chars, (self._num_chars, num_chars)


def _num_chars(message: Message) -> int:
    calls = sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
    return len(message.content) + len(message.reasoning or "") + calls
