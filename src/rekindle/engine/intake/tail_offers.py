"""Offers to move an end of system texts that a client keeps changing: found in its requests, proved on the template.

An offer is made when the same place has changed at least twice, and only if prompts with the old and the new text then
have more in common: where a template writes the tools first, nothing is won. Only the renderer and the system texts of
memory are used; those belong to the intake thread.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import replace
from itertools import takewhile

from rekindle.cache.trie.radix import common_prefix
from rekindle.engine.intake.rendering import Renderer, Rendering
from rekindle.engine.memory.memory import OnMemory
from rekindle.engine.memory.preambles import names_of
from rekindle.engine.memory.system_texts import Changed, SystemTexts
from rekindle.engine.types import GenerationRequest
from rekindle.errors import BadRequest
from rekindle.matching.explain import Offer
from rekindle.text.messages import Message

LEAST_GAIN = 256  # bytes of prompt; less is not worth a setting
MOST_PROVED = 1024
PROBE = Message("user", "Go on.")


class TailOffers:
    """Notes the system texts of requests and makes offers; any thread, one request at a time for each agent."""

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
        system = _leading(settled)
        if "tail" not in self._renderer.kinds or request.task != "generate" or not system or not settled.tools:
            return None
        client, text = names_of(settled.tools), "\n".join(message.content for message in system)
        changed = on_memory(lambda: self._texts.put(request.namespace, client, agent, text))
        if changed is None or not self._is_proved(client, changed, settled, text):
            return None
        heading = changed.tail.heading
        line = changed.tail.line_in("\n".join(message.content for message in _leading(request)))
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
            return common_prefix(one, other)

        try:
            return common((changed.tail.heading,)) - common(())
        except BadRequest:  # the template takes no such conversation
            return 0


def _leading(request: GenerationRequest) -> list[Message]:
    return list(takewhile(lambda message: message.role == "system", request.messages or ()))
