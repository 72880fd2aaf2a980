"""Puts an engine together from its settings, and takes it apart in the order that loses nothing.

Everything is made here and owned by the part it is handed to.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict, dataclass

import torch

from rekindle.cache.matcher import Matcher
from rekindle.cache.pool import BlockPool
from rekindle.config import CacheSettings, Settings
from rekindle.engine.branches import Branch, BranchBook
from rekindle.engine.capacity import capacity
from rekindle.engine.core import EngineCore
from rekindle.engine.costs import StepCosts
from rekindle.engine.edits import AgentEdits
from rekindle.engine.gauges import StorePlace, engine_stats, hot_tokens, problems
from rekindle.engine.intake import Intake
from rekindle.engine.loop import EngineLoop
from rekindle.engine.memory import AgentMemory
from rekindle.engine.prefix_cache import PrefixCache
from rekindle.engine.preparing import Preparer, PromptLimits
from rekindle.engine.retention import Retention, RetentionRules
from rekindle.engine.scheduler import Scheduler
from rekindle.engine.types import EngineStats
from rekindle.engine.waiting import WaitingRoom
from rekindle.kv.arena import KVArena
from rekindle.model.load import LoadedModel, load_model
from rekindle.model.runner import ModelRunner
from rekindle.spec import KVLayout, ModelSpec
from rekindle.store.warm import WarmStore
from rekindle.text.growth import analyse_growth
from rekindle.text.prompt import PromptEncoder

logger = logging.getLogger(__name__)

CHUNK_TOKENS = defaultdict(lambda: 512, cuda=2048)
CLOSE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Assembly:
    """The parts of a running engine, for `Engine` to speak to."""

    spec: ModelSpec
    encoder: PromptEncoder
    notes: tuple[str, ...]
    promise: str
    max_context: int
    num_warm_agents: int
    core: EngineCore
    loop: EngineLoop
    intake: Intake
    memory: AgentMemory
    edits: AgentEdits
    started: Mapping[str, float]
    store: WarmStore | None
    place: StorePlace | None

    def start(self) -> None:
        """Start the threads: store, intake, engine; all of them or none."""
        try:
            if self.store is not None:
                self.store.start()
            self.intake.start()
            self.loop.start(self.core)
        except BaseException:
            self._stop()
            raise

    def flush(self, timeout_s: float) -> bool:
        """Wait until the turns that ended before this call are durable."""
        deadline = time.monotonic() + timeout_s
        try:
            self.intake.call(lambda: None).result(timeout_s)
            while self.loop.call(lambda core: len(core.cache.saving)).result(_left(deadline)):
                time.sleep(0.001)
        except FutureTimeout:
            return False
        if self.store is None:
            return True
        saved = self.store.flush(_left(deadline))
        self.intake.call(lambda: None).result(max(1.0, _left(deadline)))  # the notices of what was saved are taken in
        return saved

    def close(self) -> None:
        """Graceful stop: nothing new, everything finished made durable, then the threads and the store."""
        self.loop.refuse()
        if not self.flush(CLOSE_TIMEOUT_S):
            logger.error("not every turn could be saved within %.0f s; the unsaved ones start cold", CLOSE_TIMEOUT_S)
        self._stop()

    def _stop(self) -> None:
        self.loop.stop()
        self.intake.stop()
        if self.store is not None:
            self.store.close()

    def stats(self) -> EngineStats:
        """Read on the engine thread between two steps; the store's own on the caller's."""
        store = asdict(self.store.stats()) if self.store is not None else None
        return self.loop.call(lambda core: engine_stats(core, self.memory.book, self.started, store)).result()

    def problems(self) -> tuple[str, ...]:
        """What does not work, a sentence each."""
        stats = self.store.stats() if self.store is not None else None
        return problems(stats, is_in_place=self.is_in_place(), is_running=self.loop.is_running)

    def is_in_place(self) -> bool:
        """Whether what was saved can be there still: nobody has taken the store's directory away."""
        return self.place is None or self.place.is_there()

    def check(self) -> None:
        """Assert every invariant, each on the thread that owns it, after what ended is saved."""
        self.flush(CLOSE_TIMEOUT_S)
        self.loop.call(lambda core: core.check()).result()
        self.intake.call(self.memory.check).result()
        if self.store is not None:
            self.store.check()


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def assemble(settings: Settings) -> Assembly:
    """Load the model, prove it, open the store, connect the parts; all or nothing."""
    use_store = settings.store.enabled and settings.cache.reuse == "on"
    loaded = load_model(
        settings.model,
        block_tokens=settings.cache.block_tokens,
        max_context=settings.engine.max_context,
        format_map_dir=settings.store.directory() if use_store else None,
    )
    started = {"weights": time.time()}
    spec = loaded.spec
    num_blocks, max_context = capacity(settings.cache, spec, loaded.device)
    encoder = PromptEncoder.from_dir(loaded.directory)
    arena = KVArena(spec.layout, num_blocks, torch.device(loaded.device))
    store = _open_store(settings, spec) if use_store else None
    started["store"] = time.time()
    try:
        return _connect(settings, loaded, encoder, arena, store, max_context, started)
    except BaseException:
        if store is not None:
            store.close()
        raise


def _connect(
    settings: Settings,
    loaded: LoadedModel,
    encoder: PromptEncoder,
    arena: KVArena,
    store: WarmStore | None,
    max_context: int,
    started: dict[str, float],
) -> Assembly:
    spec, loop = loaded.spec, EngineLoop(check_when_idle=settings.engine.check_when_idle)
    cache = _prefix_cache(settings.cache, spec, arena, store, loop)
    limits = PromptLimits(max_context, spec.vocab_size, spec.eos_ids, settings.engine.request_timeout_s)
    memory = _memory(settings.cache, encoder, store, loop, spec.layout)
    retention = Retention(
        memory,
        RetentionRules(settings.store.agent_ttl_s, settings.store.anonymous_ttl_s, max_unsaved=arena.num_blocks),
        ask_hot=lambda branches: loop.call(lambda core: hot_tokens(core.cache, branches)),
        run=lambda work: intake.run(work),
    )
    intake = Intake(
        preparer=_preparer(settings, limits, encoder, memory, cache, loop),
        memory=memory,
        retention=retention,
        room=WaitingRoom(settings.engine.max_waiting),
    )
    if store is not None:
        store.on_saved, store.on_lost = intake.turn_saved, intake.turn_lost
    num_warm_agents = memory.open()
    started["agents"] = time.time()
    return Assembly(
        spec=spec,
        encoder=encoder,
        notes=(*loaded.notes, f"template: {analyse_growth(encoder.template).summary()}"),
        promise=loaded.promise,
        max_context=max_context,
        num_warm_agents=num_warm_agents,
        core=_core(settings, loaded, ModelRunner(loaded, arena), cache, intake),
        loop=loop,
        intake=intake,
        memory=memory,
        started=started,
        edits=AgentEdits(memory, block_tokens=spec.layout.block_tokens, now=time.time),
        store=store,
        place=StorePlace(settings.store.directory() / spec.fingerprint.hex()) if store is not None else None,
    )


def _prefix_cache(
    settings: CacheSettings, spec: ModelSpec, arena: KVArena, store: WarmStore | None, loop: EngineLoop
) -> PrefixCache:
    return PrefixCache(
        pool=BlockPool(arena.num_blocks, spec.layout.block_tokens),
        arena=arena,
        store=store,
        fingerprint=spec.fingerprint,
        secret=store.secret if store is not None else secrets.token_bytes(32),
        min_reuse_tokens=settings.min_reuse_tokens,
        min_reuse_ratio=settings.min_reuse_ratio,
        report_load=loop.report_load,
    )


def _preparer(
    settings: Settings,
    limits: PromptLimits,
    encoder: PromptEncoder,
    memory: AgentMemory,
    cache: PrefixCache,
    loop: EngineLoop,
) -> Preparer:
    return Preparer(
        encoder=encoder,
        memory=memory,
        limits=limits,
        block_tokens=settings.cache.block_tokens,
        reuse=settings.cache.reuse,
        root=cache.root,
        new_table=cache.new_table,
        submit=loop.submit,
        wake=loop.wake,
    )


def _core(
    settings: Settings, loaded: LoadedModel, runner: ModelRunner, cache: PrefixCache, intake: Intake
) -> EngineCore:
    chunk = settings.engine.max_chunk_tokens or CHUNK_TOKENS[torch.device(loaded.device).type]
    return EngineCore(
        runner=runner,
        cache=cache,
        scheduler=Scheduler(settings.engine, StepCosts(), max_chunk_tokens=chunk),
        min_reuse_tokens=settings.cache.min_reuse_tokens,
        on_turn=intake.turn_ended,
    )


def _open_store(settings: Settings, spec: ModelSpec) -> WarmStore:
    return WarmStore.open(
        settings.store.directory(),
        fingerprint=spec.fingerprint,
        layout=spec.layout,
        settings=settings.store,
        model=spec.name,
        namespaces=settings.server.namespaces(),
    )


def _memory(
    settings: CacheSettings, encoder: PromptEncoder, store: WarmStore | None, loop: EngineLoop, layout: KVLayout
) -> AgentMemory:
    return AgentMemory(
        encoder=encoder,
        matcher=Matcher(
            encoder,
            min_reuse_tokens=settings.min_reuse_tokens,
            min_reuse_ratio=settings.min_reuse_ratio,
            max_index_bytes=settings.text_index_bytes,
            clock=time.monotonic,
        ),
        book=BranchBook(max_branches=settings.max_branches),
        store=store,
        block_tokens=layout.block_tokens,
        save=loop.save,
        demote=lambda branch, num_kept: _demote(loop, branch, num_kept),
        now=time.time,
    )


def _demote(loop: EngineLoop, branch: Branch, num_kept: int) -> None:
    ids, names = branch.ids, branch.names
    if ids is not None and names is not None:
        loop.call(lambda core: core.cache.demote(branch.root, ids, names, num_kept=num_kept))
