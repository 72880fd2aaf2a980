"""Prefill what listeners hear, before their own turn.

    somebody speaks ──▶ the next speaker absorbs the text so far, every few tokens, one piece at a time
    the next speaks ──▶ the others prefill the finished text, a few at a time, the one who speaks soonest first

Owns which listeners have entries to prefill, and what was computed for each. Absorbed blocks live in memory only, until
a turn builds on them; prefilled ones are durable like a turn. Both are prompts with an open end, so any later text
continues them. A failure costs only time: it is logged and counted, and the turn computes what is missing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal

from rekindle.engine.api import Engine
from rekindle.engine.generation import Generation
from rekindle.engine.types import GenerationRequest
from rekindle.errors import Cancelled, RekindleError
from rekindle.text.messages import Message
from rekindle_sessions.machine.types import Entry

logger = logging.getLogger(__name__)
MOST_AT_ONCE = 4  # more would delay the intake in preparing the next turn
PIECE_TOKENS = 8  # generated since the last absorbed piece; a step for fewer costs as much


class Listening:
    """The listeners of one session. `prompt` renders a participant's context, `agent` returns the id of its memory.

    `owner` returns the session, which stays in memory while anything is being prefilled. For one event loop.
    """

    def __init__(
        self,
        engine: Engine,
        namespace: str,
        *,
        prompt: Callable[[str, Entry | None], tuple[Message, ...]],
        agent: Callable[[str], str],
        owner: Callable[[], object],
    ) -> None:
        self.computed: Counter[str] = Counter()  # tokens, since its last turn
        self.computed_ever: Counter[str] = Counter()
        self.num_tokens: dict[str, int] = {}  # of the last prompt that was prefilled
        self.num_failed = 0
        self._engine = engine
        self._namespace = namespace
        self._prompt = prompt
        self._agent = agent
        self._owner = owner
        self.pending: dict[str, None] = {}  # participants with entries to prefill, in order
        self.busy: dict[str, Generation] = {}  # participants being prefilled
        self._absorbing: Generation | None = None
        self._num_absorbed = -PIECE_TOKENS  # tokens generated when the last piece began
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = False
        self._skipped: frozenset[str] = frozenset()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being prefilled or absorbed."""
        return not self._tasks

    def heard(self, names: Iterable[str]) -> None:
        """Mark participants that have new entries to prefill."""
        for name in names:
            self.pending[name] = None

    def hold(self) -> None:
        """Start nothing new and cancel what is running: a turn begins, and nothing may delay it.

        Computed KV stays. Cancelled participants are pending again, and continue from there.
        """
        self._is_open = False
        self._num_absorbed = -PIECE_TOKENS
        if self._absorbing is not None:
            self._absorbing.cancel()
        self.pending = {name: None for name, each in self.busy.items() if not each.cancel_asked} | self.pending
        for generation in self.busy.values():
            generation.cancel()

    def begins(self, name: str) -> int:
        """Stop tracking a participant that is about to speak; return the tokens computed for it since its last turn."""
        self.pending.pop(name, None)
        return self.computed.pop(name, 0)

    def catch_up(self, order: Iterable[str], *, but: Iterable[str] = ()) -> None:
        """Prefill pending participants in this order; those in `but` wait for a later call."""
        self._is_open = True
        self._skipped = frozenset(but)
        self.pending = {name: None for name in order if name in self.pending} | self.pending
        self._begin_more()

    def _begin_more(self) -> None:
        waiting = [name for name in self.pending if name not in self._skipped and name not in self.busy]
        for name in waiting[: MOST_AT_ONCE - len(self.busy) if self._is_open else 0]:
            del self.pending[name]
            try:
                generation = self._submit(name, None, "prefill")
            except RekindleError as error:
                self._failed(name, error)
                continue
            self.busy[name] = generation
            self._follow(name, generation)

    def is_due(self, name: str, num_said: int) -> bool:
        """Whether `name` is free to absorb, and `num_said` generated tokens are enough for a new piece."""
        is_free = self._absorbing is None and name not in self.busy
        return is_free and num_said >= self._num_absorbed + PIECE_TOKENS

    def overhear(self, name: str, partial: Entry | None, num_said: int) -> None:
        """Have `name` absorb its context and the turn being generated, of which there are `num_said` tokens.

        Does nothing while it is still absorbing, or if too little is new.
        """
        if not self.is_due(name, num_said):
            return
        self._num_absorbed = num_said
        try:
            self._absorbing = self._submit(name, partial, "absorb")
        except RekindleError as error:
            self._failed(name, error)
            return
        self._follow(name, self._absorbing)

    def _submit(self, name: str, partial: Entry | None, task: Literal["absorb", "prefill"]) -> Generation:
        return self._engine.submit(
            GenerationRequest(
                messages=self._prompt(name, partial),
                agent=self._agent(name),
                namespace=self._namespace,
                task=task,
                open_end=True,
                echoes_thoughts=True,
                waits_aside=True,  # there are few, and no client request may be refused because of them
            )
        )

    def _follow(self, name: str, generation: Generation) -> None:
        task = asyncio.create_task(self._await(name, generation, self._owner()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _await(self, name: str, generation: Generation, owner: object) -> None:
        """Wait for the result and record it; holds `owner` in memory until then."""
        try:
            result = await generation.aresult()
            is_whole = result.finish_reason != "cancelled"
            if is_whole:
                self.num_tokens[name] = result.report.prompt_tokens
            measured = result.report if is_whole else generation.progress
            num_computed = 0 if measured is None else measured.computed_tokens
            self.computed[name] += num_computed
            self.computed_ever[name] += num_computed
        except Cancelled:
            logger.debug("%s stopped listening", self._agent(name))
        except RekindleError as error:
            self._failed(name, error)
        finally:
            if self._absorbing is generation:
                self._absorbing = None
            if self.busy.get(name) is generation:
                del self.busy[name]
            self._begin_more()

    def _failed(self, name: str, error: RekindleError) -> None:
        self.num_failed += 1
        logger.warning("%s could not prefill what was said: %s", self._agent(name), error)

    async def settle(self) -> None:
        """Wait until nothing is being prefilled, and none that may be is pending."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def stop(self) -> None:
        """Stop prefilling; everything started has ended when this returns."""
        self.hold()
        self.pending.clear()
        await self.settle()

    def check(self) -> None:
        """Assert that at most MOST_AT_ONCE prefills run, and that each has a task."""
        assert len(self.busy) <= MOST_AT_ONCE, self.busy
        assert len(self.busy) + (self._absorbing is not None) <= len(self._tasks), self._tasks
