"""Weights from a checkpoint into memory, unchanged, and what they take there.

Owns which class of transformers loads a model, in which dtype, and what is said where memory and files differ. A
`quantization_config` passes through, and no dtype is forced on it. Some quantised checkpoints are widened while they
are loaded, others by their first forward pass: so `Weights.size_notes` counts again after that.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForMultimodalLM

from rekindle.config import ModelSettings
from rekindle.errors import ModelRefused
from rekindle.model import checkpoint, experts, gguf
from rekindle.model.adapter import ATTENTION_NAME
from rekindle.model.device import total_bytes
from rekindle.model.refusals import WHAT_FITS, first_line, refusing, text_config

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BYTES_SLACK = 1.05  # tied weights and small buffers


@dataclass(frozen=True, slots=True)
class Weights:
    """A loaded model in eval mode on its device, what is to be said of it, and the bytes it should take.

    `quantiser`: the method of a quantised checkpoint, else None. `blocks`: the types of quantised blocks in a GGUF
    file, which transformers has widened.
    """

    model: Any
    notes: tuple[str, ...]
    expected_bytes: int
    quantiser: str | None
    blocks: frozenset[str] = frozenset()

    def size_notes(self, device: str) -> list[str]:
        """Say if the weights take more memory now than their files; ModelRefused if more than there is."""
        loaded = loaded_bytes(self.model)
        if loaded <= self.expected_bytes * BYTES_SLACK:
            return []
        why = "some weights were loaded wider than stored"
        if self.quantiser is not None:
            why = f"what is quantised by {self.quantiser} is dequantised here, on {device}"
        most = total_bytes(device)
        if loaded > most:
            raise ModelRefused(
                f"the weights take {loaded:,} bytes, and the memory of {device} is {most:,}: {why}; choose a smaller "
                "model, or one in a form that stays small here"
            )
        return [f"weights take {loaded:,} bytes where the files hold {self.expected_bytes:,}: {why}"]


def load_weights(
    directory: Path, config: Any, settings: ModelSettings, compute_dtype: torch.dtype | None = None
) -> Weights:
    """Load the weights of a model directory; ModelRefused with the reason if they cannot be, or are not all there."""
    files = checkpoint.weight_files(directory)
    if checkpoint.adapter_files(directory) and importlib.util.find_spec("peft") is None:
        raise ModelRefused(f"{directory} holds a PEFT adapter: merge it into the weights, or install peft")
    quantiser, file = _quantiser(config), checkpoint.gguf_file(files)
    types = gguf.types_and_values(file)[0] if file is not None else frozenset[str]()
    widened = _float_type(types) if file is not None else None
    stored = widened or getattr(text_config(config), "dtype", None)
    dtype, notes = _wanted_dtype(stored, settings, compute_dtype, quantiser is not None)
    if widened is not None and dtype == "auto":
        dtype = widened
    _check_memory(
        checkpoint.expected_bytes(files, dtype.itemsize if isinstance(dtype, torch.dtype) else None), settings
    )
    model, report = _loaded(directory, config, dtype, settings.device, quantiser, file)
    model.eval()
    if settings.device == "cpu":
        experts.use_padded_experts(model)
    notes += check_loaded(model, report)
    expected = checkpoint.expected_bytes(files, model.dtype.itemsize if quantiser is None else None)
    blocks = types - gguf.PLAIN
    if blocks:
        notes.append(f"the weights are a GGUF file's {', '.join(sorted(blocks))}, widened by transformers")
    return Weights(model, tuple(notes), expected, quantiser, blocks)


def _float_type(types: frozenset[str]) -> torch.dtype:
    """The dtype to which transformers would load a GGUF file's types: blocks are widened to bf16."""
    if types <= {"F32", "F64"}:
        return torch.float32
    return torch.float16 if types <= {"F32", "F16"} else torch.bfloat16


def _quantiser(config: Any) -> str | None:
    """The method by which a checkpoint is quantised; None if it is not."""
    described = getattr(config, "quantization_config", None)
    if described is None:
        return None
    method = described.get("quant_method") if isinstance(described, dict) else getattr(described, "quant_method", None)
    return str(getattr(method, "value", method) or "a method without a name")


def _loaded(
    directory: Path, config: Any, dtype: torch.dtype | str, device: str, quantiser: str | None, file: Path | None
) -> tuple[Any, dict[str, Any]]:
    """The model on its device, and transformers' report of missing and unexpected weights."""
    # Models that also see have a class of their own; asked for text alone, it is a causal language model like others.
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto = AutoModelForCausalLM if is_causal else AutoModelForMultimodalLM
    placed = {"device_map": {"": device}} if quantiser is not None and device != "cpu" else {}
    read = {"use_safetensors": True} if file is None else gguf.reading(file)
    with refusing(f"{config.model_type} cannot be loaded", "; " + WHAT_FITS):
        try:
            model, report = auto.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                trust_remote_code=False,
                output_loading_info=True,
                **read,
                **placed,
            )
        except ImportError as error:
            if quantiser is None:
                raise
            raise ModelRefused(
                f"the checkpoint is quantised by {quantiser}, and a library that reads this is missing: install it, or "
                f"choose the model's bf16 checkpoint ({first_line(error)})"
            ) from error
        if not placed:
            model.to(device)
    return model, report


def _wanted_dtype(
    stored: torch.dtype | None, settings: ModelSettings, compute_dtype: torch.dtype | None, quantised: bool
) -> tuple[torch.dtype | str, list[str]]:
    """The dtype to request from transformers, and a note if it is not what is stored or what the user specifies."""
    if quantised:
        ignored = settings.dtype != "auto" or compute_dtype is not None
        return "auto", ["dtype is ignored: the checkpoint is quantised and brings its own"] if ignored else []
    if compute_dtype is not None:
        return compute_dtype, []
    if settings.dtype != "auto":
        return DTYPES[settings.dtype], []
    if stored == torch.float16:
        return torch.float32, ["the checkpoint is fp16: loaded as fp32 (dtype=bf16 takes half the memory)"]
    return "auto", []


def _check_memory(needed: int, settings: ModelSettings) -> None:
    """Refuse weights that do not fit in the device's memory, before the system kills the process half-way."""
    most = total_bytes(settings.device)
    if needed > most:
        raise ModelRefused(
            f"the weights take {needed:,} bytes, and the memory of {settings.device} is {most:,}: choose a smaller "
            "model, a quantised one, or dtype=bf16 where they are loaded as fp32"
        )


def check_loaded(model: Any, report: dict[str, Any]) -> list[str]:
    """Refuse a checkpoint that lacks weights, or holds some of other shapes: they would be random. Note unused ones."""
    missing = sorted([*report.get("missing_keys", ()), *(str(x) for x in report.get("mismatched_keys", ()))])
    if missing:
        raise ModelRefused(f"the checkpoint lacks {len(missing)} weights of {type(model).__name__}, first {missing[0]}")
    unexpected = sorted(report.get("unexpected_keys", ()))
    return [f"{len(unexpected)} tensors of the checkpoint are not used, first {unexpected[0]}"] if unexpected else []


def loaded_bytes(model: Any) -> int:
    """Bytes of all parameters, each storage once."""
    found = {}
    for tensor in model.parameters():
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
