"""Load a model by name and prove that it works: `load_model`.

Order: find the files, refuse by config, load the weights, observe a probe pass, pack, compare the memory that weights
take with their files, run the trial forward, choose the formats, run the self-test. A model that cannot be served
raises ModelRefused with the reason and what would fit.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from rekindle import allocator
from rekindle.compute.cpu import packed, weights
from rekindle.compute.cpu.memory import memory_of
from rekindle.compute.cpu.packer import Packer
from rekindle.compute.cpu.saved_weights import ReadyWeights, SavedWeights
from rekindle.compute.cpu.weights import loaded_bytes
from rekindle.compute.devices import choose_device
from rekindle.compute.room import ROUNDED, with_room
from rekindle.config import ModelSettings
from rekindle.errors import ModelRefused
from rekindle.model import bnb_linears, checkpoint, formats, geometry, gguf, recurrent, trial
from rekindle.model.adapter import ATTENTION_NAME, register_attention
from rekindle.model.auto_formats import auto_formats
from rekindle.model.described import end_ids, generation_config
from rekindle.model.fingerprint import (
    DigestCache,
    fingerprint,
    model_identity,
    model_inputs,
    shown_inputs,
    tokenizer_digest,
)
from rekindle.model.gguf_weights import shown_grids, widened
from rekindle.model.latent import absorb_latents, map_notes
from rekindle.model.loaded import LoadedModel
from rekindle.model.loader import Weights, gguf_dtype, load_weights
from rekindle.model.proof import ProofCache
from rekindle.model.refusals import MOST_LAYERS, WHAT_FITS, quantiser, refuse_by_config, refusing, text_config
from rekindle.model.selftest import self_test
from rekindle.model.vision import vision_of
from rekindle.spec import ModelFacts, ModelSpec

log = logging.getLogger(__name__)


def load_model(
    settings: ModelSettings,
    *,
    block_tokens: int,
    max_context: int | None,
    format_map_dir: Path | None,
    compute_dtype: torch.dtype | None = None,
) -> LoadedModel:
    """Load, prove and describe a model.

    `format_map_dir` stores digests of weight files, decisions of the self-check, proofs, and packed weights once the
    caller saves what is `unsaved` (None: nothing). `compute_dtype` overrides the setting; float64 is the reference.
    """
    register_attention()
    place = choose_device(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    source, config = _named(settings, place.device)
    rope, longest = geometry.rope_regime(config, max_context)
    directory = source.fetch()
    place = with_room(place, settings, directory, config, compute_dtype)
    packer, most_bytes, settings = place.packer, place.memory.weight_bytes, place.named(settings)
    digests = DigestCache(format_map_dir / "digests.json" if format_map_dir else None)
    inputs = _inputs(directory, digests, config=config, rope=rope, tokenizer=tokenizer_digest(directory, digests))
    saved = SavedWeights(format_map_dir, source.key, settings, place.compute, packer, inputs)
    loaded, saved, ready, found, called = _loaded_and_probed(directory, config, saved, compute_dtype, most_bytes)
    model, settings = loaded.model, saved.settings
    recurrent.split_sequences(found.recurrent, block_tokens)
    if ready.chosen is None:
        linears, decision = weights.Linears(model, called, packer), saved.decision(found.dtype)
        chosen = _choose(linears, saved.setting, directory, longest, decision)
        ready = saved.pack(linears, chosen, ready.notes, loaded.names, loaded.grids)
    notes = (*place.notes, *loaded.notes, *geometry.rope_notes(rope), *ready.notes, *map_notes(model, ready.weights))
    notes += tuple(loaded.size_notes(settings.device, ready.weights, loaded_bytes(model), most_bytes))
    native = formats.forced_formats(found, formats.native_format(found.dtype))
    known = inputs(dtype=found.dtype, weight_format=ready.weights)
    spec = ModelSpec(
        name=source.name,
        architecture=type(model).__name__,
        vocab_size=found.vocab_size,
        max_context=longest,
        eos_ids=eos_ids(directory, config),
        fingerprint=model_identity(known),
        layout=formats.layout_of(found, native, block_tokens),
        facts=_facts(model, config, directory, num_parameters=loaded.num_parameters, weights=ready.weights),
        made_from=shown_inputs(known),
    )
    by, kept = place.compute, ready.unsaved
    draft = LoadedModel(model, spec, directory, place.device, found.dtype, "close", native, by, notes, unsaved=kept)
    return _seeing(_proved(_fused(draft), found, settings, format_map_dir))


def _seeing(loaded: LoadedModel) -> LoadedModel:
    """Return a model that is proved with its vision part, if it has one that is used: no other attention is set now."""
    vision, said = vision_of(loaded.model, loaded.directory)
    return replace(loaded, vision=vision, notes=(*loaded.notes, *said))


def _facts(model: Any, config: Any, directory: Path, *, num_parameters: int, weights: str) -> ModelFacts:
    """The facts of a loaded model; `weights` is the format that they are packed in, `native`, or the file's `codes`."""
    files = checkpoint.weight_files(directory)
    stored, file = quantiser(config) or str(model.dtype).removeprefix("torch."), checkpoint.gguf_file(files)
    if weights == "codes" and file is not None:
        weights = gguf.main_type(file)
    return ModelFacts(
        family=config.model_type,
        num_parameters=num_parameters,
        file_format="safetensors" if file is None else "gguf",
        file_bytes=sum(file.stat().st_size for file in files),
        weight_bytes=loaded_bytes(model),
        weight_format=stored if weights == "native" else weights,
    )


def _probed(model: Any) -> tuple[geometry.Geometry, set[torch.nn.Module]]:
    """What a pass through a loaded model shows, and the linear layers that it called."""
    refusal = f"{type(model).__name__} cannot run packed sequences with given positions"
    with refusing(refusal, "; " + WHAT_FITS):
        absorb_latents(model, ATTENTION_NAME)
        with packed.observed_linears(model) as called:
            return geometry.probe(model), called


def _named(settings: ModelSettings, device: str) -> tuple[checkpoint.Source, Any]:
    """The model that the settings name, and its config, which does not show that it cannot be served."""
    bnb_linears.check(settings.weights, device)
    source = checkpoint.Source.find(settings.model, settings.revision)
    config = read_config(source.fetch_description())
    generation_config(source.fetch_description())  # refused by its name before transformers reads it
    refuse_by_config(config, device)
    method = quantiser(config)
    if method is not None:
        bnb_linears.check_checkpoint(settings.weights, f"quantised by {method}")
    return source, config


def _loaded_and_probed(
    *given: Any,
) -> tuple[Weights, SavedWeights, ReadyWeights, geometry.Geometry, set[torch.nn.Module]]:
    """What `_loaded` and `_probed` give; the codes of a GGUF file are not packed early if a layer is not called."""
    loaded, saved, ready = _loaded(*given, coded=True)
    found, called = _probed(loaded.model)
    if ready.chosen is None and not packed.all_called(loaded.model, called):
        loaded, saved, ready = _loaded(*given, coded=False)
        found, called = _probed(loaded.model)
    return loaded, saved, ready, found, called


def _loaded(
    directory: Path,
    config: Any,
    saved: SavedWeights,
    compute_dtype: torch.dtype | None,
    most_bytes: int,
    *,
    coded: bool,
) -> tuple[Weights, SavedWeights, ReadyWeights]:
    """The weights, with those in place that an earlier start packed, and what is saved of them by the final settings.

    Where that start kept all of a GGUF file, nothing is read from it. `coded`: what has codes there is packed while it
    is read, so that no two layers have wide weights at a time. What is to be rounded on a card is on the processor.
    """
    settings, notes = saved.settings, tuple[str, ...]()
    held = "cpu" if settings.weights in ROUNDED else settings.device
    most_bytes = most_bytes if held == settings.device else memory_of(held).weight_bytes
    load = partial(load_weights, directory, config, settings, most_bytes=most_bytes, held=held)
    of_gguf = gguf_dtype(directory, config, settings, compute_dtype)
    if of_gguf is not None:
        early = replace(saved, keeps_codes=_fits(settings, *of_gguf, saved.packer))
        found = early.find(of_gguf[0])
        if found.contents is not None and found.contents.tensors:
            loaded = load(compute_dtype, found.contents.tensors)
            ready = early.place(loaded.model, found)
            if ready.chosen is not None:
                wide_bytes = sum(each.nbytes for each in loaded.model.parameters())  # placeholders too
                took = loaded_bytes(loaded.model) if early.keeps_codes else wide_bytes
                return replace(loaded, wide_bytes=took), early, ready
            notes = ready.notes
        coded = coded and early.keeps_codes
    loaded = load(compute_dtype, coded=coded and of_gguf is not None)
    dtype, is_wide = loaded.model.dtype, loaded.quantised is not None and loaded.is_wider
    if loaded.grids and coded and saved.packer is not None:
        made = packed.pack_codes(loaded.model, saved.packer, shown_grids(loaded.grids), widened)
        allocator.trim()  # of the last layer's values
        loaded = replace(loaded, notes=(*loaded.notes, *made), wide_bytes=loaded_bytes(loaded.model))
    if _fits(settings, dtype, is_wide if of_gguf is None else of_gguf[1], saved.packer):
        in_8_bits = replace(settings, weights="int8")
        saved = replace(saved, keeps_codes=bool(loaded.grids), settings=settings if loaded.grids else in_8_bits)
    if notes:
        return loaded, saved, ReadyWeights(None, notes)
    return loaded, saved, saved.place(loaded.model, saved.find(dtype))


def _fits(settings: ModelSettings, dtype: torch.dtype, widened: bool, packer: Packer | None) -> bool:
    """Whether weights in the checkpoint's own precision are quantised ones that are bf16 now, and can be packed."""
    can = settings.device == "cpu" and packer is not None and dtype == torch.bfloat16
    return widened and can and settings.weights == "native"


def _choose(
    linears: weights.Linears, setting: weights.Setting, directory: Path, max_context: int, decision: Path | None
) -> weights.WeightsChoice:
    with refusing(f"the self-check of the weights of {type(linears.model).__name__} failed"):
        return linears.choose(setting, directory, max_context, decision)


def _inputs(directory: Path, digests: DigestCache, **known: Any) -> partial[dict[str, Any]]:
    """`model_inputs` of a directory's files and of what is known; it takes `dtype` and `weight_format`."""
    files = [*checkpoint.weight_files(directory), *checkpoint.adapter_files(directory)]
    return partial(model_inputs, weights=[digests.digest(file) for file in files], **known)


def _fused(draft: LoadedModel) -> LoadedModel:
    """Let the kernels compute the layers that they can; without dummies if torch multiplies nothing then."""
    with refusing(f"the layers of {draft.spec.architecture} cannot be computed by the kernels", "; try kernels=torch"):
        num_fused = draft.compute.fuse(draft)
    if num_fused < len(draft.spec.layout.layers) or packed.has_linears(draft.model):
        return draft
    return replace(draft, row_multiple=1)


def _proved(
    draft: LoadedModel, found: geometry.Geometry, settings: ModelSettings, format_map_dir: Path | None
) -> LoadedModel:
    """Return the model in its final formats, proved now or, under the same conditions, at an earlier start."""
    identity = draft.spec.fingerprint
    proofs = ProofCache(format_map_dir, identity, settings, draft.spec.layout.block_tokens, draft.compute)
    proof = proofs.read()
    if proof is None:
        with refusing(f"the trial forward of {draft.spec.architecture} failed"):
            recurrent.check_that_they_go_on(found.recurrent, draft.spec.layout.block_tokens)
            trial.trial_forward(draft, found.dtype)
    loaded = _with_formats(draft, found, settings, identity, format_map_dir)
    if proof is None:
        proof = self_test(loaded)
        proofs.write(proof)
    allocator.trim()  # of what was widened on the way here, and of what was computed
    log.info("%s: %s (%s)", draft.spec.name, proof.promise, proof.finding)
    note = f"self-test: {proof.promise}; {proof.finding}"
    return replace(loaded, promise=proof.promise, is_steady=proof.is_steady, notes=(*loaded.notes, note))


def _with_formats(
    draft: LoadedModel, found: geometry.Geometry, settings: ModelSettings, identity: bytes, format_map_dir: Path | None
) -> LoadedModel:
    """Choose each layer's formats and give the model its final layout and fingerprint."""
    if settings.kv == "auto":
        map_path = format_map_dir / f"formats-{identity.hex()[:32]}.json" if format_map_dir else None
        found_formats = auto_formats(draft, found, map_path)
        chosen, notes = found_formats.layers, (*draft.notes, f"KV: {found_formats}")
    else:
        chosen, notes = formats.forced_formats(found, settings.kv), draft.notes
    layout = formats.layout_of(found, chosen, draft.spec.layout.block_tokens)
    spec = replace(draft.spec, layout=layout, fingerprint=fingerprint(identity, layout))
    return replace(draft, spec=spec, formats=chosen, notes=notes)


def read_config(directory: Path) -> Any:
    """The model's config; ModelRefused if transformers does not know the architecture or needs remote code."""
    path = directory / "config.json"
    if not path.is_file():
        raise ModelRefused(f"{directory} has no config.json: it is not a model directory of transformers")
    with refusing(f"{path} cannot be read"):
        _check_layers(path, json.loads(path.read_text("utf-8")))
    with refusing(f"{directory}: transformers cannot read its config"):
        return AutoConfig.from_pretrained(directory, trust_remote_code=False)


def _check_layers(path: Path, value: Any) -> None:
    """Refuse an impossible number of layers, in sub-configs too, before transformers lists them."""
    if not isinstance(value, dict):
        raise ModelRefused(f"{path} holds no object: it is not a config of transformers")
    for each in (value, *(part for part in value.values() if isinstance(part, dict))):
        layers = each.get("num_hidden_layers", 1)
        if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers <= MOST_LAYERS:
            shown = repr(layers)[:40]
            raise ModelRefused(f"{path}: num_hidden_layers must be a number from 1 to {MOST_LAYERS}, not {shown}")


def eos_ids(directory: Path, config: Any) -> frozenset[int]:
    """The ids that end a reply by the model's files; where these name none, that of the config's class."""
    value = getattr(text_config(config), "eos_token_id", None)
    return end_ids(directory) or frozenset(value if isinstance(value, list) else [] if value is None else [value])
