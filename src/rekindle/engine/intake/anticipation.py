"""Anticipation: prepare the beginning of an agent's next prompt in idle time, while its caller still reads the reply.

After a turn the history is rendered once more with the reply as its caller will send it back. Where the template then
renders something other than was generated (reasoning dropped, tools moved, contents trimmed), the difference is
computed ahead, as idle work that remembers no branch: the next prompt is matched with the same branch, keeps the same
ids of it and encodes the same text after them, so its blocks are found by their hashes.

After a summary of the agent's history that history has ended. If its client has put a summary into a new history
before, the next one is expected in the same form; its system text and tools are those that the summary's prompt has.

Owned by the intake thread, except `expect` and `num_pending`. Only the last turn of each agent counts; a new request of
the agent, or forgetting the agent, cancels it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Values
from dataclasses import replace
from itertools import pairwise

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.cache.blocks.table import BlockTable
from rekindle.engine.core.background import IdleWork
from rekindle.engine.memory.memory import AgentMemory
from rekindle.engine.request import FinishedTurn, Request
from rekindle.engine.sequence import Sequence
from rekindle.engine.types import GenerationRequest
from rekindle.matching.matcher import prompt_ids
from rekindle.text.messages import Message
from rekindle.text.places import Probes, anticipated, likely_probes
from rekindle.text.prompt import PromptEncoder, RenderedPrompt
from rekindle.text.replies import ParsedReply, ReplyFormat, ReplyStream

MOST_PENDING = 32


class Anticipation:
    """Ended turns, until they become idle work, which is passed to `submit`. Nothing is done unless `enabled`.

    Prompts that fill `max_context` tokens are skipped: there is no room for a reply. Nothing is started while the
    engine `is_busy`: the work could not run, and rendering would take the interpreter from active requests.

    `settled` returns a request with messages and tools as they are rendered.
    """

    def __init__(
        self,
        *,
        encoder: PromptEncoder,
        memory: AgentMemory,
        form: ReplyFormat,
        new_table: Callable[[], BlockTable],
        root: Callable[[str], BlockHash],
        submit: Callable[[IdleWork], None],
        max_context: int,
        settled: Callable[[GenerationRequest], GenerationRequest] = lambda request: request,
        is_busy: Callable[[], bool] = lambda: False,
        enabled: bool = True,
    ) -> None:
        self._settled = settled
        self._encoder = encoder
        self._memory = memory
        self._form = form
        self._max_context = max_context
        self._is_busy = is_busy
        self._enabled = enabled
        self._new_table = new_table
        self._root = root
        self._submit = submit
        self._turns: OrderedDict[tuple[str, str], FinishedTurn] = OrderedDict()
        self._num_pending = 0
        self._lock = threading.Lock()

    @property
    def num_pending(self) -> int:
        """Ended turns that are not idle work yet. Any thread."""
        return self._num_pending

    @property
    def has_turns(self) -> bool:
        """Whether `work` has something to do once the engine is idle."""
        return bool(self._turns)

    def expect(self, turn: FinishedTurn) -> None:
        """Count a turn that will be passed to `ended`. Any thread."""
        if self._enabled and turn.request is not None and turn.request.anticipates:
            with self._lock:
                self._num_pending += 1

    def _settle(self) -> None:
        with self._lock:
            self._num_pending -= 1

    def ended(self, turn: FinishedTurn) -> None:
        """Add a remembered turn, in place of an earlier one of its agent."""
        if not self._enabled or turn.request is None:
            return
        self.cancel(turn.namespace, turn.agent)
        if turn.compacts and turn.request.messages is not None:
            summary = self._summary(turn, turn.request)
            self._memory.summaries.asked(turn.namespace, turn.agent, turn.request.messages, summary)
        if not turn.request.anticipates:
            return
        self._turns[turn.namespace, turn.agent] = turn
        while len(self._turns) > MOST_PENDING:
            self._turns.popitem(last=False)
            self._settle()

    def began(self, request: Request) -> None:
        """Note that an agent has sent a request: its last turn no longer counts."""
        self.cancel(request.namespace, request.agent)
        original = request.original
        if original is not None and original.messages and original.tools and not request.compacts:
            self._memory.summaries.began(request.namespace, request.agent, original.messages)

    def cancel(self, namespace: str, agent: str) -> None:
        """Drop the last turn of an agent that has sent a new request, or is forgotten."""
        if self._turns.pop((namespace, agent), None) is not None:
            self._settle()

    def work(self) -> bool:
        """Turn the turn that ended last into idle work; False when there is none, or the engine is busy."""
        if not self._turns or self._is_busy():
            return False
        _, turn = self._turns.popitem()
        try:
            works = [self._idle_work(turn, request, rendered) for request, rendered in self._next_prompts(turn)]
            works = [work for work in works if work.sequence.num_prompt < self._max_context]
            for work, follower in pairwise(works):
                work.followed_by = follower
            if works:
                self._submit(works[0])
        finally:
            self._settle()
        return True

    def _next_prompts(self, turn: FinishedTurn) -> Iterator[tuple[GenerationRequest, RenderedPrompt]]:
        """Yield what the next prompt may begin with, the likeliest first; nothing if it cannot be known."""
        request = turn.request
        if request is None or request.messages is None or not self._memory.book.of(turn.namespace, turn.agent):
            return
        if turn.compacts:
            summary, memory = self._summary(turn, request), self._memory.summaries
            begun = memory.next_history(turn.namespace, turn.agent, request.messages, summary)
            if begun is not None:
                yield from self._common(request, begun, "more")
                return
        reply = self.sent_back(request, turn.text, turn.opening)
        settled = self._settled(replace(request, messages=(*request.messages, reply)))
        assert settled.messages is not None
        before = b""
        for probes in likely_probes(settled.messages):
            for _, rendered in self._common(settled, settled.messages, probes):
                if not before.startswith(rendered.key):
                    before = rendered.key
                    yield request, rendered

    def _common(
        self, request: GenerationRequest, messages: Values[Message], probes: Probes
    ) -> Iterator[tuple[GenerationRequest, RenderedPrompt]]:
        """Yield what prompts that continue these messages have in common, if anything."""
        kwargs = request.template_kwargs
        rendered = anticipated(self._encoder, messages, request.tools, template_kwargs=kwargs, probes=probes)
        if rendered is not None:
            yield request, rendered

    def _summary(self, turn: FinishedTurn, request: GenerationRequest) -> str:
        """Return the text of a reply in which no calls were read."""
        return self.sent_back(replace(request, tools=None), turn.text, turn.opening).content

    def _idle_work(self, turn: FinishedTurn, request: GenerationRequest, rendered: RenderedPrompt) -> IdleWork:
        """Build the idle work that computes an anticipated prompt."""
        if request.agent is not None:
            self._memory.know_agent(request.namespace, request.agent)
        mode = request.reuse if request.reuse != "off" else None
        match = self._memory.matcher.match(request.namespace, request.agent, rendered, mode)
        ids, _ = prompt_ids(self._encoder, match, rendered)
        sequence = Sequence(
            root=self._root(turn.namespace),
            prompt_ids=ids,
            table=self._new_table(),
            reuse=match.mode,
            task="idle",
            pictures=self._encoder.placed(ids, request.pictures),
        )
        return IdleWork(turn.namespace, turn.agent, sequence)

    def sent_back(self, request: GenerationRequest, text: str, opening: str) -> Message:
        """Return the reply as its caller will send it back with the history."""
        if not request.structured:
            return Message("assistant", request.reply_prefix + text)
        parsed, stream = ParsedReply(), ReplyStream(self._form, tools=request.tools or (), opening=opening)
        for event in [*stream.push(text), *stream.finish()]:
            parsed.take(event)
        message = parsed.message()
        if request.reply_prefix and not message.tool_calls:
            message = replace(message, content=request.reply_prefix + message.content)
        return message if _echoes_reasoning(request) else replace(message, reasoning=None)

    def check(self) -> None:
        """Assert that turns are bounded, and all counted. On the intake thread."""
        assert len(self._turns) <= MOST_PENDING, f"{len(self._turns)} turns wait"
        assert len(self._turns) <= self._num_pending, f"{len(self._turns)} turns wait, {self._num_pending} are counted"


def _echoes_reasoning(request: GenerationRequest) -> bool:
    """Whether the caller sends reasoning back: as declared in the request, else as seen in its messages."""
    if request.echoes_thoughts is not None:
        return request.echoes_thoughts
    return any(message.reasoning is not None for message in request.messages or ())
