"""The last system texts of each client, to find what it keeps changing in them.

A client is known by its tools. In memory only; a text is forgotten with the agent that sent it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from rekindle.text.tails import ChangingTail, changing_tail

MOST_CLIENTS = 32
MOST_TEXTS = 4  # of a client: its sub-agents have their own
MOST_CHARS = 1 << 17  # of a text; longer ones are not compared
MOST_HEADINGS = 64
MOST_CHANGES = 8  # of a heading that are remembered
KEEPS = 2  # changes in one place; a single one may be an edit


@dataclass(frozen=True, slots=True)
class Changed:
    """A place where a client keeps changing its system text, and the text it sent before."""

    tail: ChangingTail
    before: str


@dataclass(slots=True)
class _Client:
    texts: dict[str, str] = field(default_factory=dict)  # text -> the agent that sent it last, the latest text last
    changes: dict[str, list[str]] = field(default_factory=dict)  # by heading: the agents of both texts of each


class SystemTexts:
    """System texts by (namespace, client)."""

    def __init__(self) -> None:
        self._clients: OrderedDict[tuple[str, str], _Client] = OrderedDict()

    def put(self, namespace: str, client: str, agent: str, text: str) -> Changed | None:
        """Remember the system text of a request; return where it keeps changing, None if it does not.

        A text that was sent before changes nothing.
        """
        if len(text) > MOST_CHARS:
            return None
        known = self._clients.setdefault((namespace, client), _Client())
        self._clients.move_to_end((namespace, client))
        while len(self._clients) > MOST_CLIENTS:
            self._clients.popitem(last=False)
        if known.texts.pop(text, None) is not None:
            known.texts[text] = agent
            return None
        pairs = ((before, changing_tail(before, text)) for before in reversed(known.texts))
        before, tail = next(((before, tail) for before, tail in pairs if tail is not None), ("", None))
        sender = known.texts.pop(before, agent)
        known.texts[text] = agent
        if len(known.texts) > MOST_TEXTS:
            del known.texts[next(iter(known.texts))]
        if tail is None:
            return None
        if len(known.changes) >= MOST_HEADINGS:
            known.changes.clear()
        agents = known.changes.setdefault(tail.heading, [])
        agents += [sender, agent]
        del agents[: -2 * MOST_CHANGES]
        return Changed(tail, before) if len(agents) >= 2 * KEEPS else None

    def drop(self, namespace: str, agent: str) -> None:
        """Forget the texts that an agent sent last, and the headings in texts that it sent."""
        for key, known in list(self._clients.items()):
            if key[0] == namespace:
                known.texts = {text: sender for text, sender in known.texts.items() if sender != agent}
                known.changes = {name: agents for name, agents in known.changes.items() if agent not in agents}
                if not known.texts:
                    del self._clients[key]

    def check(self) -> None:
        """Assert that no more is remembered than bounds allow."""
        assert len(self._clients) <= MOST_CLIENTS, len(self._clients)
        for key, known in self._clients.items():
            assert 0 < len(known.texts) <= MOST_TEXTS, f"{key} has {len(known.texts)} texts"
            assert len(known.changes) <= MOST_HEADINGS, key
