"""Memory that layers and steps reuse: one flat tensor per name and dtype, grown when a request is larger.

Starts as zeros and keeps what its users write.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Scratch:
    """Named work tensors on one device. Taking a name again returns the same memory: one user at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """A contiguous tensor of this shape whose content is undefined."""
        size = math.prod(shape)
        flat = self._flat.get((name, dtype))
        if flat is None or flat.numel() < size:
            with torch.inference_mode(False):
                flat = torch.zeros(size, dtype=dtype, device=self._device)
            self._flat[name, dtype] = flat
        return flat[:size].view(shape)

    @property
    def num_bytes(self) -> int:
        return sum(flat.numel() * flat.itemsize for flat in self._flat.values())

    def check(self, *names: str) -> None:
        """Assert that the memory under these names is finite."""
        for (name, dtype), flat in self._flat.items():
            assert name not in names or bool(flat.isfinite().all()), f"{name} in {dtype} are not finite"
