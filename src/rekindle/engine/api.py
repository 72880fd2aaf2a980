"""The public engine: start it, chat with agents, look at what they remember. No server needed.

    with Engine.from_pretrained() as engine:
        reply = engine.chat("ada", [{"role": "user", "content": "Hello!"}])
        print(reply.text, reply.report.outcome)

Owns the lifetime of everything below it. Every method may be called from any thread. An invalid agent id (see
`agent_ids`) is a BadRequest in every method that takes one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Self, Unpack

from rekindle.agent_ids import check_agent_id, check_new_agent_id
from rekindle.cache.blocks.hashing import BlockHash, BlockIdentity, Ids
from rekindle.config import Settings, SettingsKeywords, SettingsWithoutModel
from rekindle.engine.agent import Agent
from rekindle.engine.agent_admin import infos
from rekindle.engine.calls import (
    ChatKeywords,
    GenerateKeywords,
    Messages,
    PrefillKeywords,
    chat_request,
    pieces,
    prefill_request,
    text_request,
    whole,
)
from rekindle.engine.components import Components
from rekindle.engine.generation import Generation
from rekindle.engine.types import (
    AgentInfo,
    ChatResult,
    Delta,
    EngineStats,
    GenerationRequest,
    Health,
    Report,
    Verdict,
)
from rekindle.errors import BadRequest, ConfigError, RekindleError
from rekindle.extensions import extensions, load
from rekindle.model.sampling_defaults import SamplingDefaults
from rekindle.spec import ModelSpec
from rekindle.store.values import Wear
from rekindle.text.prompt import PromptEncoder, RenderedPrompt
from rekindle.text.replies import ReplyFormat
from rekindle.worker import Death


class Engine:
    """A model with agents that remember. Created with settings, loaded by `start`, ended by `close`.

        from rekindle import Engine

        with Engine(store="off", threads=1) as engine:
            reply = engine.chat("ada", [{"role": "user", "content": "Hello!"}], temperature=0, max_tokens=8, stop=".")
            print(reply.text, reply.report.outcome, reply.report.timings.first_token_ms)
            print(engine.generate("Once upon a time", max_tokens=4).text)

    Settings come as one value, or as keyword arguments, each named as in files: ConfigError for an unknown or invalid
    one; once started, `settings` name the device and the slot that `auto` chose. `clock` gives chat templates the date.
    `before_store` is called before the store is opened, where possible once the model is loaded, and may wait until
    another process has closed it. `meter`, if it is set, is called on the engine's thread with the namespace of each
    request that ends, how many tokens of its prompt were computed, and how many were generated.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        clock: Callable[[], datetime] = datetime.now,
        before_store: Callable[[], None] = lambda: None,
        **keywords: Unpack[SettingsKeywords],
    ) -> None:
        if settings is not None and keywords:
            raise ConfigError(f"give Settings or keyword arguments, not both: {', '.join(keywords)}")
        self._given = self.settings = Settings.load(keywords) if settings is None else settings
        self._clock = clock
        self._before_store = before_store
        self._parts: Components | None = None
        self.meter: Callable[[str, int, int], None] | None = None

    @classmethod
    def from_pretrained(cls, model: str | Path | None = None, **settings: Unpack[SettingsWithoutModel]) -> Engine:
        """Load a model (None: the bundled one) with settings as keyword arguments, and start it.

        Raises ConfigError, ModelRefused, StoreError.
        """
        engine = cls(Settings.load({"model": model, **settings}))
        engine.start()
        return engine

    def start(self) -> None:
        """Load the model, open the store, start the threads. Starting twice is an error."""
        if self._parts is not None:
            raise RekindleError("this engine has been started already")
        if self._given.backend.address is None:
            from rekindle.engine.factory import assemble  # seconds of transformers, which a front does without

            parts = assemble(self._given, clock=self._clock, before_store=self._before_store)
        else:
            parts = _front()(self._given, clock=self._clock, before_store=self._before_store)
        parts.start()
        model = replace(self._given.model, device=parts.device)
        self.settings = replace(self._given, model=model, store=parts.store_settings)
        self._parts = parts

    def close(self) -> None:
        """Stop the engine, make every finished turn durable, release the store. Closing twice is safe."""
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.close()

    def __enter__(self) -> Self:
        if self._parts is None:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        parts, model = self._parts, self.settings.model.model or "pocket"
        if parts is None:
            return f"<Engine {model}: not running>"
        state = "; ".join(map(str, parts.deaths())) or f"running, {parts.max_context:,} tokens of context"
        where = "store off" if parts.store is None else f"store {self.settings.store.own_directory()}"
        return f"<Engine {model}: {state}, {where}>"

    @property
    def components(self) -> Components:
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
        """Converts text to tokens and back; immutable, any thread may use it."""
        return self.components.encoder

    @property
    def reply_format(self) -> ReplyFormat:
        """How replies of this model are written: reasoning, calls, and the control tokens a parser needs."""
        return self.components.reply_format

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for users on how this model is served, one sentence each."""
        return self.components.notes

    @property
    def sampling(self) -> SamplingDefaults:
        """What replies are sampled with where a request does not say."""
        return self.components.sampling

    @property
    def promise(self) -> str:
        """`bitwise` if every path gives the same bits on this machine, else `close`."""
        return self.components.promise

    @property
    def sees(self) -> bool:
        """Whether pictures in messages are read; else each is a line of text."""
        return self.components.sees

    @property
    def has_kv(self) -> bool:
        """Whether KV is kept here; False in front of a server that keeps its own: then only texts are."""
        return self.components.has_kv

    @property
    def num_warm_agents(self) -> int:
        """Named agents that were found in the store at start."""
        return self.components.num_warm_agents

    @property
    def max_context(self) -> int:
        """Tokens of prompt and reply that one request may have."""
        return self.components.max_context

    def render(self, request: GenerationRequest) -> RenderedPrompt:
        """Return the prompt of messages or text as it would be computed, without matching it; raises BadRequest."""
        return self.components.renderer.render(request).prompt

    def settled(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with messages and tools as they are rendered, but each text where it was sent."""
        return self.components.renderer.settled(request)

    @property
    def secret(self) -> bytes:
        """A key that lasts as long as the store, or without one as long as this engine."""
        return self.components.secret

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request; errors in it arrive through the generation."""
        return self.submit_many(request, 1)[0]

    def submit_many(self, request: GenerationRequest, n: int) -> list[Generation]:
        """Queue `n` replies to one prompt, which is prepared and computed once; errors arrive through each generation.

        Reply i is seeded with the request's seed + i (without one they differ at random), and each becomes a branch of
        the agent. Raises BadRequest for more than an agent may have, and for an invalid agent id.
        """
        for name, agent in (("agent", request.agent), ("parent", request.parent)):
            if agent is not None:
                check_new_agent_id(agent, where=name)
        most = self.settings.cache.max_branches
        if not 1 <= n <= most:
            raise BadRequest(f"n must be from 1 to {most}, as many replies as an agent keeps", param="n")
        generations = [Generation() for _ in range(n)]
        if self.meter is not None:
            for generation in generations:
                generation.on_spent(partial(self.meter, request.namespace))
        if request.agent is not None and request.task == "generate":
            keep = partial(self.components.reports.add, request.namespace, request.agent)
            for generation in generations:
                generation.on_report(keep)
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
        namespace: str = "default",
        **options: Unpack[ChatKeywords],
    ) -> Generation:
        """Chat as `agent` (None: an unnamed conversation); iterate the result with `for` or `async for`.

        `options` are those of `SamplingParams`, `tools`, `reuse` and `constraint`; TypeError for others. Calls of
        tools are bound as over HTTP: those of a `strict` one have arguments of its schema. Sampling that is not given
        is as the model's generation_config.json says, or else that of `SamplingParams`. Raises BadRequest.
        """
        parts = self.components
        defaults, form = parts.sampling, parts.reply_format
        return self.submit(
            chat_request(messages, agent, namespace, defaults=defaults, form=form, sees=parts.sees, **options)
        )

    def chat(
        self, agent: str | None, messages: Messages, *, namespace: str = "default", **options: Unpack[ChatKeywords]
    ) -> ChatResult:
        """Return the whole reply to `messages`, with options as in `stream`."""
        return self.stream(agent, messages, namespace=namespace, **options).result()

    def generate(
        self,
        prompt: str | Ids,
        *,
        agent: str | None = None,
        namespace: str = "default",
        **options: Unpack[GenerateKeywords],
    ) -> ChatResult:
        """Continue a text, or token ids u32 [n], as they are: no template is rendered.

        `options` are those of `SamplingParams`, and `reuse`, as in `stream`; with `max_tokens` 0 there is no reply,
        only what `prompt_logprobs` asks for. Raises BadRequest. To stream the reply, `submit` a GenerationRequest.
        """
        return self.submit(text_request(prompt, agent, namespace, defaults=self.sampling, **options)).result()

    async def achat(
        self, agent: str | None, messages: Messages, *, namespace: str = "default", **options: Unpack[ChatKeywords]
    ) -> ChatResult:
        """As `chat`, without blocking the event loop; cancelling the task cancels the work."""
        return await whole(self.stream(agent, messages, namespace=namespace, **options))

    def astream(
        self, agent: str | None, messages: Messages, *, namespace: str = "default", **options: Unpack[ChatKeywords]
    ) -> AsyncIterator[Delta]:
        """Iterate over the deltas of the reply; work begins with the first step, closing the iterator cancels it."""
        return pieces(lambda: self.stream(agent, messages, namespace=namespace, **options))

    def prefilling(
        self,
        agent: str,
        messages: Messages,
        *,
        namespace: str = "default",
        **options: Unpack[PrefillKeywords],
    ) -> Generation:
        """Compute and remember a prompt as the agent's; the generation ends without a reply when that is done.

        Messages that end with a user message or a tool result are computed as the next prompt, unless with `open_end`
        the last message may continue. Of other messages, a system prompt for instance, what all prompts that continue
        them have in common is computed. Raises as `chat` does.
        """
        return self.submit(prefill_request(messages, agent, namespace, sees=self.sees, **options))

    def prefill(
        self, agent: str, messages: Messages, *, namespace: str = "default", **options: Unpack[PrefillKeywords]
    ) -> Report:
        """Compute and remember a prompt and wait for it, with options as in `prefilling`; return its report."""
        return self.prefilling(agent, messages, namespace=namespace, **options).result().report

    def agent(self, agent: str, *, namespace: str = "default") -> Agent:
        """Return a handle on one agent, which may not have a memory yet; BadRequest for an invalid id."""
        return Agent(check_agent_id(agent, where="agent"), namespace, self.submit, lambda: self.components)

    def agents(self, namespace: str | None = None) -> list[AgentInfo]:
        """Return every named agent of a namespace (None: of all), most recently used first."""
        book = self.components.memory.book
        return infos(self.components, lambda: [book.of(space, name) for space, name in book.agents(namespace)])

    def stored_chain(self, head: BlockHash, most: int) -> list[BlockIdentity]:
        """Return the chain of blocks on disk that ends in a block, in order, at most `most` of them.

        It begins after the last one that is missing; empty if `head` is, or without a store.
        """
        store = self.components.store
        return [] if store is None else store.chain_to(head, most)

    def verdict(self, hashes: Sequence[BlockHash]) -> Verdict | None:
        """Return what checks of restored blocks found of these since the start (`check_restored`), those that have left
        memory and disk too; None where none are checked."""
        loop = self.components.loop
        return loop.call(lambda core: None if core.verdicts is None else core.verdicts.of(hashes)).result()

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until every finished turn is durable; False if that takes longer than `timeout_s`."""
        return self.components.flush(timeout_s)

    def stats(self) -> EngineStats:
        """Return the current counters and gauges."""
        return self.components.stats()

    def wear(self) -> Wear | None:
        """Return what the store has written to the disk, a day and a turn; None without one. Never blocks."""
        store = self.components.store
        return None if store is None else store.wear()

    def health(self) -> Health:
        """Return whether everything works; if not, what does not and what to do. Never raises."""
        parts = self._parts
        if parts is None:
            return Health(False, ("the engine is not running: start it",), computes=False)
        found = parts.problems()
        is_away = parts.backend is not None and parts.backend.problem() is not None
        return Health(not found, found, computes=not is_away)

    def deaths(self) -> tuple[Death, ...]:
        """Return the threads that died, and of which error; requests are refused from then on. Never blocks."""
        parts = self._parts
        return () if parts is None else parts.deaths()

    def check(self) -> None:
        """Assert every invariant of pool, queues and store."""
        self.components.check()


def _front() -> Callable[..., Components]:
    """Return what builds an engine for which another server computes; ConfigError if that is not installed."""
    found = extensions("rekindle.front")
    if not found:
        raise ConfigError(
            "backend: letting another server compute needs the package rekindle-backends: pip install "
            "'rekindle[backends]', or 'rekindle[vllm]' if vLLM itself is to run here"
        )
    build: Callable[..., Components] = load(found[0])
    return build
