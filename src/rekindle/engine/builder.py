"""Builds an engine around what computes: a part is made when another one asks for it, and owned by the one it goes to.

Nothing is called back before the threads start, so a callback may ask for any part. All or nothing: what was opened is
closed if a part cannot be made.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rekindle import allocator
from rekindle.cache.blocks.pool import BlockPool
from rekindle.config import Settings, StoreSettings
from rekindle.engine.agent_admin import AgentAdmin
from rekindle.engine.blocks.prefix_cache import PrefixCache
from rekindle.engine.capacity import TYPICAL_TOKENS
from rekindle.engine.components import Backend, Components
from rekindle.engine.core.costs import StepCosts
from rekindle.engine.core.interface import Core
from rekindle.engine.core.loop import EngineLoop
from rekindle.engine.gauges import StorePlace, hot_tokens
from rekindle.engine.intake.anticipation import Anticipation
from rekindle.engine.intake.intake import AdmissionQueueLimit, Intake
from rekindle.engine.intake.object_tier import ObjectTier, Replica, TierImports, tier_opener
from rekindle.engine.intake.prompt_lookup import PromptLookup, TailOffers
from rekindle.engine.intake.rendering import Renderer
from rekindle.engine.intake.request_builder import PromptLimits, RequestBuilder
from rekindle.engine.memory.adoption import Adoption
from rekindle.engine.memory.agent_commands import AgentCommands
from rekindle.engine.memory.branches import Branch, BranchBook, KnownBranch
from rekindle.engine.memory.memory import AgentMemory
from rekindle.engine.memory.pins import most_pinned
from rekindle.engine.memory.retention import Retention, RetentionRules
from rekindle.engine.request import Request
from rekindle.engine.started_once import Prefault, WeightsWriter
from rekindle.errors import ConfigError, StoreRefused
from rekindle.kv.arena import KVArena
from rekindle.matching.matcher import Matcher
from rekindle.model.loaded import Promise, Unsaved
from rekindle.model.sampling_defaults import SamplingDefaults
from rekindle.spec import ModelSpec
from rekindle.store.files.keys import NOTHING_GIVEN, SECRET_FILE, Given, given_keys, make_directory
from rekindle.store.files.shards import ReadRecords
from rekindle.store.files.sync import OsFileSystem
from rekindle.store.replica_slots import ReplicaSlots, secret_of, without_blocks
from rekindle.store.warm import WarmStore
from rekindle.text.constraints.matcher import Constraints
from rekindle.text.growth import analyse_growth
from rekindle.text.pictures import Picture
from rekindle.text.prompt import PromptEncoder
from rekindle.text.replies import ReplyFormat, fit

logger = logging.getLogger(__name__)

GENERIC_TOOLS = "tools: the template has none; they are described in the prompt, and a grammar binds their calls"
BREAKPOINT_SHARE = 0.5  # of a tenant's part of the disk, for cached breakpoints


@dataclass(frozen=True, slots=True)
class Computing:
    """What computes for an engine, here or at a `backend`, and what is known of it.

    `device`: where it computes. `arena` has the bytes of its blocks, which are KV if it `has_kv`. A `store` of it is
    listed under `label`. `sampling` is for what requests leave open. `new_core` builds its core, of the builder's other
    parts; `new_constraints` what constrains replies, from the final encoder and its reply format. `read_records` and
    `computed_by`: as `WarmStore.open` has them. `see`: as of `RequestBuilder`.
    """

    device: str
    spec: ModelSpec
    encoder: PromptEncoder
    arena: KVArena
    max_context: int
    notes: tuple[str, ...]
    promise: Promise
    label: str
    sampling: SamplingDefaults
    new_core: Callable[[Builder], Core]
    new_constraints: Callable[[PromptEncoder, ReplyFormat], Constraints]
    unsaved: Unsaved | None = None
    see: Callable[[Picture], object] | None = None
    backend: Backend | None = None
    has_kv: bool = True
    read_records: ReadRecords | None = None
    computed_by: int | None = None


@dataclass(frozen=True, slots=True)
class _Disk:
    """The store of an engine, its settings with the slot that it claimed, and why an enabled one could not be opened:
    requests are served without it then."""

    settings: StoreSettings
    store: WarmStore | None = None
    refused: str | None = None


class Builder:
    """Builds one engine, whose `components` are asked for once; `started` gets the times at which its steps ended."""

    def __init__(self, settings: Settings, computing: Computing, started: dict[str, float], *, use_store: bool) -> None:
        self._settings = settings
        self._computing = computing
        self._started = started
        self._use_store = use_store
        self._spec = computing.spec
        self._opened = ExitStack()
        self.loop = EngineLoop(check_when_idle=settings.engine.check_when_idle)
        self.costs = StepCosts()
        encoder, form = fit(computing.encoder)
        self.encoder = encoder.bounded(computing.max_context)
        self.renderer = Renderer(self.encoder, form, settings.prompt.kinds(), headings=settings.prompt.tail_heading)

    @cached_property
    def components(self) -> Components:
        """All of the engine; nothing runs yet."""
        computing, disk, spec = self._computing, self._disk, self._spec
        store = disk.store
        with self._opened:
            self._started["store"] = time.time()
            tier, intake = self.tier, self.intake  # which may fail, before agents are read
            num_warm_agents = self.memory.open()
            self._started["agents"] = time.time()
            components = Components(
                device=computing.device,
                spec=spec,
                encoder=self.encoder,
                reply_format=self.renderer.form,
                renderer=self.renderer,
                notes=self._notes(),
                sampling=computing.sampling,
                promise=computing.promise,
                max_context=computing.max_context,
                num_warm_agents=num_warm_agents,
                core=computing.new_core(self),
                loop=self.loop,
                intake=intake,
                memory=self.memory,
                anticipation=self.anticipation,
                started=self._started,
                agent_commands=AgentCommands(
                    self.memory,
                    cancel_anticipation=self.anticipation.cancel,
                    block_tokens=spec.layout.block_tokens,
                    now=time.time,
                ),
                store=store,
                tier=tier,
                adoption=self.adoption,
                imports=self.imports,
                refused=disk.refused,
                store_settings=disk.settings,
                place=None if store is None else StorePlace(disk.settings.own_directory() / spec.fingerprint.hex()),
                secret=self.cache.secret,
                prefault=None if store is None else Prefault(computing.arena, store.stats().num_blocks),
                weights_writer=None if computing.unsaved is None else WeightsWriter(computing.unsaved),
                backend=computing.backend,
                has_kv=computing.has_kv,
            )
            allocator.trim()  # of what reading the tokenizer took: 300 MiB for 262,144 words
            self._opened.pop_all()
        return components

    def _notes(self) -> tuple[str, ...]:
        computing, template = self._computing, self.encoder.template
        generic = () if self.encoder.tools_in_text is None else (GENERIC_TOOLS,)
        grows = f"template: {analyse_growth(template).summary()}"
        return *computing.notes, *computing.sampling.notes, grows, *generic

    @property
    def store(self) -> WarmStore | None:
        """The store; None without one, or if it could not be opened."""
        return self._disk.store

    @cached_property
    def _disk(self) -> _Disk:
        """Open the store, in the slot that it claims."""
        given, spec = self._settings.store, self._spec
        if not self._use_store:
            return _Disk(without_blocks(given))

        def open_in(directory: Path, place: StoreSettings) -> WarmStore:
            return WarmStore.open(
                directory,
                fingerprint=spec.fingerprint,
                layout=spec.layout,
                settings=place,
                model=self._computing.label,
                namespaces=self._settings.server.namespaces(),
                made_from=spec.made_from,
                on_saved=self._turn_saved,
                on_lost=lambda *turn: self.intake.turn_lost(*turn),
                read_records=self._computing.read_records,
                computed_by=self._computing.computed_by,
            )

        slots = ReplicaSlots(given, spec.fingerprint)
        try:
            store = slots.open(open_in)
        except StoreRefused as error:
            logger.error(
                "NOTHING IS READ FROM DISK OR SAVED until this is repaired and the engine restarted: %s", error
            )
            return _Disk(slots.settings, refused=str(error))
        self._opened.callback(store.close)
        return _Disk(slots.settings, store)

    def _turn_saved(self, namespace: str, agent: str, branch: int, num_tokens: int) -> None:
        """Note what the store has made durable, and export it. Called by the store's writer."""
        self.intake.turn_saved(namespace, agent, branch, num_tokens)
        if self.tier is not None:
            self.tier.export(namespace, agent, branch)

    @property
    def tier(self) -> ObjectTier | None:
        """The object tier, if there is to be one; none without a store that works."""
        return self._tier[0]

    @property
    def imports(self) -> TierImports | None:
        """What imports from the tier; None without one."""
        return self._tier[1]

    @cached_property
    def _tier(self) -> tuple[ObjectTier | None, TierImports | None]:
        settings, store, adoption = self._settings, self._disk.store, self.adoption
        if settings.tier.location is None or store is None or adoption is None:
            return None, None
        opened = tier_opener()(
            Replica(
                settings=settings.tier,
                store=store,
                adoption=adoption,
                fingerprint=self._spec.fingerprint,
                layout=self._spec.layout,
                max_branches=settings.cache.max_branches,
                prefill_s=self.costs.prefill,
                agents=lambda: self.intake.call(self.memory.book.everybody).result(),
                forget=self._purge_forgotten,
            )
        )
        self._opened.callback(opened[0].stop, 0.0)
        return opened

    def _purge_forgotten(self, namespace: str, agent: str, purged_at: float) -> bool:
        return AgentAdmin(self.components, namespace, agent).purge_forgotten(purged_at)

    @cached_property
    def adoption(self) -> Adoption | None:
        store = self._disk.store
        return None if store is None else Adoption(self.memory, store, block_tokens=self._spec.layout.block_tokens)

    @cached_property
    def cache(self) -> PrefixCache:
        settings, store, arena, spec = self._settings, self._disk.store, self._computing.arena, self._spec
        return PrefixCache(
            pool=BlockPool(
                arena.num_blocks,
                spec.layout.block_tokens,
                windows=tuple(arena.slots.values()),
            ),
            arena=arena,
            store=store,
            fingerprint=spec.fingerprint,
            secret=store.secret if store is not None else secret_of(self._disk.settings),
            min_reuse_tokens=settings.cache.min_reuse_tokens,
            namespace_share=settings.store.namespace_share,
            report_load=self.loop.report_load,
        )

    @cached_property
    def memory(self) -> AgentMemory:
        settings, layout, store = self._settings, self._spec.layout, self._disk.store
        cache, num_tenants = settings.cache, len(settings.server.namespaces())
        typical_blocks, typical_bytes = TYPICAL_TOKENS // layout.block_tokens, layout.kept_bytes(TYPICAL_TOKENS)
        disk_blocks = store.stats().disk_bytes * typical_blocks // typical_bytes if store is not None else 0
        pinned = math.inf if store is None else most_pinned(disk_blocks, num_tenants, settings.store.namespace_share)
        return AgentMemory(
            encoder=self.encoder,
            matcher=Matcher(
                self.encoder,
                min_reuse_tokens=cache.min_reuse_tokens,
                max_index_bytes=cache.index_bytes,
                clock=time.monotonic,
            ),
            book=BranchBook(max_branches=cache.max_branches),
            store=store,
            block_tokens=layout.block_tokens,
            save=self.loop.save,
            demote=self._demote,
            now=time.time,
            vocab_size=self._spec.vocab_size,
            max_breakpoint_tokens=BREAKPOINT_SHARE * disk_blocks * layout.block_tokens / num_tenants,
            max_pinned_blocks=pinned,
        )

    def _demote(self, branch: Branch, num_kept: int) -> None:
        if isinstance(branch, KnownBranch):
            self.loop.call(lambda core: core.cache.demote(branch.root, branch.ids, branch.hashes, num_kept=num_kept))

    @cached_property
    def anticipation(self) -> Anticipation:
        settings, loop = self._settings, self.loop
        is_wanted = settings.prompt.anticipate == "on" and settings.cache.reuse == "on"
        return Anticipation(
            encoder=self.encoder,
            memory=self.memory,
            form=self.renderer.form,
            settled=self.renderer.settled,
            new_table=self.cache.new_table,
            root=self.cache.root,
            submit=loop.submit,
            max_context=self._computing.max_context,
            is_busy=lambda: loop.is_busy,
            enabled=is_wanted and self._computing.backend is None,
        )

    @cached_property
    def intake(self) -> Intake:
        """What prepares requests, and takes ended turns."""
        settings, loop = self._settings.store, self.loop
        most = self._computing.arena.num_blocks
        retention = Retention(
            self.memory,
            RetentionRules(settings.agent_ttl_s, settings.anonymous_ttl_s, max_unsaved=most),
            ask_hot=lambda branches: loop.call(lambda core: hot_tokens(core.cache, branches)),
            run=lambda work: self.intake.run(work),
        )
        return Intake(
            preparer=self._preparer(),
            memory=self.memory,
            retention=retention,
            room=AdmissionQueueLimit(self._settings.engine.max_waiting),
            anticipation=self.anticipation,
            has_tier=self.imports is not None,
        )

    def _preparer(self) -> RequestBuilder:
        settings, computing, spec, renderer = self._settings, self._computing, self._spec, self.renderer
        offers = TailOffers(renderer, self.memory.system_texts)
        return RequestBuilder(
            encoder=self.encoder,
            renderer=renderer,
            lookup=PromptLookup(self.encoder, self.memory, reuse=settings.cache.reuse, offers=offers),
            limits=PromptLimits(
                computing.max_context, spec.vocab_size, spec.eos_ids, settings.engine.request_timeout_s
            ),
            visible=renderer.form.visible,
            constraints=computing.new_constraints(self.encoder, renderer.form),
            root=self.cache.root,
            new_table=self.cache.new_table,
            submit=self._submit,
            wake=self.loop.wake,
            only_at_points=bool(spec.layout.ending),
            tier=self.imports,
            see=computing.see,
            save_unnamed=settings.store.save_unnamed,
        )

    def _submit(self, request: Request) -> None:
        self.anticipation.began(request)
        self.loop.submit(request)


def check_places(settings: Settings, *, use_store: bool) -> None:
    """Check the directories and the secret, so that errors are raised before a model is read."""
    directory, fs = settings.store.directory(), OsFileSystem()
    if use_store:
        make_directory(directory, fs)
    if settings.tier.location is not None:
        tier_opener()
        if not use_store:
            raise ConfigError("tier needs a store and reuse: what comes from other replicas is kept there first")
    given = Given.of(settings.store)
    if settings.store.enabled and (given != NOTHING_GIVEN or (directory / SECRET_FILE).exists()):
        with suppress(StoreRefused):  # reported when files are opened; replies continue without them
            given_keys(directory, given, fs)
