"""Models that are refused: why, and what is served instead.

Owns the reasons that a config shows, before weights are fetched or read, the part of it that describes the language
model, and how an error of transformers or of a model's code becomes a refusal. What neither shows, the probe pass and
the trial forward find.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from rekindle.errors import ModelRefused

MOST_LAYERS = 4096  # some configs list their layers one by one: a count of a billion takes all memory
WITHOUT_ATTENTION = frozenset({"mlp", "moe"})  # layers that see each token by itself
SERVED_LAYERS = WITHOUT_ATTENTION | {
    *("full_attention", "sliding_attention", "attention"),
    *("conv", "linear_attention", "mamba", "hybrid", "hybrid_sliding"),
}
WHAT_FITS = (
    "models that use the attention interface of transformers are served (Llama, Qwen 2 and 3, Mistral, Gemma, Phi, "
    "gpt-oss, DeepSeek V3, ...)"
)
LOAD_ERRORS = (
    *(ValueError, LookupError, TypeError, AttributeError, OSError, RuntimeError, ImportError, ArithmeticError),
    *(MemoryError, SafetensorError, StrictDataclassError, struct.error),
)
# Methods of quantised checkpoints and the packages that read them, which compile kernels at the first load.
COMPILED = {"gptq": "optimum with gptqmodel", "awq": "gptqmodel"}
# What a kind of layer needs that is not stored yet.
_LAYERS = {
    "chunked_attention": "attend within chunks, for which blocks have no part yet",
    "indexed_attention": "choose what they attend to by an index that is not stored yet",
    "compressed_sparse_attention": "attend to compressed KV that is not stored yet",
    "heavily_compressed_attention": "attend to compressed KV that is not stored yet",
    "minimax_m3_sparse": "choose what they attend to by an index that is not stored yet",
}
# By the beginning of `model_type` (of several, the longest counts): what of the same makers or size is served.
_SIBLINGS = {
    "qwen4": "Qwen3, Qwen3.5 and the text of Qwen3-VL",
    "deepseek": "DeepSeek V3 and R1, and R1's distills of Qwen 2.5 and Llama",
    "glm_moe_dsa": "GLM-4.7-Flash, GLM-4.5-Air, GLM-4.6 and GLM-4",
    "glm5": "GLM-4.7-Flash, GLM-4.5-Air, GLM-4.6 and GLM-4",
    "falcon": "Falcon 3, which has Llama's form, and Falcon-H1",
    "jamba": "Granite 4-H, Nemotron-H, Bamba and Falcon-H1",
    "llama4": "Llama 3",
    "olmo": "OLMo 2 and 3",
    "minimax": "MiniMax M2",
    "mistral": "Mistral Small 3, Ministral 3 and Mixtral",
    "axk2": "A.X K1",
    "hy_v": "Hunyuan's dense and MoE models",
}


def text_config(config: Any) -> Any:
    """The part of the config that describes the language model."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def quantised_part(config: Any) -> Any:
    """The config, or the part of it on the language model, that has a `quantization_config`; None: neither."""
    parts = (config, text_config(config))
    return next((part for part in parts if getattr(part, "quantization_config", None) is not None), None)


def quantiser(config: Any) -> str | None:
    """The method by which a checkpoint is quantised; None if it is not."""
    part = quantised_part(config)
    if part is None:
        return None
    described = part.quantization_config
    method = described.get("quant_method") if isinstance(described, dict) else getattr(described, "quant_method", None)
    return str(getattr(method, "value", method) or "a method without a name")


def refuse_by_config(config: Any, device: str) -> None:
    """Refuse a model by its config alone; ModelRefused names the reason, and what is served in its place."""
    text, name = text_config(config), config.model_type
    method = quantiser(config)
    if method in COMPILED and not device.startswith("cuda"):
        raise ModelRefused(
            f"{name} is quantised by {method}; what reads it, {COMPILED[method]}, compiles kernels for minutes at the "
            f"first load. On {device} take the model's bf16 checkpoint with weights=int8 or weights=int4, or one in "
            "FP8, compressed-tensors or GGUF"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused(f"{name} is an encoder-decoder model; decoder-only language models are served")
    others = sorted(set(getattr(text, "layer_types", None) or ()) - SERVED_LAYERS)
    if others:
        reasons = dict.fromkeys(_LAYERS.get(kind, "are none that we know") for kind in others)
        raise ModelRefused(
            f"{name} has layers of kind {', '.join(others)}: they {'; they '.join(reasons)}; {_instead(name)}"
        )


def _instead(model_type: str) -> str:
    """What is served in place of a model, as the end of a sentence."""
    known = [start for start in _SIBLINGS if model_type.startswith(start)]
    return f"served are {_SIBLINGS[max(known, key=len)]}" if known else WHAT_FITS


@contextmanager
def refusing(what: str, advice: str = "") -> Iterator[None]:
    """Turn errors of transformers or of a model's code into ModelRefused: what failed, why, what would fit."""
    try:
        yield
    except LOAD_ERRORS as error:
        raise ModelRefused(f"{what}: {type(error).__name__}: {first_line(error)}{advice}") from error


def first_line(error: BaseException) -> str:
    """The beginning of an error's message."""
    lines = str(error).strip().splitlines() or [""]
    return lines[0][:300]
