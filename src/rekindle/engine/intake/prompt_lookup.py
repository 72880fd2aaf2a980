"""Look up prompts in memory: their ids, the conversation they continue, and why not more was found.

Stored ids are kept up to where the text differs; the rest is a fresh encoding. Memory belongs to the intake thread:
only the lookup runs there, through `on_memory`; any thread may do the rest.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rekindle.agent_ids import kind_of, new_conversation
from rekindle.engine.intake.candidates import asks_for_summary
from rekindle.engine.intake.rendering import Renderer, Rendering
from rekindle.engine.memory.branches import KnownBranch, common_prefix, is_prefix
from rekindle.engine.memory.memory import AgentMemory, OnMemory
from rekindle.engine.memory.preambles import Preamble, names_of
from rekindle.engine.memory.system_texts import Changed, SystemTexts
from rekindle.engine.request import NO_MATCH, MatchFacts
from rekindle.engine.types import GenerationRequest, Reuse
from rekindle.errors import BadRequest
from rekindle.matching.explain import Explanation, Offer, explain, explain_elsewhere
from rekindle.matching.matcher import Mode, Relation, TextMatch, prompt_ids
from rekindle.spec import Change
from rekindle.text.messages import Message, leading_system
from rekindle.text.prompt import PromptEncoder, RenderedPrompt
from rekindle.text.vocabulary import agreeing

LEAST_GAIN = 256  # bytes of prompt; less is not worth a setting
MOST_PROVED = 1024
PROBE = Message("user", "Go on.")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids to run, what they were matched to, and the agent whose memory they belong to."""

    ids: np.ndarray
    agent: str
    reuse: Reuse
    match: MatchFacts
    canonical_tokens: int  # how many of the ids are known to be a fresh encoding
    is_continued: bool = True  # False: it names no agent and is no later turn of what is known


@dataclass(frozen=True, slots=True)
class _Found:
    """Result of a lookup: the best match, whether the agent has a memory here, what differs in one elsewhere.

    `is_later`: an unnamed prompt has the reply of a conversation, though not as it was generated.
    """

    match: TextMatch
    has_own: bool
    elsewhere: tuple[Change, ...] | None
    is_later: bool = False


class PromptLookup:
    """Finds what is stored of prompts. With `reuse` "off", nothing. `offers` add to explanations."""

    def __init__(
        self, encoder: PromptEncoder, memory: AgentMemory, *, reuse: str, offers: TailOffers | None = None
    ) -> None:
        self._encoder = encoder
        self._memory = memory
        self._reuse = reuse
        self._offers = offers

    def match(
        self, namespace: str, agent: str | None, rendered: RenderedPrompt, *, mode: Mode | None, parent: str | None
    ) -> TextMatch:
        """Match a prompt of an agent (None: unnamed). An agent without a memory continues that of `parent`."""
        if agent is not None and not self._memory.know_agent(namespace, agent) and parent is not None:
            self._memory.know_agent(namespace, parent)
        return self._memory.matcher.match(namespace, agent, rendered, mode, parent=parent)

    def note_preamble(self, request: GenerationRequest, *, system: Literal["sent", "put back"]) -> None:
        """Remember the system text and tools of a named agent's request, and its messages. On the intake thread.

        A system text that was "put back" is still the agent's, in place of the one that was sent.
        """
        agent = request.agent
        if agent is None or request.messages is None or not request.tools or self.is_off(request):
            return
        known = self.own_preamble(request) if system == "put back" else None
        own = known.system if known else tuple(message.content for message in leading_system(request.messages))
        self._memory.preambles.put(request.namespace, agent, Preamble(own, request.tools))
        self._memory.histories.put(request.namespace, agent, request.messages)

    def own_preamble(self, request: GenerationRequest) -> Preamble | None:
        """Return the preamble that the agent of a request with tools had; None without a name. On the intake thread."""
        if request.agent is None or not request.messages or not request.tools or self.is_off(request):
            return None
        return self._memory.preambles.get(request.namespace, request.agent)

    def preamble(self, request: GenerationRequest) -> Preamble | None:
        """Return the preamble that the agent of a request for a summary had, if this request has none of its tools;
        None without a name, as it would be another's. On the intake thread."""
        if request.agent is None or request.tools or request.task != "generate" or self.is_off(request):
            return None
        known = self._memory.preambles.get(request.namespace, request.agent)
        return known if known is not None and asks_for_summary(request.messages or (), known.system) else None

    def history(self, request: GenerationRequest) -> Sequence[Message]:
        """Return the messages of the last request with tools of a request's agent; none if it has no name, or if they
        are not known. On the intake thread."""
        agent = request.agent
        return () if agent is None else self._memory.histories.get(request.namespace, agent)

    def num_tokens(self, rendering: Rendering, *, on_memory: OnMemory) -> int:
        """Return how many tokens a prompt has."""
        match = on_memory(lambda: self._look(rendering.request, rendering.prompt)).match
        return len(prompt_ids(self._encoder, match, rendering.prompt)[0])

    def nearest(self, rendering: Rendering, *, on_memory: OnMemory) -> tuple[int, bytes]:
        """Return how much of a prompt's text is stored, and the stored text that it diverges from (empty: none)."""
        match = on_memory(lambda: self._look(rendering.request, rendering.prompt)).match
        return match.matched_bytes, b"" if match.difference is None else match.difference.stored_key

    def of_text(
        self, request: GenerationRequest, rendering: Rendering, *, on_memory: OnMemory, most: float = math.inf
    ) -> Prompt:
        """Look up a rendered prompt: stored ids up to where the text differs, then a fresh encoding.

        Raises PromptTooLong if the rest has more than `most` tokens.
        """
        agent = request.agent or new_conversation()
        rendered = rendering.prompt
        if self.is_off(request):
            ids = self._encoder.encode(rendered, most=most)
            return Prompt(ids, agent, "off", NO_MATCH, len(ids))
        found = on_memory(lambda: self._look(request, rendered))
        match, is_continued = found.match, request.agent is not None or found.is_later
        ids, canonical = prompt_ids(self._encoder, match, rendered, most=most)
        if request.agent is None and _continues(match):
            assert match.branch is not None and match.branch.agent is not None
            agent, is_continued = match.branch.agent, True
        facts = MatchFacts(
            relation=match.relation,
            source=match.source,
            has_own=found.has_own,
            matched_bytes=match.matched_bytes,
            num_tokens=match.num_tokens,
            explanation=self._explain(found, rendering, len(ids)),
        )
        offer = self._offers.offer(request, agent, rendering, on_memory=on_memory) if self._offers else None
        if offer is not None and facts.explanation is not None:
            facts = replace(facts, explanation=replace(facts.explanation, offer=offer))
        return Prompt(ids, agent, match.mode, facts, canonical, is_continued)

    def _look(self, request: GenerationRequest, rendered: RenderedPrompt) -> _Found:
        mode = request.reuse if request.reuse != "off" else None
        match = self.match(request.namespace, request.agent, rendered, mode=mode, parent=request.parent)
        if request.agent is None:
            return _Found(match, has_own=False, elsewhere=None, is_later=self._is_later(request, match))
        has_own = bool(self._memory.book.of(request.namespace, request.agent))
        return _Found(match, has_own, self._memory.elsewhere(request.namespace, request.agent))

    def _is_later(self, request: GenerationRequest, match: TextMatch) -> bool:
        """Whether a prompt agrees with most of a conversation and has more replies than its last prompt had.

        Templates and clients rewrite replies, so a second turn need not contain the first one as it was generated.
        """
        stored = match.branch
        if stored is None or request.num_replies is None or 2 * match.num_tokens < len(stored.ids):
            return False
        branch = self._memory.book.get(stored.namespace, stored.agent or "", stored.branch)
        return branch is not None and branch.num_replies is not None and request.num_replies > branch.num_replies

    def of_ids(self, request: GenerationRequest, ids: np.ndarray) -> Prompt:
        """Look up ids, which run as they are: matched with the agent's branches by ids, not by text. On the intake
        thread."""
        agent = request.agent or new_conversation()
        if self.is_off(request):
            return Prompt(ids, agent, "off", NO_MATCH, 0)
        mine = self._memory.know_agent(request.namespace, agent)
        shared = {branch.number: common_prefix(branch.ids, ids) for branch in mine}
        nearest = max(mine, key=lambda branch: shared[branch.number], default=None)
        if nearest is None:
            return Prompt(ids, agent, "continuation", NO_MATCH, 0, request.agent is not None)
        num_tokens = shared[nearest.number]
        relation: Relation = "exact" if num_tokens == len(ids) else "diverge"
        if relation == "diverge" and num_tokens == nearest.num_tokens:
            relation = "extend"
        matched = int(self._encoder.byte_ends(ids[:num_tokens])[-1]) if num_tokens else 0
        facts = MatchFacts(relation, "own", True, matched, num_tokens, None)
        return Prompt(ids, agent, "continuation", facts, min(num_tokens, nearest.canonical_tokens))

    def other_texts(self, namespace: str, prompt: Prompt) -> tuple[np.ndarray, ...]:
        """Return the ids of the agent's branches that the prompt does not contain, most recently used first, as far as
        they are in memory: its reply may quote them. On the intake thread."""
        mine = self._memory.book.of(namespace, prompt.agent) if prompt.reuse != "off" else []
        known = (branch.ids for branch in mine if isinstance(branch, KnownBranch))
        return tuple(ids for ids in known if not is_prefix(ids, prompt.ids))

    def is_off(self, request: GenerationRequest) -> bool:
        """Whether nothing stored is reused for a request."""
        return self._reuse == "off" or request.reuse == "off"

    def _explain(self, found: _Found, rendering: Rendering, num_tokens: int) -> Explanation | None:
        if found.elsewhere is not None:
            return explain_elsewhere(found.elsewhere)
        return explain(found.match, rendering.prompt, rendering.as_sent, encoder=self._encoder, num_tokens=num_tokens)


class TailOffers:
    """Offers to move an end of system texts that a client keeps changing; any thread, one request at a time for each
    agent.

    An offer is made when the same place has changed at least twice, and only if prompts with the old and the new text
    then have more in common, as the template shows: where it writes the tools first, nothing is won.
    """

    def __init__(self, renderer: Renderer, texts: SystemTexts) -> None:
        self._renderer = renderer
        self._texts = texts
        self._lock = threading.Lock()
        # By a digest of namespace, names of tools and heading: words of an agent, which may be purged.
        self._proved: OrderedDict[bytes, bool] = OrderedDict()

    def offer(
        self, request: GenerationRequest, agent: str, rendering: Rendering, *, on_memory: OnMemory
    ) -> Offer | None:
        """Note the request of an agent; return an offer if its system text has changed again where it keeps changing.
        `rendering` is its prompt."""
        settled = rendering.request
        system = leading_system(settled.messages or ())
        if "tail" not in self._renderer.kinds or request.task != "generate" or not system or not settled.tools:
            return None
        client, text = names_of(settled.tools), "\n".join(message.content for message in system)
        changed = on_memory(lambda: self._texts.put(request.namespace, client, agent, text))
        if changed is None or not self._is_proved(client, changed, settled, text):
            return None
        heading = changed.tail.heading
        sent = "\n".join(message.content for message in leading_system(request.messages or ()))
        line = changed.tail.line_in(sent)
        reason = (
            f"the system text of this client keeps changing from line {line} on, which moves to the first user "
            "message then, after the tools"
        )
        return Offer("tail_heading", heading, reason)

    def _is_proved(self, client: str, changed: Changed, settled: GenerationRequest, now: str) -> bool:
        words = "\0".join((settled.namespace, client, changed.tail.heading))
        key = hashlib.blake2b(words.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        proved = self._proved.get(key)
        if proved is None:
            proved = self._gain(changed, settled, now) >= LEAST_GAIN
            with self._lock:
                self._proved[key] = proved
                while len(self._proved) > MOST_PROVED:
                    self._proved.popitem(last=False)
        return proved

    def _gain(self, changed: Changed, settled: GenerationRequest, now: str) -> int:
        """Return by how many bytes the common prefix of prompts with both texts grows."""

        def common(headings: tuple[str, ...]) -> int:
            renderer = self._renderer.with_headings(headings)
            one, other = (
                renderer.render(replace(settled, messages=(Message("system", text), PROBE), breakpoints=())).prompt.key
                for text in (changed.before, now)
            )
            return agreeing(one, other)

        try:
            return common((changed.tail.heading,)) - common(())
        except BadRequest:  # the template takes no such conversation
            return 0


def _continues(match: TextMatch) -> bool:
    """Whether an unnamed prompt continues an unnamed conversation."""
    branch = match.branch
    is_open = branch is not None and branch.agent is not None and kind_of(branch.agent).continues_unnamed
    return is_open and match.continues
