"""How each agent's client begins a history anew with a summary of the old one: learned from what it sent last time.

Clients put the summary after words of their own, some of them after messages of the old history, which they keep. Knows
one form an agent: which messages are kept, and the words before the summary. In memory only.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, TypeVar

from rekindle.text.messages import Message

T = TypeVar("T")
MOST_AGENTS = 256
OPEN, CLOSE = "<summary>", "</summary>"  # around the part of a reply that Claude Code takes


@dataclass(frozen=True, slots=True)
class _Form:
    """What comes before a summary: messages of the old history, and `words` in the summary's own message."""

    keeps: Literal["nothing", "user messages"]
    is_inner: bool  # whether only the marked part of the reply is taken
    words: str


@dataclass(frozen=True, slots=True)
class _Asked:
    """A summary, and what was summarised, as digests of messages after the system text."""

    summary: str
    history: tuple[bytes, ...]
    users: tuple[bytes, ...]


class Summaries:
    """Summaries that were asked for, and the forms of those that were put into a history."""

    def __init__(self) -> None:
        self._asked: OrderedDict[tuple[str, str], _Asked] = OrderedDict()
        self._forms: OrderedDict[tuple[str, str], _Form] = OrderedDict()

    def asked(self, namespace: str, agent: str, messages: Sequence[Message], summary: str) -> None:
        """Remember the summary of a history; `messages` end with the request for it."""
        *history, _ = _after_system(messages)
        users = tuple(_digest(message) for message in history if message.role == "user")
        self._asked[namespace, agent] = _Asked(summary, tuple(map(_digest, history)), users)
        _bound(self._asked, (namespace, agent))

    def began(self, namespace: str, agent: str, messages: Sequence[Message]) -> None:
        """Learn from an agent's next messages how the summary was put into them; a no-op if none was asked for."""
        asked = self._asked.pop((namespace, agent), None)
        if asked is None:
            return
        self._forms.pop((namespace, agent), None)
        form = _form(asked, _after_system(messages))
        if form is not None:
            self._forms[namespace, agent] = form
            _bound(self._forms, (namespace, agent))

    def next_history(
        self, namespace: str, agent: str, messages: Sequence[Message], summary: str
    ) -> list[Message] | None:
        """Return the history that an agent's client is likely to begin with a summary of `messages`, up to the end of
        the summary; None if its form is not known."""
        form = self._forms.get((namespace, agent))
        text = None if form is None else _inner(summary) if form.is_inner else summary.strip()
        if form is None or not text:
            return None
        *history, _ = _after_system(messages)
        kept = [message for message in history if message.role == "user"] if form.keeps == "user messages" else []
        return [*_system(messages), *kept, Message("user", form.words + text)]

    def drop(self, namespace: str, agent: str) -> None:
        """Forget the summary and the form of an agent."""
        self._asked.pop((namespace, agent), None)
        self._forms.pop((namespace, agent), None)

    def check(self) -> None:
        """Assert that no more is remembered than bounds allow."""
        assert len(self._asked) <= MOST_AGENTS and len(self._forms) <= MOST_AGENTS, len(self._forms)


def _bound(known: OrderedDict[tuple[str, str], T], key: tuple[str, str]) -> None:
    known.move_to_end(key)
    if len(known) > MOST_AGENTS:
        known.popitem(last=False)


def _form(asked: _Asked, messages: Sequence[Message]) -> _Form | None:
    """Find the summary in the messages of a new history; None if it is not there, or not after what is known."""
    if tuple(map(_digest, messages[: len(asked.history)])) == asked.history and asked.history:
        return None  # the old history goes on
    for is_inner, text in ((False, asked.summary.strip()), (True, _inner(asked.summary))):
        for at, message in enumerate(messages):
            if text and message.role == "user" and text in message.content:
                before = tuple(map(_digest, messages[:at]))
                if before not in ((), asked.users):
                    return None
                words = message.content.partition(text)[0]
                return _Form("user messages" if before else "nothing", is_inner, words)
    return None


def _inner(summary: str) -> str:
    """Return the marked part of a summary; empty if there is none."""
    return summary.partition(OPEN)[2].partition(CLOSE)[0].strip()


def _system(messages: Sequence[Message]) -> list[Message]:
    return list(takewhile(lambda message: message.role == "system", messages))


def _after_system(messages: Sequence[Message]) -> Sequence[Message]:
    return messages[len(_system(messages)) :]


def _digest(message: Message) -> bytes:
    text = f"{message.role}\0{message.content}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
