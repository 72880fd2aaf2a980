"""Connects the components of an engine around what computes: store, memory, intake and the core's thread.

Every part is built here or passed in, and owned by the component it is passed to; all or nothing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rekindle.cache.blocks.pool import BlockPool
from rekindle.compute.cpu.kernels import allocator
from rekindle.config import Settings, StoreSettings
from rekindle.engine.blocks.prefix_cache import PrefixCache
from rekindle.engine.capacity import TYPICAL_TOKENS
from rekindle.engine.components import Backend, Components
from rekindle.engine.core.costs import StepCosts
from rekindle.engine.core.interface import Core
from rekindle.engine.core.loop import EngineLoop
from rekindle.engine.gauges import StorePlace, hot_tokens
from rekindle.engine.intake.anticipation import Anticipation
from rekindle.engine.intake.intake import Intake
from rekindle.engine.intake.prompt_lookup import PromptLookup
from rekindle.engine.intake.queue_limit import AdmissionQueueLimit
from rekindle.engine.intake.rendering import Renderer
from rekindle.engine.intake.request_builder import PromptLimits, RequestBuilder
from rekindle.engine.intake.tail_offers import TailOffers
from rekindle.engine.memory.adoption import Adoption
from rekindle.engine.memory.agent_commands import AgentCommands
from rekindle.engine.memory.branches import Branch, BranchBook, KnownBranch
from rekindle.engine.memory.memory import AgentMemory
from rekindle.engine.memory.pins import most_pinned
from rekindle.engine.memory.retention import Retention, RetentionRules
from rekindle.engine.prefault import Prefault
from rekindle.engine.request import Request
from rekindle.engine.tier_parts import open_tier, tier_imports
from rekindle.engine.weights_writer import WeightsWriter
from rekindle.errors import StoreRefused
from rekindle.kv.arena import KVArena
from rekindle.matching.matcher import Matcher
from rekindle.model.loaded import Promise, Unsaved
from rekindle.model.sampling_defaults import SamplingDefaults
from rekindle.spec import ModelSpec
from rekindle.store.maintenance.room import OnLost
from rekindle.store.replica_slots import ReplicaSlots, secret_of, without_blocks
from rekindle.store.threads.writer import OnSaved
from rekindle.store.warm import WarmStore
from rekindle.text.constraints.matcher import Constraints
from rekindle.text.growth import analyse_growth
from rekindle.text.prompt import PromptEncoder
from rekindle.text.replies import ReplyFormat, fit

if TYPE_CHECKING:
    from rekindle.engine.intake.tier_imports import TierImports
    from rekindle.tier.tier import ObjectTier

logger = logging.getLogger(__name__)

GENERIC_TOOLS = "tools: the template has none; they are described in the prompt, and a grammar binds their calls"
BREAKPOINT_SHARE = 0.5  # of a tenant's part of the disk, for cached breakpoints


@dataclass(frozen=True, slots=True)
class Around:
    """What a core is built with: blocks, the intake, which takes ended turns, its thread, what steps cost."""

    cache: PrefixCache
    intake: Intake
    loop: EngineLoop
    costs: StepCosts


@dataclass(frozen=True, slots=True)
class Computing:
    """What computes for an engine, here or at a `backend`, and what is known of it.

    `arena` has the bytes of its blocks. A `store` of it is listed under `label`. `sampling` is for what requests leave
    open. `new_core` builds its core;
    `new_constraints` what constrains replies, from the final encoder and its reply format.
    """

    spec: ModelSpec
    encoder: PromptEncoder
    arena: KVArena
    max_context: int
    notes: tuple[str, ...]
    promise: Promise
    label: str
    sampling: SamplingDefaults
    new_core: Callable[[Around], Core]
    new_constraints: Callable[[PromptEncoder, ReplyFormat], Constraints]
    unsaved: Unsaved | None = None
    backend: Backend | None = None


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What the components of the engine are built from."""

    settings: Settings
    computing: Computing
    encoder: PromptEncoder
    form: ReplyFormat
    renderer: Renderer
    store: WarmStore | None
    refused: str | None  # why an enabled store could not be opened
    tier: ObjectTier | None


def assembled(settings: Settings, computing: Computing, started: dict[str, float], *, use_store: bool) -> Components:
    """Open the store and connect the components around what computes; all or nothing."""
    spec = computing.spec
    place, store, refused = (
        _open_store(
            settings,
            spec,
            computing.label,
            # Called by the store's threads, which the components start.
            on_saved=lambda *turn: components.turn_saved(*turn),
            on_lost=lambda *turn: components.intake.turn_lost(*turn),
        )
        if use_store
        else (without_blocks(settings.store), None, None)
    )
    settings = replace(settings, store=place)
    started["store"] = time.time()
    tier: ObjectTier | None = None
    try:
        tier = open_tier(settings, store, spec)
        encoder, form = fit(computing.encoder)
        encoder = encoder.bounded(computing.max_context)
        renderer = Renderer(encoder, form, settings.prompt.kinds(), headings=settings.prompt.tail_heading)
        inputs = _Inputs(settings, computing, encoder, form, renderer, store, refused, tier)
        components = _connect(inputs, started)
        allocator.trim()  # of what reading the tokenizer took: 300 MiB for 262,144 words
        return components
    except BaseException:
        if tier is not None:
            tier.stop(0.0)
        if store is not None:
            store.close()
        raise


def _connect(inputs: _Inputs, started: dict[str, float]) -> Components:
    settings, computing, encoder, store = inputs.settings, inputs.computing, inputs.encoder, inputs.store
    spec, loop = computing.spec, EngineLoop(check_when_idle=settings.engine.check_when_idle)
    cache = _prefix_cache(settings, spec, computing.arena, store, loop)
    memory = _memory(settings, encoder, store, loop, spec)
    anticipation = _anticipation(inputs, memory, cache, loop)
    costs = StepCosts()
    adoption = Adoption(memory, store, block_tokens=spec.layout.block_tokens) if store is not None else None
    imports = tier_imports(inputs.tier, store, adoption, spec, costs, lambda: components)
    intake = _intake(inputs, memory, cache, loop, anticipation, imports)
    num_warm_agents = memory.open()
    started["agents"] = time.time()
    components = Components(
        spec=spec,
        encoder=encoder,
        reply_format=inputs.form,
        renderer=inputs.renderer,
        notes=(
            *computing.notes,
            *computing.sampling.notes,
            f"template: {analyse_growth(encoder.template).summary()}",
            *(() if encoder.tools_in_text is None else (GENERIC_TOOLS,)),
        ),
        sampling=computing.sampling,
        promise=computing.promise,
        max_context=computing.max_context,
        num_warm_agents=num_warm_agents,
        core=computing.new_core(Around(cache, intake, loop, costs)),
        loop=loop,
        intake=intake,
        memory=memory,
        anticipation=anticipation,
        started=started,
        agent_commands=AgentCommands(
            memory, cancel_anticipation=anticipation.cancel, block_tokens=spec.layout.block_tokens, now=time.time
        ),
        store=store,
        tier=inputs.tier,
        adoption=adoption,
        imports=imports,
        refused=inputs.refused,
        store_settings=settings.store,
        place=StorePlace(settings.store.own_directory() / spec.fingerprint.hex()) if store is not None else None,
        prefault=Prefault(computing.arena, store.stats().num_blocks) if store is not None else None,
        weights_writer=WeightsWriter(computing.unsaved) if computing.unsaved is not None else None,
        backend=computing.backend,
    )
    return components


def _intake(
    inputs: _Inputs,
    memory: AgentMemory,
    cache: PrefixCache,
    loop: EngineLoop,
    anticipation: Anticipation,
    imports: TierImports | None,
) -> Intake:
    settings = inputs.settings
    retention = Retention(
        memory,
        RetentionRules(
            settings.store.agent_ttl_s, settings.store.anonymous_ttl_s, max_unsaved=inputs.computing.arena.num_blocks
        ),
        ask_hot=lambda branches: loop.call(lambda core: hot_tokens(core.cache, branches)),
        run=lambda work: intake.run(work),
    )

    def submit(request: Request) -> None:
        anticipation.began(request)
        loop.submit(request)

    preparer = _preparer(inputs, memory, cache, submit, loop.wake, imports)
    intake = Intake(
        preparer=preparer,
        memory=memory,
        retention=retention,
        room=AdmissionQueueLimit(settings.engine.max_waiting),
        anticipation=anticipation,
        has_tier=imports is not None,
    )
    return intake


def _anticipation(inputs: _Inputs, memory: AgentMemory, cache: PrefixCache, loop: EngineLoop) -> Anticipation:
    settings = inputs.settings
    return Anticipation(
        encoder=inputs.encoder,
        memory=memory,
        form=inputs.form,
        settled=inputs.renderer.settled,
        new_table=cache.new_table,
        root=cache.root,
        submit=loop.submit,
        max_context=inputs.computing.max_context,
        is_busy=lambda: loop.is_busy,
        enabled=settings.prompt.anticipate == "on"
        and settings.cache.reuse == "on"
        and inputs.computing.backend is None,
    )


def _prefix_cache(
    given: Settings, spec: ModelSpec, arena: KVArena, store: WarmStore | None, loop: EngineLoop
) -> PrefixCache:
    settings = given.cache
    return PrefixCache(
        pool=BlockPool(arena.num_blocks, spec.layout.block_tokens, windows=tuple(arena.windows.values())),
        arena=arena,
        store=store,
        fingerprint=spec.fingerprint,
        secret=store.secret if store is not None else secret_of(given.store),
        min_reuse_tokens=settings.min_reuse_tokens,
        namespace_share=given.store.namespace_share,
        report_load=loop.report_load,
    )


def _preparer(
    inputs: _Inputs,
    memory: AgentMemory,
    cache: PrefixCache,
    submit: Callable[[Request], None],
    wake: Callable[[], None],
    imports: TierImports | None,
) -> RequestBuilder:
    settings, spec, most = inputs.settings, inputs.computing.spec, inputs.computing.max_context
    return RequestBuilder(
        encoder=inputs.encoder,
        renderer=inputs.renderer,
        lookup=PromptLookup(
            inputs.encoder,
            memory,
            reuse=settings.cache.reuse,
            offers=TailOffers(inputs.renderer, memory.system_texts),
        ),
        limits=PromptLimits(most, spec.vocab_size, spec.eos_ids, settings.engine.request_timeout_s),
        visible=inputs.form.visible,
        constraints=inputs.computing.new_constraints(inputs.encoder, inputs.form),
        root=cache.root,
        new_table=cache.new_table,
        submit=submit,
        wake=wake,
        only_at_points=bool(spec.layout.ending_parts),
        tier=imports,
    )


def _open_store(
    settings: Settings, spec: ModelSpec, label: str, *, on_saved: OnSaved, on_lost: OnLost
) -> tuple[StoreSettings, WarmStore | None, str | None]:
    """Open the store, in the slot that it claims; None and the reason if the disk refuses, in which case requests are
    served without one. The settings name the slot."""

    def open_in(directory: Path, place: StoreSettings) -> WarmStore:
        return WarmStore.open(
            directory,
            fingerprint=spec.fingerprint,
            layout=spec.layout,
            settings=place,
            model=label,
            namespaces=settings.server.namespaces(),
            made_from=spec.made_from,
            on_saved=on_saved,
            on_lost=on_lost,
        )

    slots = ReplicaSlots(settings.store, spec.fingerprint)
    try:
        store = slots.open(open_in)
    except StoreRefused as error:
        logger.error("NOTHING IS READ FROM DISK OR SAVED until this is repaired and the engine restarted: %s", error)
        return slots.settings, None, str(error)
    return slots.settings, store, None


def _memory(
    settings: Settings, encoder: PromptEncoder, store: WarmStore | None, loop: EngineLoop, spec: ModelSpec
) -> AgentMemory:
    cache, layout, num_tenants = settings.cache, spec.layout, len(settings.server.namespaces())
    typical_blocks, typical_bytes = TYPICAL_TOKENS // layout.block_tokens, layout.kept_bytes(TYPICAL_TOKENS)
    disk_blocks = store.stats().disk_bytes * typical_blocks // typical_bytes if store is not None else 0
    pinned = most_pinned(disk_blocks, num_tenants, settings.store.namespace_share) if store is not None else math.inf
    return AgentMemory(
        encoder=encoder,
        matcher=Matcher(
            encoder,
            min_reuse_tokens=cache.min_reuse_tokens,
            max_index_bytes=cache.index_bytes,
            clock=time.monotonic,
        ),
        book=BranchBook(max_branches=cache.max_branches),
        store=store,
        block_tokens=layout.block_tokens,
        save=loop.save,
        demote=lambda branch, num_kept: _demote(loop, branch, num_kept),
        now=time.time,
        vocab_size=spec.vocab_size,
        max_breakpoint_tokens=BREAKPOINT_SHARE * disk_blocks * layout.block_tokens / num_tenants,
        max_pinned_blocks=pinned,
    )


def _demote(loop: EngineLoop, branch: Branch, num_kept: int) -> None:
    if isinstance(branch, KnownBranch):
        loop.call(lambda core: core.cache.demote(branch.root, branch.ids, branch.hashes, num_kept=num_kept))
