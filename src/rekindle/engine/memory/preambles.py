"""What each agent's client writes before a conversation, its system text and tools, for prompts that come without.

Clients that let the model summarise its history send it without the tools, some with another system text. Templates
write both before all messages, so such a prompt would be computed from its beginning, just when it is longest. Equal
ones are kept once, whichever agents sent them. In memory only.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")
MOST_AGENTS = 1024  # whose preambles are remembered
MOST_TOOLS = 64  # of different kinds; a coding agent's have 100 kB
MOST_SYSTEMS = 256
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Preamble:
    """The texts of the system messages that a conversation begins with, and its tools."""

    system: tuple[str, ...]
    tools: Tools


class Preambles:
    """The last preamble with tools of each named agent, those of the most recently used ones."""

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._systems: _Shared[tuple[str, ...]] = _Shared()
        self._tools: _Shared[Tools] = _Shared()

    def put(self, namespace: str, agent: str, preamble: Preamble) -> None:
        """Remember the preamble of an agent's request."""
        self.drop(namespace, agent)
        self._last[namespace, agent] = _Kept(self._systems.add(preamble.system), self._tools.add(preamble.tools))
        while (
            len(self._last) > MOST_AGENTS
            or len(self._systems.values) > MOST_SYSTEMS
            or len(self._tools.values) > MOST_TOOLS
        ):
            self.drop(*next(iter(self._last)))

    def get(self, namespace: str, agent: str) -> Preamble | None:
        """Return the preamble of an agent's last request that had tools; None if it is not known."""
        kept = self._last.get((namespace, agent))
        return None if kept is None else Preamble(self._systems.values[kept.system], self._tools.values[kept.tools])

    def drop(self, namespace: str, agent: str) -> None:
        """Forget the preamble of an agent; a no-op if it is not known."""
        kept = self._last.pop((namespace, agent), None)
        if kept is None:
            return
        self._systems.remove(kept.system)
        self._tools.remove(kept.tools)

    def check(self) -> None:
        """Assert that texts and tools are kept for their users alone, within the bounds."""
        kept = self._last.values()
        assert len(kept) <= MOST_AGENTS, len(kept)
        self._systems.check(Counter(each.system for each in kept), MOST_SYSTEMS)
        self._tools.check(Counter(each.tools for each in kept), MOST_TOOLS)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Digests of an agent's system text and tools."""

    system: bytes
    tools: bytes


@dataclass(slots=True)
class _Shared(Generic[T]):
    """Values of JSON by digest, each with the number of its users."""

    values: dict[bytes, T] = field(default_factory=dict)
    users: Counter[bytes] = field(default_factory=Counter)

    def add(self, value: T) -> bytes:
        digest = hashlib.blake2b(json.dumps(value).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        self.values.setdefault(digest, value)
        self.users[digest] += 1
        return digest

    def remove(self, digest: bytes) -> None:
        self.users[digest] -= 1
        if not self.users[digest]:
            del self.users[digest], self.values[digest]

    def check(self, users: Counter[bytes], most: int) -> None:
        """Assert that `users` are the users, of at most so many values."""
        assert self.users == users, self.users
        assert self.values.keys() == users.keys() and len(users) <= most, self.values.keys()


def names_of(tools: Tools) -> str:
    """Return the names of tools, for reports."""
    functions = (tool.get("function", tool) for tool in tools)
    return ", ".join(str(each.get("name", "")) for each in functions if isinstance(each, Mapping))
