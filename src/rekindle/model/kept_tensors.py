"""The tensors that a model's files hold, as what a later start needs in place of those files.

Owns how a tensor becomes bytes and is one again, and which tensors have their values in packed weights: placeholders.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True, slots=True, eq=False)
class PlainTensor:
    """A tensor by torch's name of its dtype; `memory`: its bytes, None if its values are in packed weights."""

    dtype: str
    shape: tuple[int, ...]
    memory: np.ndarray | None


def kept_tensors(model: Any, names: Iterable[str]) -> dict[str, PlainTensor]:
    """What a model holds now by these names, of its state dict; nothing is copied that lies in one piece.

    The dict itself is not asked for: bitsandbytes rounds scales of its layers again when it makes one.
    """
    held = dict[str, torch.Tensor](model.named_parameters(remove_duplicate=False))
    held.update(model.named_buffers(remove_duplicate=False))
    kept = dict[str, PlainTensor]()
    for name in names:
        tensor = held[name].detach()
        memory = None if is_placeholder(tensor) else tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        kept[name] = PlainTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), memory)
    return kept


def as_tensors(kept: Mapping[str, PlainTensor]) -> dict[str, torch.Tensor]:
    """Tensors over the same memory, which must not be written to; placeholders for what is packed."""
    return {name: _tensor(each) for name, each in kept.items()}


def _tensor(kept: PlainTensor) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, kept.dtype)
    if kept.memory is None:
        return torch.ones((), dtype=dtype).expand(kept.shape)  # from which an embedding's factor is found
    return torch.frombuffer(_buffer(kept.memory), dtype=dtype).view(kept.shape)


def _buffer(memory: np.ndarray) -> Any:
    """Memory that is only read, for torch, which warns of such; it stays mapped as long as the buffer is there."""
    kind: Any = type("Held", (ctypes.c_uint8 * memory.nbytes,), {})
    buffer = kind.from_address(memory.ctypes.data)
    buffer.memory = memory
    return buffer


def placeholder(weight: torch.Tensor, device: torch.device | None = None) -> nn.Parameter:
    """A parameter with the shape and dtype of packed weights, on their device; its values are NaN and take no memory.

    On the CPU if the weights are nowhere (meta) and nobody says where packed ones are.
    """
    device = device or (torch.device("cpu") if weight.is_meta else weight.device)
    nothing = torch.full((), torch.nan, dtype=weight.dtype, device=device)
    return nn.Parameter(nothing.expand(weight.shape), requires_grad=False)


def is_placeholder(weight: torch.Tensor) -> bool:
    """Whether a tensor is a placeholder: of all its values only one is there."""
    return weight.numel() > 1 and not any(weight.stride())
