"""Modules that compute over packed weights by a packer, in the places of those of torch.

Knows nothing of which modules are replaced: `packed` does.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn

from rekindle.compute.cpu.kernels.grids import rows_of
from rekindle.compute.cpu.kernels.linear import PackedWeights
from rekindle.compute.cpu.packer import Packed, Packer

PANEL, STRIP = 64, 16  # columns: see kernels/native/panel.hpp
GATHERED = ("bf16", "grid4", "grid8")  # formats whose rows an embedding can read back
CHECKED_IDS = 64


class PackedModule(nn.Module):
    """What replaces a module: packed weights, and a `weight` that has the original's shape, dtype and device only.

    Its values are NaN and take no memory, so code that multiplies by it cannot go unnoticed.
    """

    def __init__(self, packed: Packed, weight: nn.Parameter, original: Any, packer: Packer) -> None:
        super().__init__()
        self.packed, self.weight, self._packer = packed, weight, packer
        self.train(original.training)

    def extra_repr(self) -> str:
        """Show the shape as torch's modules do."""
        return f"in_features={self.packed.depth}, out_features={self.packed.columns}"


class PackedLinear(PackedModule):
    """A linear layer, [..., in_features] -> [..., out_features]. No gradients."""

    def __init__(self, packed: Packed, weight: nn.Parameter, original: Any, packer: Packer) -> None:
        super().__init__(packed, weight, original, packer)
        self.in_features, self.out_features = packed.depth, packed.columns
        self.bias: nn.Parameter | None = original.bias
        if self.bias is not None and self.bias.device != weight.device:
            self.bias = nn.Parameter(self.bias.to(weight.device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the weights, add the bias, round once: as `Packer.multiply`."""
        return self._packer.multiply(self.packed, x, self.bias)


class PackedEmbedding(PackedModule):
    """The embedding whose weights are those of a packed head: rows are gathered from the panels, rounded to bf16 once.

    A subclass may multiply them by a number that it has, as those of Gemma do.
    """

    def __init__(self, packed: Packed, weight: nn.Parameter, original: Any, packer: Packer) -> None:
        super().__init__(packed, weight, original, packer)
        assert isinstance(packed, PackedWeights)  # those of the processor alone are gathered from
        self._panels = packed
        self.num_embeddings, self.embedding_dim = packed.columns, packed.depth
        self._pairs: torch.Tensor | None = None  # [panel, block, strip, pair, column], two values each
        if packed.format == "bf16":
            memory = (ctypes.c_uint8 * packed.num_bytes).from_address(packed.address)  # torch wants to write to arrays
            pairs = torch.frombuffer(memory, dtype=torch.int32)
            self._pairs = pairs.view(-1, -(-packed.depth // (2 * STRIP)), PANEL // STRIP, STRIP, STRIP)
        self._factor = None if type(original) is nn.Embedding else factor_of(original)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the weights of these ids: [...] -> [..., embedding_dim]; IndexError if there is none."""
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_embeddings:
            raise IndexError(f"ids must lie between 0 and {self.num_embeddings - 1}")
        rows = self._of_grid(ids) if self._pairs is None else self._of_pairs(self._pairs, ids)
        return rows.contiguous() if self._factor is None else rows * self._factor

    def _of_pairs(self, pairs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        at = ids % PANEL
        found = pairs[ids // PANEL, :, at // STRIP, :, at % STRIP]  # [..., block, pair]
        return found.view(torch.bfloat16).flatten(-2)[..., : self.embedding_dim]

    def _of_grid(self, ids: torch.Tensor) -> torch.Tensor:
        rows = rows_of(self._panels, ids.reshape(-1).numpy())
        return torch.from_numpy(rows).to(torch.bfloat16).view(*ids.shape, self.embedding_dim)


def factor_of(embedding: nn.Embedding) -> torch.Tensor | None:
    """The buffer of a scaled embedding by which it multiplies its rows, in their dtype; None if there is none."""
    ids = torch.arange(min(CHECKED_IDS, embedding.num_embeddings))
    with torch.inference_mode():
        rows, found = embedding.weight[ids], embedding(ids)
    numbers = [buffer.to(rows.dtype) for buffer in embedding.buffers() if buffer.dim() == 0]
    return next((number for number in numbers if torch.equal(rows * number, found)), None)
