"""How a checkpoint stores its weights: dtype, quantisation, GGUF; and how transformers is made to read them.

Owns which quantised checkpoints are widened where: some while they are loaded, because transformers computes with them
on a GPU alone, those of compressed-tensors anywhere. Others keep their quantisation, and no dtype is forced on them.
Reads headers of weight files, no weights.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rekindle.config import ModelSettings
from rekindle.model import bnb_linears, checkpoint, gguf
from rekindle.model.refusals import quantised_part, quantiser, text_config

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DECOMPRESSED = "compressed-tensors"  # its library widens by itself, in the first pass of a model or when asked to
WIDENED_OFF_CUDA = frozenset({"fp8", "mxfp8", "mxfp4"})


@dataclass(frozen=True, slots=True)
class CheckpointForm:
    """The form of some weight files, as the settings have them read.

    `method`: by which they are quantised; None if they are not. `file`: a GGUF file, and `types` of its tensors.
    `dtype`: of values that are not quantised, as far as the files or the config say.
    """

    files: list[Path]
    config: Any
    settings: ModelSettings
    method: str | None
    file: Path | None
    types: frozenset[str]
    dtype: torch.dtype | None

    @classmethod
    def of(cls, files: list[Path], config: Any, settings: ModelSettings) -> CheckpointForm:
        """Read headers and config."""
        file = checkpoint.gguf_file(files)
        types = gguf.types_and_values(file)[0] if file is not None else frozenset[str]()
        dtype = _float_type(types) if file is not None else getattr(text_config(config), "dtype", None)
        return cls(files, config, settings, quantiser(config), file, types, dtype)

    @property
    def is_widened(self) -> bool:
        """Whether quantised values are wider here once they are loaded."""
        by_transformers = self.method in WIDENED_OFF_CUDA and not self.settings.device.startswith("cuda")
        return by_transformers or self.method == DECOMPRESSED or bool(self.blocks)

    @property
    def blocks(self) -> frozenset[str]:
        """The types of quantised blocks in a GGUF file."""
        return self.types - gguf.PLAIN

    @property
    def words(self) -> str | None:
        """What is quantised, in words; None if nothing is."""
        if self.blocks:
            return f"what a GGUF file has as {', '.join(sorted(self.blocks))}"
        return None if self.method is None else f"what is quantised by {self.method}"

    def wanted_dtype(self, compute_dtype: torch.dtype | None) -> tuple[torch.dtype | str, list[str]]:
        """The dtype to request from transformers, and a note if it is not what is stored or what the user specifies."""
        if self.method is not None and not self.is_widened:
            ignored = self.settings.dtype != "auto" or compute_dtype is not None
            return "auto", ["dtype is ignored: the checkpoint is quantised and brings its own"] if ignored else []
        if compute_dtype is not None:
            return compute_dtype, []
        if self.settings.dtype != "auto":
            return DTYPES[self.settings.dtype], []
        if self.dtype == torch.float16 and (self.method is not None or bnb_linears.is_bnb(self.settings.weights)):
            return torch.bfloat16, ["the checkpoint's values are fp16: loaded as bf16 (dtype=fp32 keeps all digits)"]
        if self.dtype == torch.float16:
            return torch.float32, ["the checkpoint is fp16: loaded as fp32 (dtype=bf16 takes half the memory)"]
        return self.dtype if self.file is not None and self.dtype is not None else "auto", []

    def notes(self) -> list[str]:
        """What is to be said of how these weights compute."""
        if self.blocks and self.settings.weights == "int4":
            cost = "changes three of ten first choices of small models"
            return [f"weights=int4 rounds {self.words} again, which {cost}: native keeps the file's codes"]
        described = quantised_part(self.config).quantization_config if self.method == bnb_linears.METHOD else None
        if not isinstance(described, dict) or not described.get("load_in_8bit"):
            return []
        return [bnb_linears.NO_THRESHOLD_NOTE] if described.get("llm_int8_threshold", 1.0) > 0 else []

    def needed_bytes(self, dtype: torch.dtype | str) -> int:
        """Bytes, at least, of the weights once they are loaded with this dtype; "auto": with the one that is stored."""
        if bnb_linears.is_bnb(self.settings.weights):
            return checkpoint.expected_bytes(self.files, bnb_linears.BITS[self.settings.weights] / 8)
        if self.is_widened and self.file is None:
            return checkpoint.widened_bytes(self.files, _packed_bits(quantised_part(self.config)))
        return checkpoint.expected_bytes(self.files, dtype.itemsize if isinstance(dtype, torch.dtype) else None)

    def expected_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the weights in their files, as far as values are not quantised in this dtype."""
        if self.blocks and self.file is not None:
            return self.file.stat().st_size
        return checkpoint.expected_bytes(self.files, dtype.itemsize if self.method is None else None)

    def reading(self, dtype: torch.dtype | str) -> tuple[Any, dict[str, Any]]:
        """The config and the other arguments with which transformers reads the weights."""
        read: dict[str, Any] = {"use_safetensors": True} if self.file is None else gguf.reading(self.file)
        placed = {"device_map": {"": self.settings.device}}
        if bnb_linears.is_bnb(self.settings.weights):
            computing = dtype if isinstance(dtype, torch.dtype) else self.dtype or torch.bfloat16
            wanted = bnb_linears.quantization_config(self.settings.weights, computing)
            return self.config, {**read, **placed, "quantization_config": wanted}
        if self.method is None:
            return self.config, read
        config = copy.deepcopy(self.config)
        described = quantised_part(config).quantization_config
        if self.is_widened and self.method != DECOMPRESSED and isinstance(described, dict):
            described["dequantize"] = True  # transformers would not where it sees a GPU, which the model is not for
        if self.method == bnb_linears.METHOD and isinstance(described, dict):
            described["llm_int8_threshold"] = bnb_linears.NO_THRESHOLD
        return config, {**read, **placed}


def _float_type(types: frozenset[str]) -> torch.dtype:
    """The dtype to which transformers would load a GGUF file's types: blocks are widened to bf16."""
    if types <= {"F32", "F64"}:
        return torch.float32
    return torch.float16 if types <= {"F32", "F16"} else torch.bfloat16


def _packed_bits(part: Any) -> int:
    """How many bits a value has that is packed into integers, by the config: 4 unless it says otherwise."""
    described = part.quantization_config
    groups: Mapping[str, Any] = described.get("config_groups") or {} if isinstance(described, dict) else {}
    found = [(group.get("weights") or {}).get("num_bits") for group in groups.values() if isinstance(group, dict)]
    return max((bits for bits in found if isinstance(bits, int)), default=4)
