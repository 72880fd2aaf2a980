"""Requests as prompts: normalised, rendered, continued by the reply's prefix.

Owns what the model reads of a request, and where the caller's breakpoints are in it. Knows no branches and no KV.
Immutable: any thread may use it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from rekindle.engine.types import GenerationRequest
from rekindle.text.messages import Message
from rekindle.text.normalise import Normal, Removed, normalise
from rekindle.text.omissions import with_unread_calls, with_unread_variables
from rekindle.text.places import Place, Probes, anticipated, positions
from rekindle.text.prompt import PromptEncoder, RenderedPrompt
from rekindle.text.replies import ReplyFormat, begin_reply

EMPTY = RenderedPrompt(b"")
MOST_REPORTED = 64  # removed parts of a prompt, in its order: a report is kept, and a prompt may have thousands


@dataclass(frozen=True, slots=True)
class Rendering:
    """A prompt, and what is known of its text (nothing for ids); byte offsets are into its key.

    `request` has messages and tools as they were rendered, `as_sent` has the caller's indices. `removed` pairs the
    first removed texts with their byte offsets; `breakpoints` are the offsets of the caller's breakpoints, in its
    order. `opening` is what the prompt has begun of the reply, as structured text.
    """

    request: GenerationRequest
    prompt: RenderedPrompt = EMPTY
    opening: str = ""
    removed: tuple[tuple[Removed, int], ...] = ()
    breakpoints: tuple[int, ...] = ()
    normal: Normal | None = None

    @property
    def as_sent(self) -> Sequence[Message] | None:
        """The messages as the caller counts them; those that were removed whole are empty."""
        return self.request.messages if self.normal is None else self.normal.as_sent


class Renderer:
    """Renders requests for one model. Prompts made of messages are normalised by `kinds`.

    `headings`: how lines begin from which on system texts are volatile, in addition to those of known clients.
    """

    def __init__(
        self, encoder: PromptEncoder, form: ReplyFormat, kinds: Set[str], *, headings: Sequence[str] = ()
    ) -> None:
        self._encoder = encoder
        self.form = form
        self.kinds = kinds
        self._headings = tuple(headings)

    def with_headings(self, headings: Sequence[str]) -> Renderer:
        """Return a renderer that knows these headings, too."""
        return Renderer(self._encoder, self.form, self.kinds, headings=(*self._headings, *headings))

    def _normal(self, request: GenerationRequest) -> Normal:
        return normalise(request.messages or (), request.tools, self.kinds, headings=self._headings)

    def opening_of(self, name: str) -> bytes | None:
        """Return how calls of a tool begin in a prompt's key, up to their arguments; None if that is not known."""
        opening = self.form.opening(name)
        return None if not opening else self._encoder.continued(EMPTY, opening).key

    def settled(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with messages and tools as they are rendered, but each text where it was sent;
        idempotent."""
        if request.messages is None:
            return request
        normal = normalise(request.messages, request.tools, self.kinds - {"tail"})
        return replace(request, messages=normal.messages, tools=normal.tools)

    def render(self, request: GenerationRequest) -> Rendering:
        """Render a request of messages or text; BadRequest if the template refuses it, PromptTooLong if it cannot
        fit."""
        if request.messages is None:
            assert request.text is not None, "ids are run as they are"
            return self._continued(Rendering(request, self._encoder.render_text(request.text)))
        self._check_length(request)
        normal = self._normal(request)
        settled = replace(request, messages=normal.messages, tools=normal.tools)
        common = self._common(settled) if request.task in ("prefill", "absorb") else None
        prompt = common or self._encoder.render_chat(normal.messages, normal.tools, **request.template_kwargs)
        omitted = with_unread_variables(request.omitted, request.template_params, self._encoder.template.variables)
        settled = replace(settled, omitted=with_unread_calls(omitted, prompt.num_unread))
        reported = normal.removed[:MOST_REPORTED]
        marks = [normal.place(Place(each.message_index, each.num_chars)) for each in request.breakpoints]
        places, at = [*marks, *(each.place for each in reported)], list[int]()
        if places:
            kwargs = request.template_kwargs
            at = positions(self._encoder, prompt, normal.messages, normal.tools, places, **kwargs)
        removed = tuple(zip(reported, at[len(marks) :], strict=True))
        return self._continued(Rendering(settled, prompt, "", removed, tuple(at[: len(marks)]), normal))

    def first_reply(self, rendering: Rendering) -> tuple[float, float]:
        """Return where what comes before the first reply of a history ends in the prompt, and where the reply does;
        infinity: there is none.

        The reply may be written otherwise than it was: templates drop its reasoning after the next user message.
        """
        messages = rendering.request.messages or ()
        at = next((at for at, message in enumerate(messages) if message.role == "assistant"), None)
        if not at:
            return math.inf, math.inf
        before, end = self._encoder.message_ends(rendering.prompt, messages[: at + 1])[-2:]
        return before, end

    def before_newest(self, rendering: Rendering) -> int:
        """Return where what comes before the newest message of a history ends in the prompt."""
        return self._encoder.message_ends(rendering.prompt, (rendering.request.messages or ())[:-1])[-1]

    def _check_length(self, request: GenerationRequest) -> None:
        """Raise PromptTooLong before rendering what cannot fit."""
        if self._encoder.bound is not None:
            self._encoder.bound.check_messages(request.messages or (), request.tools)
            self._encoder.bound.check_sent(len(request.reply_prefix))

    def _continued(self, rendering: Rendering) -> Rendering:
        """Append the reply's prefix to the prompt, closing reasoning that the prompt has opened."""
        request = rendering.request
        if request.task != "generate":
            return rendering
        prompt, opening = begin_reply(self.form, self._encoder, prompt=rendering.prompt, prefix=request.reply_prefix)
        if self._encoder.bound is not None:
            self._encoder.bound.check(len(prompt.key))
        return replace(rendering, prompt=prompt, opening=opening)

    def _common(self, settled: GenerationRequest) -> RenderedPrompt | None:
        """Return what all prompts that continue a history have in common, if no reply can follow it or its end is
        open."""
        last: Message | None = settled.messages[-1] if settled.messages else None
        if last is None or (last.role in ("user", "tool") and not settled.open_end):
            return None
        ids = [call.id for call in last.tool_calls if call.id is not None]
        probes: Probes = "tool" if last.tool_calls else "user"
        if settled.open_end:
            probes = "more"
        return anticipated(
            self._encoder,
            settled.messages or (),
            settled.tools,
            template_kwargs=settled.template_kwargs,
            probes=probes,
            call_ids=ids if len(ids) == len(last.tool_calls) else (),
        )
