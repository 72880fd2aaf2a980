"""How much of each prompt a server would have had stored, as its own matcher decides: same text, same ids, no KV.

Owns which sequences are stored when: a prompt and its reply as generated, as far as the log shows, up to eight
branches per agent, least recently used evicted when memory is short. docs/analyze.md lists what is not modelled: KV
budgets, and clients that return before the idle time has passed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rekindle.config import CacheSettings
from rekindle.errors import BadRequest
from rekindle.matching.matcher import Matcher, StoredBranch, TextMatch, prompt_ids
from rekindle.text.messages import Message
from rekindle.text.normalise import Normal, normalise
from rekindle.text.places import anticipated, likely_probes
from rekindle.text.prompt import PromptEncoder, RenderedPrompt
from rekindle.text.vocabulary import MARK
from rekindle_lab.analyze.bodies import LoggedPrompt

NAMESPACE = "log"
ANTICIPATED = (-1, -2)  # branches computed ahead
MAX_OPEN = 1_024  # requests whose reply may still follow
INDEX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Handling:
    """How prompts are handled: kinds of `NORMALISATIONS`, and whether the next rendering is computed ahead."""

    kinds: frozenset[str] = frozenset()
    anticipates: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Reuse:
    """One prompt [tokens] and how many of its first ids were in a stored sequence; `is_own`: of the same agent.

    `earlier`: the text of the previous turn, if known.
    """

    rendered: RenderedPrompt
    normal: Normal
    ids: np.ndarray
    num_reused: int
    is_own: bool
    match: TextMatch
    earlier: bytes | None


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    """A request whose reply is not known yet."""

    agent: str
    reuse: Reuse
    number: int
    tools: Sequence[Any] | None
    template_kwargs: Mapping[str, Any]


@dataclass(slots=True)
class _Branches:
    """An agent's sequences by number, least recently used first."""

    held: OrderedDict[int, np.ndarray] = field(default_factory=OrderedDict)
    next_number: int = 0


class Memory:
    """A server's memory of one log under one handling. `num_forgotten`: sequences evicted to bound it."""

    def __init__(self, encoder: PromptEncoder, handling: Handling, *, max_bytes: int = INDEX_BYTES) -> None:
        self._encoder = encoder
        self._handling = handling
        self._matcher = Matcher(encoder, max_index_bytes=max_bytes)
        self._agents: dict[str, _Branches] = {}
        self._open: OrderedDict[int, _Open] = OrderedDict()
        self._numbers: OrderedDict[int, int] = OrderedDict()  # of the branches that requests were stored in
        self._max_branches = CacheSettings().max_branches
        self.num_forgotten = 0

    def ask(self, serial: int, agent: str, asked: LoggedPrompt, *, earlier: int | None = None) -> Reuse:
        """Return how much of a prompt was stored, then store all of it. Raises BadRequest as rendering does.

        `earlier`: the request whose conversation it continues.
        """
        normal = normalise(asked.messages, asked.tools, self._handling.kinds)
        if asked.text is None:
            rendered = self._encoder.render_chat(normal.messages, normal.tools, **asked.template_kwargs)
        else:
            rendered = self._encoder.render_text(asked.text)
        match = self._matcher.match(NAMESPACE, agent, rendered)
        ids, _ = prompt_ids(self._encoder, match, rendered)
        stored = match.branch.ids if match.branch is not None else ids[:0]
        num_reused = min(_in_common(stored, ids), max(len(ids) - 1, 0))  # the last token is always computed
        reuse = Reuse(rendered, normal, ids, num_reused, match.source == "own", match, self._text_of(agent, earlier))
        number = self._store(agent, ids)
        self._numbers[serial] = number
        if len(self._numbers) > MAX_OPEN:
            self._numbers.popitem(last=False)
        if asked.text is None:
            self._open[serial] = _Open(agent, reuse, number, normal.tools, asked.template_kwargs)
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        return reuse

    def reply(self, serial: int, message: Message) -> np.ndarray | None:
        """Store the reply to a request, and what is computed ahead for the next; once per request.

        Returns prompt and reply as stored; None if nothing is.
        """
        opened = self._open.pop(serial, None)
        if opened is None:
            return None
        prompt, reuse = opened.reuse.rendered, opened.reuse
        later = [*reuse.normal.messages, message]
        reply = self._encoder.encode(RenderedPrompt(self._as_generated(opened, later)))
        held = self._agents.get(opened.agent)
        stored = None
        if held is not None and opened.number in held.held and len(reply):
            stored = np.concatenate([reuse.ids, reply])
            self._put(opened.agent, opened.number, stored)
        if self._handling.anticipates:
            self._anticipate(opened, later, prompt)
        return stored

    def _text_of(self, agent: str, serial: int | None) -> bytes | None:
        """Return the text of the branch that holds an earlier request of this agent."""
        number = self._numbers.get(serial) if serial is not None else None
        held = self._agents.get(agent)
        ids = held.held.get(number) if held is not None and number is not None else None
        return None if ids is None else self._encoder.key_of(ids)

    def _as_generated(self, opened: _Open, later: Sequence[Message]) -> bytes:
        """Return the reply as the template writes it after its prompt, else its text alone."""
        prompt, message = opened.reuse.rendered.key, later[-1]
        try:
            key = self._encoder.render_chat(
                later, opened.tools, add_generation_prompt=False, **opened.template_kwargs
            ).key
        except BadRequest:
            key = b""
        if not key.startswith(prompt):
            return self._encoder.content_key(message, message.content)
        end = key.rfind(MARK, len(prompt))  # the token that ends a reply is sampled, not computed
        return key[len(prompt) : end if end >= 0 else len(key)]

    def _anticipate(self, opened: _Open, later: Sequence[Message], prompt: RenderedPrompt) -> None:
        ids = [call.id for call in later[-1].tool_calls if call.id is not None]
        before = prompt.key
        for number, probes in zip(ANTICIPATED, likely_probes(later), strict=False):
            common = anticipated(
                self._encoder,
                later,
                opened.tools,
                template_kwargs=opened.template_kwargs,
                probes=probes,
                call_ids=ids if len(ids) == len(later[-1].tool_calls) else (),
            )
            if common is None or before.startswith(common.key):
                continue
            before = common.key
            match = self._matcher.match(NAMESPACE, opened.agent, common)
            if match.relation != "exact" or match.source != "own":
                self._put(opened.agent, number, prompt_ids(self._encoder, match, common)[0])

    def _store(self, agent: str, ids: np.ndarray) -> int:
        """Store a prompt, replacing the branch it extends; return the number of its branch."""
        mine = self._agents.setdefault(agent, _Branches())
        extended = [number for number, held in mine.held.items() if number >= 0 and _in_common(held, ids) == len(held)]
        number = max(extended, key=lambda each: len(mine.held[each]), default=mine.next_number)
        mine.next_number = max(mine.next_number, number + 1)
        self._put(agent, number, ids)
        if len(mine.held) > self._max_branches:
            gone, _ = mine.held.popitem(last=False)
            self._matcher.remove(NAMESPACE, agent, gone)
        return number

    def _put(self, agent: str, number: int, ids: np.ndarray) -> None:
        self._agents.setdefault(agent, _Branches()).held[number] = ids
        self._agents[agent].held.move_to_end(number)
        self._matcher.add(StoredBranch(NAMESPACE, agent, number, ids, len(ids)))
        self._forget_dropped()

    def _forget_dropped(self) -> None:
        """Release the ids of branches that the index dropped to stay within its budget."""
        while self._matcher.index.dropped:
            branch = self._matcher.index.dropped.pop()
            held = self._agents.get(branch.agent or "")
            if held is not None and held.held.get(branch.branch) is branch.ids:
                self._matcher.remove(NAMESPACE, branch.agent, branch.branch)
                del held.held[branch.branch]
                self.num_forgotten += 1


def _in_common(a: np.ndarray, b: np.ndarray) -> int:
    """Count the leading ids that agree."""
    num = min(len(a), len(b))
    differ = np.flatnonzero(a[:num] != b[:num])
    return int(differ[0]) if len(differ) else num
