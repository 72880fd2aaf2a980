"""Linear layers of bitsandbytes, in 4 and in 8 bits: when a model can have them, and what they take in memory.

Owns what that library is asked for. transformers puts its layers in place of every nn.Linear but the head while it
loads a bf16 checkpoint. Experts that are one tensor for a whole layer stay as they are: see `weights`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeGuard

import torch
from torch import nn

from rekindle.errors import ConfigError

BnbWeights = Literal["bnb-4bit", "bnb-8bit"]
BITS: dict[BnbWeights, int] = {"bnb-4bit": 4, "bnb-8bit": 8}
METHOD = "bitsandbytes"  # of quantised checkpoints
# In 8 bits, inputs above a threshold would be multiplied in 16 bits: columns that any row of a step chooses for all its
# rows, so that a row's bits would depend on the others. Without one each row has a scale of its own. On 4,096 tokens of
# the bundled model the KL to bf16 is 0.0005, with the usual threshold 0.0002.
NO_THRESHOLD = 0.0
NO_THRESHOLD_NOTE = (
    "inputs of 8-bit layers are all rounded to 8 bits: with the threshold of the checkpoint, above which they keep 16, "
    "a reply would depend on other requests"
)
# What that kernel takes multiples of, and the attribute by which a layer uses it.
KERNEL_COLUMNS, KERNEL_DEPTH, KERNEL_SWITCH = 32, 64, "support_avx512bf16_for_cpu"


def is_bnb(weights: str) -> TypeGuard[BnbWeights]:
    """Whether a value of the setting names a form of bitsandbytes."""
    return weights in BITS


def check(weights: str, device: str) -> None:
    """Raise ConfigError if the library is missing, or cannot compute on this device."""
    if not is_bnb(weights):
        return
    instead = f"weights=int{BITS[weights]} needs the kernels for the CPU alone"
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(f"weights={weights} needs bitsandbytes: pip install 'rekindle[bnb]'; {instead}")
    if device != "cpu" and not device.startswith("cuda"):
        raise ConfigError(f"weights={weights} is for the CPU and CUDA, not for {device}; {instead}")


def check_checkpoint(weights: str, found: str) -> None:
    """Raise ConfigError for a checkpoint that is no bf16 one, but what is `found`."""
    if is_bnb(weights):
        raise ConfigError(
            f"weights={weights} is for checkpoints in bf16, and this one is {found}: leave weights at native, or name "
            "the model's bf16 checkpoint"
        )


def quantization_config(weights: BnbWeights, dtype: torch.dtype) -> Any:
    """What transformers takes to load a checkpoint in this form: in 4 bits nf4, its scales quantised again.

    ConfigError if the layers cannot compute in this dtype.
    """
    from transformers import BitsAndBytesConfig

    if dtype == torch.float64:
        raise ConfigError(f"weights={weights} computes in bf16 or fp32, not in fp64")
    if weights == "bnb-8bit":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=NO_THRESHOLD)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def layers(model: nn.Module) -> list[nn.Linear]:
    """The linear layers of bitsandbytes in a model, its own or those of a checkpoint."""
    found = (module for module in model.modules() if isinstance(module, nn.Linear))
    return [module for module in found if type(module).__module__.startswith("bitsandbytes.")]


def avoid_unfit_kernels(model: Any) -> None:
    """Compute without the library's kernel for AVX512-BF16 in fp32, which it rounds, and where it fails on a shape."""
    for layer in layers(model):
        if model.dtype == torch.float32 or layer.out_features % KERNEL_COLUMNS or layer.in_features % KERNEL_DEPTH:
            setattr(layer, KERNEL_SWITCH, False)


def scales(layer: Any) -> Iterator[torch.Tensor]:
    """The tensors of a layer that are no parameters: scales, and the values that codes stand for."""
    state = getattr(layer.weight, "quant_state", None)
    for holder in (layer.weight, state, getattr(state, "state2", None), getattr(layer, "state", None)):
        values = () if holder is None else vars(holder).values()
        yield from (value for value in values if isinstance(value, torch.Tensor))


def num_bytes(layers: Iterable[nn.Linear]) -> int:
    """Bytes of the weights of layers with their scales, each storage once."""
    held = (tensor.untyped_storage() for layer in layers for tensor in (layer.weight.data, *scales(layer)))
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())
