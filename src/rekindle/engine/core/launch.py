"""A step under way, and the rows of the one that may be launched before it was waited for.

While a device computes, the host delivers what the step before gave. The step ahead takes its ids from what the device
itself has drawn, so that a reply has ended is known one step late: its row in the step ahead is left aside, and its
blocks are released only when that step has ended, so nothing is written to blocks that are somebody else's by then.

A step is launched ahead where all that runs was in the one under way and draws from it, and where neither how the next
token is drawn nor where it is stored depends on which token this one is. Else steps are computed in turn:

    a grammar, penalties and the like   the next token is drawn by the one before
    prompts, requests that wait         what the next step has is not known yet
    drafts                              they follow from the last token
    a shortage of blocks                somebody is preempted
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rekindle.engine.core.sampling import Pick
from rekindle.engine.core.scheduler import Chunk
from rekindle.engine.request import Request, State
from rekindle.model.drawing import Drawing
from rekindle.model.loaded import Step


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A step under way: of each chunk the rows of its logits, and the first token that is drawn after it, by index.

    `began`: when it was launched, on the core's clock.
    """

    chunks: Sequence[Chunk]
    step: Step
    rows: Sequence[range]
    picks: Mapping[int, Pick]
    began: float

    @property
    def left(self) -> list[Chunk]:
        """The chunks whose request has not ended since it was launched."""
        return [chunk for chunk in self.chunks if not has_ended(chunk)]

    @property
    def drawing(self) -> Drawing | None:
        """What all chunks draw from together; None if one draws nothing, or on its own."""
        found = [pick.drawing for pick in self.picks.values()]
        if len(found) < len(self.chunks) or any(drawing is not found[0] for drawing in found):
            return None
        return found[0] if isinstance(found[0], Drawing) else None


def has_ended(chunk: Chunk) -> bool:
    """Whether the request of a chunk has ended, or gave up its blocks."""
    return chunk.request is not None and chunk.request.state is not State.RUNNING


def chunks_after(launch: Launch, running: Sequence[Request]) -> dict[int, Chunk]:
    """The chunks that follow those of a step under way, by their number there; none if they have to wait for it."""
    requests = [chunk.request for chunk in launch.chunks if chunk.request is not None]
    if launch.drawing is None or len(requests) != len(running) or not all(map(_is_free, requests)):
        return {}
    if any(chunk.draft or chunk.num_scored for chunk in launch.chunks):
        return {}
    return {
        index: Chunk(chunk.sequence, chunk.end, 1, chunk.request)
        for index, chunk in enumerate(launch.chunks)
        if chunk.sequence.num_generated + 1 < chunk.sequence.max_new_tokens
    }


def _is_free(request: Request) -> bool:
    """Whether its next token can be drawn without knowing the one before."""
    return request.state is State.RUNNING and request.reply.matcher is None and not request.reply.sampler.needs_history
