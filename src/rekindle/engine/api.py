"""The public engine: start it, chat with agents, look at what they remember. No server needed.

    with Engine.from_pretrained() as engine:
        reply = engine.chat("ada", [{"role": "user", "content": "Hello!"}])
        print(reply.text, reply.report.outcome)

Owns the lifetime of everything below it. Every method may be called from any thread. What is no agent's id (see
`agent_ids`) is a BadRequest in every method that takes one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Self

from rekindle.agent_ids import check_agent_id
from rekindle.config import Settings
from rekindle.engine import upkeep
from rekindle.engine.assembly import Assembly
from rekindle.engine.building import assemble
from rekindle.engine.generation import Generation
from rekindle.engine.types import (
    AgentInfo,
    ChatResult,
    Delta,
    EngineStats,
    GenerationRequest,
    Health,
    PurgeReport,
    Report,
    Reuse,
)
from rekindle.errors import BadRequest, RekindleError
from rekindle.model.params import SamplingParams
from rekindle.spec import ModelSpec
from rekindle.text.messages import normalise_messages
from rekindle.text.prompt import PromptEncoder, RenderedPrompt
from rekindle.text.replies import ReplyFormat
from rekindle.worker import Death

Messages = Sequence[Mapping[str, Any]]


class Engine:
    """A model with agents that remember. Made with settings, loaded by `start`, ended by `close`.

    `clock` tells chat templates the date.
    """

    def __init__(self, settings: Settings | None = None, *, clock: Callable[[], datetime] = datetime.now) -> None:
        self.settings = settings or Settings()
        self._clock = clock
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
        parts = assemble(self.settings, clock=self._clock)
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
    def components(self) -> Assembly:
        """The parts that do the work, as ARCHITECTURE.md names them; RekindleError while the engine does not run."""
        if self._parts is None:
            raise RekindleError("the engine is not running: call start() first")
        return self._parts

    @property
    def spec(self) -> ModelSpec:
        """The model's sizes and KV layout."""
        return self.components.spec

    @property
    def encoder(self) -> PromptEncoder:
        """How text becomes tokens and tokens text; immutable, any thread may use it."""
        return self.components.encoder

    @property
    def reply_format(self) -> ReplyFormat:
        """How replies of this model are written: thoughts, calls, and the control tokens a reader needs."""
        return self.components.reply_format

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know about how this model is served, one sentence each."""
        return self.components.notes

    @property
    def promise(self) -> str:
        """`bitwise` where every path gives the same bits on this machine, else `close`."""
        return self.components.promise

    @property
    def num_warm_agents(self) -> int:
        """Named agents that were found in the store at start."""
        return self.components.num_warm_agents

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer that one request may have."""
        return self.components.max_context

    def render(self, request: GenerationRequest) -> RenderedPrompt:
        """The prompt of messages or text as it would be computed, without matching it; raises BadRequest."""
        return self.components.renderer.render(request).prompt

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request; errors in it arrive through the generation."""
        return self.submit_many(request, 1)[0]

    def submit_many(self, request: GenerationRequest, n: int) -> list[Generation]:
        """Queue `n` replies to one prompt, which is prepared and computed once; errors arrive through each generation.

        Reply i is seeded with the request's seed + i (without one they differ at random), and each becomes a branch of
        the agent. Raises BadRequest for more than an agent may have, and for what is no agent's id.
        """
        for name, agent in (("agent", request.agent), ("parent", request.parent)):
            if agent is not None:
                check_agent_id(agent, where=name)
        most = self.settings.cache.max_branches
        if not 1 <= n <= most:
            raise BadRequest(f"n must be from 1 to {most}, as many replies as an agent keeps", param="n")
        generations = [Generation() for _ in range(n)]
        deaths = self.components.deaths()
        if not deaths:
            self.components.intake.submit(request, generations)
        for generation in generations if deaths else ():
            generation.put(deaths[0].error())
        return generations

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

    def warming(
        self,
        agent: str,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        namespace: str = "default",
        open_end: bool = False,
    ) -> Generation:
        """Compute and remember a prompt as the agent's; the generation ends without a reply when that is done.

        Messages that end with a user's words or a tool's result are what is asked next, unless with an `open_end` more
        words may follow in the last one; of others, a system prompt for instance, what all prompts that continue them
        have in common is computed. Raises as `chat` does.
        """
        asked = GenerationRequest(
            messages=normalise_messages(messages),
            agent=agent,
            namespace=namespace,
            tools=tools,
            template_kwargs=template_kwargs or {},
            task="prefill",
            open_end=open_end,
        )
        return self.submit(asked)

    def warm(self, agent: str, messages: Messages, **options: Any) -> Report:
        """Wait until a prompt is computed and remembered, with options as in `warming`; return what was there."""
        return self.warming(agent, messages, **options).result().report

    def prefetch(self, agent: str, *, namespace: str = "default") -> Report:
        """Bring what is stored of the branch used last into memory, as far as it has room; compute nothing.

        `computed_tokens` of the report is what would have to be computed. Raises NotFound.
        """
        ids = upkeep.latest_ids(self.components, namespace, check_agent_id(agent, where="agent"))
        asked = GenerationRequest(token_ids=ids, agent=agent, namespace=namespace, task="load")
        return self.submit(asked).result().report

    def fork(self, source: str, target: str, *, namespace: str = "default") -> None:
        """Give `target` everything `source` remembers; no KV is copied. Durable when this returns.

        Raises NotFound, BadRequest where `target` has a memory, and StoreError, after which it has none.
        """
        check_agent_id(source, where="source")
        upkeep.fork(self.components, namespace, source, check_agent_id(target, where="target"))

    def rewind(self, agent: str, turns: int = 1, *, namespace: str = "default") -> int:
        """Take back an agent's last turns, durably; return how many tokens it still remembers.

        Raises NotFound, BadRequest where it has fewer turns, and StoreError, after which it remembers all of them.
        """
        return upkeep.rewind(self.components, namespace, check_agent_id(agent, where="agent"), turns)

    def agents(self, namespace: str | None = None) -> list[AgentInfo]:
        """Every named agent, most recently used first."""
        book = self.components.memory.book
        return upkeep.infos(self.components, lambda: [book.of(space, name) for space, name in book.agents(namespace)])

    def agent(self, agent: str, *, namespace: str = "default") -> AgentInfo:
        """One agent's memory, with its branches; raises NotFound."""
        return upkeep.info(self.components, namespace, check_agent_id(agent, where="agent"))

    def evict(self, agent: str, *, namespace: str = "default") -> int:
        """Make an agent durable and drop its blocks from memory, as far as nobody shares them; return how many.

        Raises NotFound, and StoreError where not all of it can be saved: nothing leaves memory then.
        """
        return upkeep.evict(self.components, namespace, check_agent_id(agent, where="agent"))

    def delete(self, agent: str, *, namespace: str = "default") -> None:
        """Forget an agent on every tier; blocks that others stand on stay theirs. StoreError if the disk refuses."""
        upkeep.delete(self.components, namespace, check_agent_id(agent, where="agent"))

    def purge(self, agent: str, *, namespace: str = "default") -> PurgeReport:
        """Forget an agent and overwrite its KV in memory and on disk; the disk is read back as proof.

        Blocks that others stand on stay theirs. A request of the agent that runs meanwhile goes on, and what it leaves
        is the beginning of the agent's new memory: purge again after it. Raises NotFound, StoreError.
        """
        return upkeep.purge(self.components, namespace, check_agent_id(agent, where="agent"))

    def pin(self, agent: str, *, ttl_s: float | None = None, namespace: str = "default") -> None:
        """Keep an agent from being forgotten by age or for room on disk, for `ttl_s` seconds (None: for ever).

        Pinning again replaces the time. Durable when this returns. Raises NotFound, and StoreError, also where nothing
        of the agent can be saved: it is pinned as before then.
        """
        upkeep.pin(self.components, namespace, check_agent_id(agent, where="agent"), ttl_s)

    def unpin(self, agent: str, *, namespace: str = "default") -> None:
        """Let an agent be forgotten when its time comes; raises NotFound, StoreError."""
        upkeep.unpin(self.components, namespace, check_agent_id(agent, where="agent"))

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until every finished turn is durable; False if that took longer than `timeout_s`."""
        return self.components.flush(timeout_s)

    def stats(self) -> EngineStats:
        """Counters and gauges of this moment."""
        return self.components.stats()

    def health(self) -> Health:
        """Whether all that was promised works; if not, what does not and what to do. Never raises."""
        parts = self._parts
        if parts is None:
            return Health(False, ("the engine is not running: start it",))
        found = parts.problems()
        return Health(not found, found)

    def deaths(self) -> tuple[Death, ...]:
        """Threads that have ended of an error, and of which: no request is taken any more. Waits for nothing."""
        parts = self._parts
        return () if parts is None else parts.deaths()

    def check(self) -> None:
        """Assert every invariant of pool, queues and store."""
        self.components.check()
