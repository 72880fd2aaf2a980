"""The public engine: start it, chat with agents, look at what they remember. No server needed.

    with Engine.from_pretrained() as engine:
        reply = engine.chat("ada", [{"role": "user", "content": "Hello!"}])
        print(reply.text, reply.report.outcome)

Owns the lifetime of everything below it. Every method may be called from any thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Self

from rekindle.config import Settings
from rekindle.engine.assembly import Assembly, assemble
from rekindle.engine.branches import Branch
from rekindle.engine.core import EngineCore
from rekindle.engine.generation import Generation
from rekindle.engine.types import AgentInfo, ChatResult, Delta, EngineStats, GenerationRequest, Reuse
from rekindle.errors import NotFound, RekindleError
from rekindle.model.sampler import SamplingParams
from rekindle.spec import ModelSpec
from rekindle.text.messages import normalise_messages

Messages = Sequence[Mapping[str, Any]]


class Engine:
    """A model with agents that remember. Made with settings, loaded by `start`, ended by `close`."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self._parts: Assembly | None = None

    @classmethod
    def from_pretrained(cls, model: str | None = None, **settings: Any) -> Engine:
        """Load a model (None: the bundled one) with settings named as the flags are, and start; raises ModelRefused."""
        engine = cls(Settings.load({"model": model, **settings}))
        engine.start()
        return engine

    def start(self) -> None:
        """Load the model, open the store, start the threads. Starting twice is an error."""
        if self._parts is not None:
            raise RekindleError("this engine has been started already")
        parts = assemble(self.settings)
        parts.start()
        self._parts = parts

    def close(self) -> None:
        """Stop working, make every finished turn durable, let go of the store. Closing twice is safe."""
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.close()

    def __enter__(self) -> Self:
        if self._parts is None:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _running(self) -> Assembly:
        if self._parts is None:
            raise RekindleError("the engine is not running: call start() first")
        return self._parts

    @property
    def spec(self) -> ModelSpec:
        """The model's sizes and KV layout."""
        return self._running.spec

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know about how this model is served, one sentence each."""
        return self._running.notes

    @property
    def promise(self) -> str:
        """`bitwise` where every path gives the same bits on this machine, else `close`."""
        return self._running.promise

    @property
    def num_warm_agents(self) -> int:
        """Named agents that were found in the store at start."""
        return self._running.num_warm_agents

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer that one request may have."""
        return self._running.max_context

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request; errors in it arrive through the generation."""
        generation = Generation()
        self._running.intake.submit(request, generation)
        return generation

    def stream(
        self,
        agent: str | None,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reuse: Reuse | None = None,
        namespace: str = "default",
        **params: Any,
    ) -> Generation:
        """Chat as `agent`; iterate the result with `for` or `async for`. `params` are those of `SamplingParams`."""
        return self.submit(
            GenerationRequest(
                messages=normalise_messages(messages),
                agent=agent,
                namespace=namespace,
                tools=tools,
                params=SamplingParams(**params),
                reuse=reuse,
            )
        )

    def chat(self, agent: str | None, messages: Messages, **options: Any) -> ChatResult:
        """The whole reply to `messages`, with options as in `stream`."""
        return self.stream(agent, messages, **options).result()

    async def achat(self, agent: str | None, messages: Messages, **options: Any) -> ChatResult:
        """As `chat`, without blocking the event loop; cancelling the task cancels the work."""
        generation = self.stream(agent, messages, **options)
        try:
            return await generation.aresult()
        finally:
            generation.cancel()

    async def astream(self, agent: str | None, messages: Messages, **options: Any) -> AsyncIterator[Delta]:
        """Deltas of the reply; leaving the loop early cancels the work."""
        generation = self.stream(agent, messages, **options)
        try:
            async for delta in generation:
                yield delta
        finally:
            generation.cancel()

    def fork(self, source: str, target: str, *, namespace: str = "default") -> None:
        """Give `target` everything `source` remembers; no KV is copied."""
        memory = self._running.memory
        self._running.intake.call(lambda: memory.fork(namespace, source, target)).result()

    def rewind(self, agent: str, turns: int = 1, *, namespace: str = "default") -> int:
        """Take back an agent's last turns; return how many tokens it still remembers."""
        memory = self._running.memory
        return self._running.intake.call(lambda: memory.rewind(namespace, agent, turns)).result()

    def agents(self, namespace: str | None = None) -> list[AgentInfo]:
        """Every named agent, most recently used first."""
        book = self._running.memory.book
        return self._infos(lambda: [book.of(space, name) for space, name in book.agents(namespace)])

    def agent(self, agent: str, *, namespace: str = "default") -> AgentInfo:
        """One agent's memory; raises NotFound."""
        book = self._running.memory.book
        found = self._infos(lambda: [book.of(namespace, agent)])
        if not found:
            raise NotFound(f"no agent {agent!r}", param="agent")
        return found[0]

    def _infos(self, ask: Callable[[], list[list[Branch]]]) -> list[AgentInfo]:
        """One question to the intake and one to the engine, however many agents there are."""
        parts = self._running
        agents = [branches for branches in parts.intake.call(ask).result() if branches]
        longest = [max(branches, key=lambda branch: branch.num_tokens) for branches in agents]
        hot = parts.loop.call(lambda core: [_hot_tokens(core, branch) for branch in longest]).result()
        found = [
            AgentInfo(
                namespace=branch.namespace,
                agent=branch.agent,
                branches=len(branches),
                num_tokens=branch.num_tokens,
                saved_tokens=branch.saved_tokens,
                hot_tokens=num_hot,
                warm_tokens=max(0, branch.saved_tokens - num_hot),
                last_use=max(each.last_use for each in branches),
            )
            for branches, branch, num_hot in zip(agents, longest, hot, strict=True)
        ]
        return sorted(found, key=lambda info: -info.last_use)

    def evict(self, agent: str, *, namespace: str = "default") -> int:
        """Make an agent durable and drop its blocks from memory, as far as nobody shares them; return how many."""
        parts = self._running
        self.flush()
        branches = parts.intake.call(lambda: parts.memory.know_agent(namespace, agent)).result()
        if not branches:
            raise NotFound(f"no agent {agent!r}", param="agent")
        return parts.loop.call(lambda core: _evict(core, branches)).result()

    def delete(self, agent: str, *, namespace: str = "default") -> None:
        """Forget an agent on every tier; blocks that others stand on stay theirs."""
        parts = self._running
        branches, order = parts.intake.call(lambda: parts.memory.delete(namespace, agent)).result()
        parts.loop.call(lambda core: _evict(core, branches)).result()
        self.flush()
        error = order.done.exception() if order.done.done() else None
        if error is not None:
            parts.intake.call(lambda: parts.memory.restore(branches)).result()
            raise error

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until every finished turn is durable; False if that took longer than `timeout_s`."""
        return self._running.flush(timeout_s)

    def stats(self) -> EngineStats:
        """Counters and gauges of this moment."""
        return self._running.stats()

    def check(self) -> None:
        """Assert every invariant of pool, queues and store."""
        self._running.check()


def _hot_tokens(core: EngineCore, branch: Branch) -> int:
    if branch.ids is None or branch.names is None:
        return 0
    return core.cache.num_hot_tokens(branch.root, branch.ids, branch.names)


def _evict(core: EngineCore, branches: Sequence[Branch]) -> int:
    return sum(
        core.cache.evict_chain(branch.root, branch.ids, branch.names)
        for branch in branches
        if branch.ids is not None and branch.names is not None
    )
