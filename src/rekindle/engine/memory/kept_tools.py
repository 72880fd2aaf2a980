"""Tools of each agent, for prompts that come without them, as clients send that let the model summarise its history.

Many templates write tools before all messages, so such a prompt would be computed from its beginning, just when it is
longest. Equal tools are kept once, whichever agents sent them. In memory only.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

MOST_AGENTS = 1024  # whose tools are remembered
MOST_KINDS = 64  # of different tools; a coding agent's have 100 kB
Tools = Sequence[Mapping[str, Any]]


class KeptTools:
    """The last tools of each agent, those of the most recently used ones."""

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._tools: dict[bytes, Tools] = {}
        self._users: Counter[bytes] = Counter()

    def put(self, namespace: str, agent: str, tools: Tools) -> None:
        """Remember the tools of an agent's request."""
        digest = hashlib.blake2b(json.dumps(tools).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        self.drop(namespace, agent)
        self._last[namespace, agent] = digest
        self._users[digest] += 1
        self._tools.setdefault(digest, tools)
        while len(self._last) > MOST_AGENTS or len(self._tools) > MOST_KINDS:
            self.drop(*next(iter(self._last)))

    def get(self, namespace: str, agent: str) -> Tools | None:
        """Return the tools of an agent's last request that had some; None if they are not known."""
        digest = self._last.get((namespace, agent))
        return None if digest is None else self._tools[digest]

    def drop(self, namespace: str, agent: str) -> None:
        """Forget the tools of an agent; a no-op if they are not known."""
        digest = self._last.pop((namespace, agent), None)
        if digest is None:
            return
        self._users[digest] -= 1
        if not self._users[digest]:
            del self._users[digest], self._tools[digest]

    def check(self) -> None:
        """Assert that tools are kept for their users alone, within the bounds."""
        assert self._users == Counter(self._last.values()) and self._users.keys() == self._tools.keys(), self._users
        assert len(self._last) <= MOST_AGENTS and len(self._tools) <= MOST_KINDS, len(self._last)


def names_of(tools: Tools) -> str:
    """Return the names of tools, for reports."""
    functions = (tool.get("function", tool) for tool in tools)
    return ", ".join(str(each.get("name", "")) for each in functions if isinstance(each, Mapping))
