"""What clients change in a history when they send it again is put back, so that the prompt continues as stored.

One rule for all of it: render a candidate, match it, keep it if stored text continues far enough then; otherwise it may
be another conversation's. In this order, each over what the one before it gave:

    preamble    A request for a summary comes without the agent's tools, some with another system text. Candidates have
                the agent's. Kept if stored text continues to the end of what came before the first reply; without a
                name to the newest message, as its user may have begun the same with and without tools. A system text
                that was sent in place of the agent's moves to the head of the newest user message, where the model
                reads it as late as it can.
    tails       Changing tails of the system text. The candidate has them where stored text has them. Kept if that
                continues to the end of the first reply.
    arguments   Calls whose arguments are the same JSON values, written otherwise. The candidate has them as they were
                generated; they mean the same, so it is kept as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile

from rekindle.engine.intake.prompt_lookup import PromptLookup
from rekindle.engine.intake.rendering import Renderer, Rendering, with_messages
from rekindle.engine.memory.memory import OnMemory
from rekindle.engine.memory.preambles import Preamble, names_of
from rekindle.engine.types import GenerationRequest
from rekindle.matching.earlier_tails import with_earlier_tails
from rekindle.matching.generated_arguments import with_generated_arguments
from rekindle.text.normalise import Removed
from rekindle.text.places import Place
from rekindle.text.prompt import PromptEncoder

COMPACTION, TAIL = "compaction", "tail"  # kinds of normalisation
BETWEEN = "\n\n"  # a system text and the words that it is put before
LEAST_GAIN = 256  # bytes of stored text; less is not worth another prompt than was sent
Rewritten = tuple[GenerationRequest, Rendering]


class Rewrites:
    """Recognises what clients change by the stored text that a request continues without the change."""

    def __init__(self, encoder: PromptEncoder, renderer: Renderer, lookup: PromptLookup) -> None:
        self._encoder = encoder
        self._renderer = renderer
        self._lookup = lookup

    def rendered(self, request: GenerationRequest, on_memory: OnMemory) -> Rewritten:
        """Return a request with what was put back, and its rendering."""
        request, rendering = self._with_preamble(request, self._renderer.render(request), on_memory)
        request = replace(request, tools=rendering.request.tools)
        request, rendering = self._with_earlier_tails(request, rendering, on_memory)
        return self._with_arguments(request, rendering, on_memory)

    def _again(self, request: GenerationRequest, before: Rendering) -> Rendering:
        """Render a request that was changed since it was rendered before."""
        again = self._renderer.render(request)
        kept = (pair for pair in before.removed if pair[0].kind == COMPACTION)
        return replace(again, removed=(*again.removed, *kept))

    def _with_preamble(self, request: GenerationRequest, rendering: Rendering, on_memory: OnMemory) -> Rewritten:
        known = on_memory(lambda: self._lookup.preamble(request)) if COMPACTION in self._renderer.kinds else None
        if known is None:
            return request, rendering
        without, _ = self._lookup.nearest(rendering, on_memory=on_memory)
        for candidate, kept in _candidates(request, known):
            changed, again = self._with_arguments(candidate, self._renderer.render(candidate), on_memory)
            matched, _ = self._lookup.nearest(again, on_memory=on_memory)
            named = again.request.agent is not None
            least = self._renderer.first_reply(again)[0] if named else self._renderer.before_newest(again)
            if matched >= max(without + LEAST_GAIN, least):
                return changed, replace(again, removed=(*again.removed, *((each, without) for each in kept)))
        return request, rendering

    def _with_earlier_tails(self, request: GenerationRequest, rendering: Rendering, on_memory: OnMemory) -> Rewritten:
        if not any(each.kind == TAIL for each, _ in rendering.removed) or self._lookup.is_off(request):
            return request, rendering
        best, (matched, stored) = (request, rendering), self._lookup.nearest(rendering, on_memory=on_memory)
        least = matched + LEAST_GAIN
        while stored:  # with its first tail, a prompt may be nearest to another text, which shows more of them
            changed = with_earlier_tails(request.messages or (), stored, self._encoder.content_key)
            if changed in (request.messages, best[0].messages):
                break
            other = with_messages(request, changed)
            again = self._again(other, rendering)
            most, stored = self._lookup.nearest(again, on_memory=on_memory)
            if most <= matched:
                break
            best, matched = (other, again), most
        return best if matched >= max(least, self._renderer.first_reply(best[1])[1]) else (request, rendering)

    def _with_arguments(self, request: GenerationRequest, rendering: Rendering, on_memory: OnMemory) -> Rewritten:
        messages = rendering.request.messages
        if messages is None or self._lookup.is_off(request) or not any(message.tool_calls for message in messages):
            return request, rendering
        _, stored = self._lookup.nearest(rendering, on_memory=on_memory)
        if not stored:
            return request, rendering
        changed = with_generated_arguments(request.messages or (), stored, self._renderer.opening_of)
        if changed == request.messages:
            return request, rendering
        request = replace(request, messages=changed)
        return request, self._again(request, rendering)


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
