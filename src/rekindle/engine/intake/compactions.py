"""Requests for a summary: a history without its tools, some with another system text, keeps the prompt it had.

The agent's system text and tools are put back if stored text then continues to the end of what came before the first
reply, and not without them: otherwise it may be another conversation. One without a name has to continue to its newest
message, with another system text: its user may have begun the same with and without tools. A system text that was sent
in place of the agent's moves to the head of the newest user message, where the model reads it as late as it can.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile

from rekindle.engine.intake.on_memory import OnMemory
from rekindle.engine.intake.prompt_lookup import LEAST_GAIN, PromptLookup
from rekindle.engine.intake.rendering import Renderer, Rendering, with_messages
from rekindle.engine.memory.preambles import Preamble, names_of
from rekindle.engine.types import GenerationRequest
from rekindle.text.normalise import Removed
from rekindle.text.places import Place

COMPACTION = "compaction"  # a kind of normalisation
BETWEEN = "\n\n"  # a system text and the words that it is put before


class Compactions:
    """Recognises requests for a summary by the stored text that they continue with their agent's preamble."""

    def __init__(self, renderer: Renderer, lookup: PromptLookup) -> None:
        self._renderer = renderer
        self._lookup = lookup

    def with_preamble(
        self, request: GenerationRequest, rendering: Rendering, on_memory: OnMemory
    ) -> tuple[GenerationRequest, Rendering]:
        """Return a request and its rendering with the preamble that its agent had; unchanged if nothing is gained."""
        known = on_memory(lambda: self._lookup.preamble(request)) if COMPACTION in self._renderer.kinds else None
        if known is None:
            return request, rendering
        without = self._lookup.matched_bytes(rendering, on_memory=on_memory)
        for candidate, kept in _candidates(request, known):
            candidate, changed = self._as_generated(candidate, on_memory)
            matched = self._lookup.matched_bytes(changed, on_memory=on_memory)
            if matched >= max(without + LEAST_GAIN, self._least(changed)):
                return candidate, replace(changed, removed=(*changed.removed, *((each, without) for each in kept)))
        return request, rendering

    def _as_generated(self, request: GenerationRequest, on_memory: OnMemory) -> tuple[GenerationRequest, Rendering]:
        rendering, opening = self._renderer.render(request), self._renderer.opening_of
        changed = self._lookup.as_generated(request, rendering, opening, on_memory=on_memory)
        return changed, rendering if changed is request else self._renderer.render(changed)

    def _least(self, changed: Rendering) -> float:
        """Return how far stored text has to continue a request with its preamble, in bytes of the prompt."""
        if changed.request.agent is None:
            return self._renderer.before_newest(changed)
        return self._renderer.first_reply(changed)[0]


def _candidates(request: GenerationRequest, known: Preamble) -> Iterator[tuple[GenerationRequest, tuple[Removed, ...]]]:
    """Yield a named agent's request with its tools, then any with its system text, too; each with what to report."""
    tools = Removed(COMPACTION, None, names_of(known.tools), "", Place(None, None))
    if request.agent is not None:
        yield replace(request, tools=known.tools), (tools,)
    messages = request.messages or ()
    leading = [*takewhile(lambda message: message.role == "system", messages)]
    sent = tuple(message.content for message in leading)
    if sent == known.system or len(sent) != len(known.system) or messages[-1].role != "user":
        return
    own = [replace(message, content=text) for message, text in zip(leading, known.system, strict=True)]
    newest = replace(messages[-1], content=BETWEEN.join((*sent, messages[-1].content)))
    changed = with_messages(request, (*own, *messages[len(own) : -1], newest))
    moved = (Removed(COMPACTION, at, text, "", Place(None, None)) for at, text in enumerate(sent))
    yield replace(changed, tools=known.tools), (tools, *moved)
