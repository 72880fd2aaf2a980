"""Weights from a checkpoint into memory, and what they take there.

Owns which class of transformers loads a model, and what is said where memory and files differ. What is widened on the
way is packed again later, so `Weights.size_notes` counts again after that.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.utils import logging as transformers_logging

from rekindle.config import ModelSettings, show_bytes
from rekindle.errors import ModelRefused
from rekindle.model import bnb_linears, checkpoint, gguf, gguf_weights
from rekindle.model.adapter import ATTENTION_NAME
from rekindle.model.checkpoint_form import DECOMPRESSED, CheckpointForm
from rekindle.model.gguf_config import ARCHITECTURE
from rekindle.model.gguf_grids import FileGrid
from rekindle.model.gguf_header import GgufHeader
from rekindle.model.kept_tensors import PlainTensor, as_tensors
from rekindle.model.padded_experts import use_padded_experts
from rekindle.model.refusals import WHAT_FITS, first_line, refusing

BYTES_SLACK = 1.05  # tied weights and small buffers


@dataclass(frozen=True, slots=True)
class Weights:
    """A loaded model in eval mode on its device, notes for the user, and its expected size.

    `wide_bytes`: what it took once it was loaded. `quantised`: what of the files is, in words; None if nothing is.
    `num_parameters`: shared ones once. `names`: of the weights that were read, where that is what takes time; `grids`:
    where the codes of some of them are.
    """

    model: Any
    notes: tuple[str, ...]
    expected_bytes: int
    wide_bytes: int
    quantised: str | None = None
    num_parameters: int = 0
    names: tuple[str, ...] = ()
    grids: Mapping[str, FileGrid] = field(default_factory=dict)

    @property
    def is_wider(self) -> bool:
        """Whether it took more memory than its files."""
        return self.wide_bytes > self.expected_bytes * BYTES_SLACK

    def size_notes(self, device: str, weights: str, took: int, most: int) -> list[str]:
        """Say why the weights take, or took, more than their files; ModelRefused if it is more than there is room for.

        `weights`: the format in which they are packed; `took`: their bytes in it, `most` that the device has for them.
        """
        if not self.is_wider:
            return []
        why = "some weights were loaded wider than stored"
        if self.quantised is not None and weights == "codes":
            why = f"{self.quantised} has codes of 4 or 8 bits here, with a step for every 32"
        elif self.quantised is not None:
            why = f"{self.quantised} is widened here, on {device}"
        if took > most:
            raise ModelRefused(
                f"the weights take {took:,} bytes, and {device} has room for {most:,}: {why}; choose a smaller "
                "model, or one in a form that stays small here"
            )
        if took * BYTES_SLACK < self.wide_bytes:
            why += f", to {show_bytes(self.wide_bytes)}, and packed then"
        return [f"weights: {why}"]


def gguf_dtype(
    directory: Path, config: Any, settings: ModelSettings, compute_dtype: torch.dtype | None
) -> tuple[torch.dtype, bool] | None:
    """The dtype that a GGUF file's values get, and whether some are quantised; None for others. Reads no weights."""
    form = CheckpointForm.of(checkpoint.weight_files(directory), config, settings)
    dtype, _ = form.wanted_dtype(compute_dtype)
    return (dtype, bool(form.blocks)) if form.file is not None and isinstance(dtype, torch.dtype) else None


def load_weights(
    directory: Path,
    config: Any,
    settings: ModelSettings,
    compute_dtype: torch.dtype | None = None,
    kept: Mapping[str, PlainTensor] | None = None,
    *,
    coded: bool = False,
    most_bytes: int | None = None,
    held: str | None = None,
) -> Weights:
    """Load the weights of a model directory; ModelRefused with the reason if they cannot be, or are not all there.

    `kept`: all that an earlier start left of the weights of a GGUF file, which is not opened then. `coded`: what has
    codes in a GGUF file gets placeholders, to be packed. More than `most_bytes` are refused before they are read.
    `held`: the device that they are loaded to, unless it is that of the settings, where the model computes.
    """
    computes_on = settings.device
    if held is not None and held != computes_on:
        settings = replace(settings, device=held)
    files, adapters = checkpoint.weight_files(directory), checkpoint.adapter_files(directory)
    if adapters and importlib.util.find_spec("peft") is None:
        raise ModelRefused(f"{directory} holds a PEFT adapter: merge it into the weights, or install peft")
    form = CheckpointForm.of(files, config, settings)
    if form.file is not None:
        bnb_linears.check_checkpoint(settings.weights, "a GGUF file")
    dtype, notes = form.wanted_dtype(compute_dtype)
    needed = form.expected_bytes(torch.bfloat16) if kept or coded else form.needed_bytes(dtype)
    _check_room(settings.device, needed, needed if most_bytes is None else most_bytes)
    found = _of_gguf(form, config, dtype, coded=coded) if not adapters and not kept else None
    state = as_tensors(kept) if kept else None if found is None else found.state
    config, read = form.reading(dtype) if state is None else (config, {"state_dict": state})
    model, report = _loaded(None if state is not None else directory, config, {"dtype": dtype, **read}, form.method)
    if form.is_widened and isinstance(dtype, torch.dtype):
        _widen_halves(model, dtype)
    _make_ready(model, None if "device_map" in read else settings.device, computes_on)
    notes += [*form.notes(), *check_loaded(model, report)]
    return Weights(
        model=model,
        notes=tuple(notes),
        expected_bytes=form.expected_bytes(model.dtype),
        wide_bytes=storage_bytes(model, {}),
        quantised=form.words,
        num_parameters=model.num_parameters(),
        names=tuple(state or ()),
        grids={} if found is None else found.grids,
    )


def _make_ready(model: Any, device: str | None, computes_on: str) -> None:
    """Move a model to a device, if it is not there, and let it compute as it has to where it will."""
    if device is not None:
        model.to(device)
    model.eval()
    bnb_linears.avoid_unfit_kernels(model)
    if computes_on == "cpu":
        use_padded_experts(model)


def _of_gguf(
    form: CheckpointForm, config: Any, dtype: torch.dtype | str, *, coded: bool
) -> gguf_weights.GgufWeights | None:
    """The weights in a GGUF file; None if there is none, or transformers has to read it."""
    if form.file is None or not isinstance(dtype, torch.dtype):
        return None
    gguf.check_package()
    header = GgufHeader.read(form.file)
    architecture = header.text(ARCHITECTURE) or ""
    if not gguf_weights.is_read_here(architecture) or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    with refusing(f"{config.model_type} cannot be loaded", "; " + WHAT_FITS):
        of_models = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return gguf_weights.read_weights(header, architecture, of_models, config, dtype, coded=coded)


@contextmanager
def _bars(*, shown: bool) -> Iterator[None]:
    """Let transformers show how far it is, or keep it from that."""
    if shown or not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()


def _loaded(
    directory: Path | None, config: Any, read: Mapping[str, Any], method: str | None
) -> tuple[Any, dict[str, Any]]:
    """The model, and transformers' report of missing and unexpected weights; no directory: of a state dict."""
    # Models that also see have a class of their own; asked for text alone, it is a causal language model like others.
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto = AutoModelForCausalLM if is_causal else AutoModelForMultimodalLM
    if directory is None:
        auto = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # which asks for nothing on the hub
    with refusing(f"{config.model_type} cannot be loaded", "; " + WHAT_FITS), _bars(shown=directory is not None):
        try:
            model, report = auto.from_pretrained(
                directory,
                config=config,
                attn_implementation=ATTENTION_NAME,
                trust_remote_code=False,
                output_loading_info=True,
                **read,
            )
        except ImportError as error:
            if method is None:
                raise
            raise ModelRefused(
                f"the checkpoint is quantised by {method}, and a library that reads this is missing: install it, or "
                f"choose the model's bf16 checkpoint ({first_line(error)})"
            ) from error
        if method == DECOMPRESSED:
            _decompress(model)
    return model, report


def _decompress(model: Any) -> None:
    """Widen now what the first pass would, so that it can be counted and packed; inputs are not quantised then."""
    from compressed_tensors.compressors.base import decompress_module
    from compressed_tensors.quantization import QuantizationMetadata

    compressor = model.hf_quantizer.compressor  # its `decompress_model` would wrap every module
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and hasattr(module, "quantization_scheme"):
            decompress_module(module, compressor.force_compression_format)
            QuantizationMetadata.clear_quantization(module)
            module.__dict__.pop("forward", None)  # that of its class is left
    compressor.remove_decompression_hook(model)


def _widen_halves(model: Any, dtype: torch.dtype) -> None:
    """Give what has 16 bits this dtype: values next to quantised ones keep that of their files."""
    for parameter in model.parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.to(dtype)


def _check_room(device: str, needed: int, most: int) -> None:
    """Refuse weights that do not fit in the device's memory, before the system kills the process half-way."""
    if needed > most:
        raise ModelRefused(
            f"the weights take {needed:,} bytes, and {device} has room for {most:,}: choose a smaller model, a "
            "quantised one, or dtype=bf16 where they are loaded as fp32"
        )


def check_loaded(model: Any, report: dict[str, Any]) -> list[str]:
    """Refuse a checkpoint that lacks weights, or holds some of other shapes: they would be random. Note unused ones."""
    missing = sorted([*report.get("missing_keys", ()), *(str(x) for x in report.get("mismatched_keys", ()))])
    if missing:
        raise ModelRefused(f"the checkpoint lacks {len(missing)} weights of {type(model).__name__}, first {missing[0]}")
    unexpected = sorted(report.get("unexpected_keys", ()))
    return [f"{len(unexpected)} tensors of the checkpoint are not used, first {unexpected[0]}"] if unexpected else []


def storage_bytes(model: Any, others: Mapping[int, int]) -> int:
    """Bytes of all parameters, of what bitsandbytes keeps next to its own, and of `others` by address, each once."""
    found = dict(others)
    scales = (scale for layer in bnb_linears.layers(model) for scale in bnb_linears.scales(layer))
    for tensor in (*model.parameters(), *scales):
        for part in _plain(tensor):
            storage = part.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold a tensor's bytes: itself, or those inside a subclass that has no storage of its own."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from _plain(getattr(tensor, name))
