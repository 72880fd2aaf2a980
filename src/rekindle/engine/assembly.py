"""Puts an engine together from its settings, and takes it apart in the order that loses nothing.

Owns how much hot memory there is and how large a context it can serve; everything else is made here and owned by the
part it is handed to.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rekindle.cache.matcher import Matcher
from rekindle.cache.pool import BlockPool
from rekindle.config import CacheSettings, Settings, StoreSettings
from rekindle.engine.branches import Branch, BranchBook
from rekindle.engine.core import EngineCore
from rekindle.engine.costs import StepCosts
from rekindle.engine.intake import Intake
from rekindle.engine.loop import EngineLoop
from rekindle.engine.memory import AgentMemory
from rekindle.engine.prefix_cache import PrefixCache
from rekindle.engine.preparing import Preparer, PromptLimits
from rekindle.engine.scheduler import Scheduler
from rekindle.engine.types import EngineStats
from rekindle.errors import ConfigError
from rekindle.kv.arena import KVArena
from rekindle.model.load import LoadedModel, load_model
from rekindle.model.runner import ModelRunner
from rekindle.spec import KVLayout, ModelSpec
from rekindle.store.warm import WarmStore
from rekindle.text.growth import analyse_growth
from rekindle.text.prompt import PromptEncoder

logger = logging.getLogger(__name__)

DEFAULT_HOT_BYTES = 4 << 30
CHUNK_TOKENS = defaultdict(lambda: 512, cuda=2048)
CLOSE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Assembly:
    """The parts of a running engine, for `Engine` to speak to."""

    spec: ModelSpec
    notes: tuple[str, ...]
    promise: str
    max_context: int
    num_warm_agents: int
    core: EngineCore
    loop: EngineLoop
    intake: Intake
    memory: AgentMemory
    store: WarmStore | None

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
        return self.loop.call(lambda core: _stats(core, store)).result()

    def check(self) -> None:
        """Assert every invariant, each on the thread that owns it, after what ended is saved."""
        self.flush(CLOSE_TIMEOUT_S)
        self.loop.call(lambda core: core.check()).result()
        self.intake.call(self.memory.check).result()
        if self.store is not None:
            self.store.check()


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _stats(core: EngineCore, store: Mapping[str, Any] | None) -> EngineStats:
    pool, scheduler = core.cache.pool, core.scheduler
    return EngineStats(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting) + len(scheduler.loading),
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free,
        num_cached_blocks=pool.num_cached,
        num_held_blocks=pool.num_held,
        hot_bytes=core.cache.arena.num_bytes,
        block_bytes=core.cache.arena.layout.block_bytes,
        num_steps=core.num_steps,
        num_stall_misses=scheduler.num_stall_misses,
        num_preemptions=core.num_preemptions,
        prompt_tokens=core.prompt_tokens,
        reused_tokens=core.reused_tokens,
        step_overhead_ms=1e3 * core.outside_s / max(1, core.num_steps),
        store=store,
    )


def assemble(settings: Settings) -> Assembly:
    """Load the model, prove it, open the store, connect the parts; all or nothing."""
    use_store = settings.store.enabled and settings.cache.reuse == "on"
    loaded = load_model(
        settings.model,
        block_tokens=settings.cache.block_tokens,
        max_context=settings.engine.max_context,
        format_map_dir=settings.store.directory() if use_store else None,
    )
    spec = loaded.spec
    num_blocks, max_context = _capacity(settings.cache, spec, loaded.device)
    encoder = PromptEncoder.from_dir(loaded.directory)
    arena = KVArena(spec.layout, num_blocks, torch.device(loaded.device))
    store = _open_store(settings.store, spec) if use_store else None
    try:
        return _connect(settings, loaded, encoder, arena, store, max_context)
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
) -> Assembly:
    spec, loop = loaded.spec, EngineLoop(check_when_idle=settings.engine.check_when_idle)
    cache = PrefixCache(
        pool=BlockPool(arena.num_blocks, spec.layout.block_tokens),
        arena=arena,
        store=store,
        fingerprint=spec.fingerprint,
        secret=store.secret if store is not None else secrets.token_bytes(32),
        min_reuse_tokens=settings.cache.min_reuse_tokens,
        report_load=loop.report_load,
    )
    limits = PromptLimits(max_context, spec.vocab_size)
    memory = _memory(settings.cache, encoder, store, loop, spec.layout)
    intake = Intake(preparer=_preparer(settings, limits, encoder, memory, cache, loop), memory=memory)
    if store is not None:
        store.on_saved = intake.turn_saved
    return Assembly(
        spec=spec,
        notes=(*loaded.notes, f"template: {analyse_growth(encoder.template).summary()}"),
        promise=loaded.promise,
        max_context=max_context,
        num_warm_agents=memory.open(),
        core=_core(settings, loaded, ModelRunner(loaded, arena), cache, intake),
        loop=loop,
        intake=intake,
        memory=memory,
        store=store,
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
        eos_ids=loaded.spec.eos_ids,
        min_reuse_tokens=settings.cache.min_reuse_tokens,
        on_turn=intake.turn_ended,
    )


def _open_store(settings: StoreSettings, spec: ModelSpec) -> WarmStore:
    return WarmStore.open(settings.directory(), fingerprint=spec.fingerprint, layout=spec.layout, settings=settings)


def _memory(
    settings: CacheSettings, encoder: PromptEncoder, store: WarmStore | None, loop: EngineLoop, layout: KVLayout
) -> AgentMemory:
    return AgentMemory(
        encoder=encoder,
        matcher=Matcher(
            encoder,
            min_reuse_tokens=settings.min_reuse_tokens,
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


def _capacity(settings: CacheSettings, spec: ModelSpec, device: str) -> tuple[int, int]:
    """Blocks in hot memory, and the tokens one request may have: the model's context, or what the blocks hold."""
    wanted = settings.hot_bytes or min(DEFAULT_HOT_BYTES, _free_bytes(device) // 4)
    num_blocks = wanted // spec.layout.block_bytes
    if num_blocks < 2:
        need = 2 * spec.layout.block_bytes
        raise ConfigError(f"--hot-bytes {wanted} holds less than two blocks of this model: give at least {need}")
    # One block stays for the copy of a shared tail while its original is still held.
    return num_blocks, min(spec.max_context, (num_blocks - 1) * spec.layout.block_tokens)


def _free_bytes(device: str) -> int:
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
