"""Builds an engine that computes here: model, hot memory and core; the `builder` connects them with the rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from rekindle.compute.cpu.kernels.records import record_reader
from rekindle.compute.devices import choose_device
from rekindle.compute.load import load_model
from rekindle.config import Settings
from rekindle.engine.builder import Builder, Computing, check_places
from rekindle.engine.capacity import capacity, check_budget, check_disk
from rekindle.engine.components import Components
from rekindle.engine.core.chain_checks import checks_of
from rekindle.engine.core.core import EngineCore
from rekindle.engine.core.costs import StepCosts
from rekindle.engine.core.scheduler import MIN_CHUNK, Scheduler
from rekindle.engine.core.speculation import Speculation, max_draft
from rekindle.model.loaded import LoadedModel, Runner
from rekindle.model.proof import computed_by
from rekindle.model.sampling_defaults import SamplingDefaults
from rekindle.spec import KVLayout
from rekindle.text.constraints.matcher import ReplyConstraints
from rekindle.text.prompt import PromptEncoder
from rekindle.text.replies import find_reply_ends

SCORED_BYTES = 64 << 20  # of logits in a step for scores of prompts: 110 rows of a vocabulary of 150,000


def assemble(
    settings: Settings, *, clock: Callable[[], datetime] = datetime.now, before_store: Callable[[], None] = lambda: None
) -> Components:
    """Load and verify the model, call `before_store`, open the store, connect the components; all or nothing."""
    started = {"imports": time.time()}
    use_store = settings.store.enabled and settings.cache.reuse == "on"
    place = choose_device(settings.model)
    check_budget(settings.cache, place.device, place.memory)
    check_places(settings, use_store=use_store)
    loaded = load_model(
        settings.model,
        block_tokens=settings.cache.block_tokens,
        max_context=settings.engine.max_context,
        format_map_dir=settings.store.directory() if use_store else None,
    )
    started["weights"] = time.time()
    encoder = PromptEncoder.from_dir(loaded.directory, clock=clock)
    if loaded.vision is not None:
        encoder = encoder.with_pictures(loaded.vision.form(encoder))
    spec = replace(loaded.spec, eos_ids=loaded.spec.eos_ids | find_reply_ends(encoder))
    memory = loaded.compute.memory(loaded.device)
    chunk_tokens = max(settings.engine.max_chunk_tokens or memory.chunk_tokens, _least_chunk(loaded))
    hot = capacity(settings.cache, spec, memory, chunk_tokens=chunk_tokens)
    if use_store:
        check_disk(settings.store, spec)
    arena = loaded.compute.arena(spec.layout, hot.num_blocks, loaded.device, hot.windows)
    computing = Computing(
        device=loaded.device,
        spec=spec,
        encoder=encoder,
        arena=arena,
        max_context=hot.max_context,
        notes=loaded.notes,
        promise=loaded.promise,
        label=spec.name,
        sampling=SamplingDefaults.read(loaded.directory, settings.model.sampling),
        new_core=lambda parts: _core(
            settings, loaded, loaded.compute.runner(loaded, arena), parts, chunk_tokens=chunk_tokens
        ),
        new_constraints=lambda encoder, form: ReplyConstraints(encoder, form, ends=spec.eos_ids),
        unsaved=loaded.unsaved,
        see=None if loaded.vision is None else loaded.vision.see,
        read_records=record_reader(settings.model.kernels),
        computed_by=computed_by(loaded.device, loaded.compute),
    )
    before_store()
    try:
        return Builder(settings, computing, started, use_store=use_store).components
    finally:
        loaded.compute.rest()  # from here on the engine's thread computes


def _least_chunk(loaded: LoadedModel) -> int:
    """Return how many rows a step must have room for: those of a picture that see each other."""
    return 0 if loaded.vision is None else loaded.vision.mutual_rows


def chunk_multiple(layout: KVLayout) -> int:
    """Return where chunks of a prompt may end: with recurrent states, where blocks do, so that their bits do not depend
    on the cuts."""
    return layout.block_tokens if layout.states else 1


def _core(settings: Settings, loaded: LoadedModel, runner: Runner, parts: Builder, *, chunk_tokens: int) -> EngineCore:
    scheduler = Scheduler(
        settings.engine,
        parts.costs,
        max_chunk_tokens=chunk_tokens,
        chunk_multiple=chunk_multiple(loaded.spec.layout),
        max_scored_rows=max(MIN_CHUNK, SCORED_BYTES // (4 * loaded.spec.vocab_size)),
    )
    return EngineCore(
        runner=runner,
        cache=parts.cache,
        scheduler=scheduler,
        speculation=Speculation(
            StepCosts(),
            max_tokens=max_draft(
                settings.engine.speculate, is_steady=loaded.is_steady, has_states=bool(loaded.spec.layout.states)
            ),
            max_step_s=settings.engine.max_stall_s,
        ),
        checks=checks_of(
            cache=parts.cache,
            scheduler=scheduler,
            runner=runner,
            store=parts.store,
            one_in=_checked(settings, loaded),
        ),
        min_reuse_tokens=settings.cache.min_reuse_tokens,
        on_turn=parts.intake.turn_ended,
    )


def _checked(settings: Settings, loaded: LoadedModel) -> int:
    """Return one of how many restored blocks is computed again; 0, none, where that cannot have equal bits: if they
    depend on the path, as states do on where a prompt was cut, and if others compute what is in the store, too."""
    is_exact = loaded.promise == "bitwise" and not loaded.spec.layout.states
    return settings.store.check_restored if is_exact and settings.tier.location is None else 0
