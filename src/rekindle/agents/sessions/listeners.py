"""Taking in what others say, before it is one's turn to speak.

    somebody speaks ──▶ whoever speaks next absorbs the words said so far, every few tokens, one piece at a time
    the next speaks ──▶ the others take the words in for good, a few at a time, the one who speaks soonest first

Owns who is behind with what it heard, and what was computed for whom. What is absorbed lies in memory only, until a
turn stands on it; what is taken in is durable like a turn. Both are prompts with an open end, so whatever is said next
goes on from them. A failure costs nothing but time: it is logged and counted, and the turn computes what is missing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal

from rekindle.agents.machine.types import Entry
from rekindle.engine.api import Engine
from rekindle.engine.generation import Generation
from rekindle.engine.types import GenerationRequest
from rekindle.errors import Cancelled, RekindleError
from rekindle.text.messages import Message

logger = logging.getLogger(__name__)
MOST_AT_ONCE = 4  # more would keep the intake from preparing the next turn
PIECE_TOKENS = 8  # said since the last piece was absorbed; a step for fewer costs as much


class Listening:
    """The listeners of one session. `prompt` renders what a participant has heard, `agent` names its memory.

    `owner` gives the session, which stays in memory as long as somebody takes something in.

    For one event loop. Every participant begins behind.
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
        self.num_tokens: dict[str, int] = {}  # of the prompt that was taken in last
        self.num_failed = 0
        self._engine = engine
        self._namespace = namespace
        self._prompt = prompt
        self._agent = agent
        self._owner = owner
        self.behind: dict[str, None] = {}  # who has heard what it has not taken in
        self.busy: dict[str, Generation] = {}  # who takes in
        self._absorbing: Generation | None = None
        self._num_absorbed = -PIECE_TOKENS  # said when the last piece began
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = False
        self._skipped: frozenset[str] = frozenset()

    @property
    def is_idle(self) -> bool:
        """Whether nobody is taking anything in."""
        return not self._tasks

    def heard(self, names: Iterable[str]) -> None:
        """There is something new for these."""
        for name in names:
            self.behind[name] = None

    def hold(self) -> None:
        """Begin nothing new, and break off what was begun: somebody's turn begins, and nothing is to be in its way.

        What was computed stays. Who was taking in is behind again, and goes on from there.
        """
        self._is_open = False
        self._num_absorbed = -PIECE_TOKENS
        if self._absorbing is not None:
            self._absorbing.cancel()
        self.behind = {name: None for name, each in self.busy.items() if not each.cancel_asked} | self.behind
        for generation in self.busy.values():
            generation.cancel()

    def begins(self, name: str) -> int:
        """It is to speak, and takes in the rest with its turn; the tokens computed for it since its last one."""
        self.behind.pop(name, None)
        return self.computed.pop(name, 0)

    def catch_up(self, order: Iterable[str], *, but: Iterable[str] = ()) -> None:
        """Let those who are behind take in what they have heard, in this order; some wait for a later time."""
        self._is_open = True
        self._skipped = frozenset(but)
        self.behind = {name: None for name in order if name in self.behind} | self.behind
        self._begin_more()

    def _begin_more(self) -> None:
        waiting = [name for name in self.behind if name not in self._skipped and name not in self.busy]
        for name in waiting[: MOST_AT_ONCE - len(self.busy) if self._is_open else 0]:
            del self.behind[name]
            try:
                generation = self._submit(name, None, "prefill")
            except RekindleError as error:
                self._failed(name, error)
                continue
            self.busy[name] = generation
            self._follow(name, generation)

    def is_due(self, name: str, num_said: int) -> bool:
        """Whether it may absorb a piece, and there is enough for one, when `num_said` tokens are said."""
        is_free = self._absorbing is None and name not in self.busy
        return is_free and num_said >= self._num_absorbed + PIECE_TOKENS

    def overhear(self, name: str, partial: Entry | None, num_said: int) -> None:
        """Have `name` absorb what it has heard, and what is being said, of which there are `num_said` tokens.

        Nothing happens while it is at it, or where too little is new.
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
                waits_aside=True,  # there are few, and nobody who asks for something is to be refused for them
            )
        )

    def _follow(self, name: str, generation: Generation) -> None:
        task = asyncio.create_task(self._await(name, generation, self._owner()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _await(self, name: str, generation: Generation, owner: object) -> None:
        """Take the result in; `owner` stays in memory until then."""
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
        logger.warning("%s could not take in what was said: %s", self._agent(name), error)

    async def settle(self) -> None:
        """Wait until nothing is being taken in, and whoever may is no longer behind."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def stop(self) -> None:
        """Stop taking in; what had begun has ended when this returns."""
        self.hold()
        self.behind.clear()
        await self.settle()

    def check(self) -> None:
        """Assert that no more is being taken in than may be, and that each of it is waited for."""
        assert len(self.busy) <= MOST_AT_ONCE, self.busy
        assert len(self.busy) + (self._absorbing is not None) <= len(self._tasks), self._tasks
