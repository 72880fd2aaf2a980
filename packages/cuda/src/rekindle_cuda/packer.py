"""What packs weights for a card: `CardPacker`, a `Packer` in whose place the processor has its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rekindle.compute.cpu.packer import Layout, Packed
from rekindle.layer_forms import WeightFormat
from rekindle_cuda import packing


@dataclass(frozen=True, slots=True)
class CardPacker:
    """Sends one layer's weights after the other to the card and rounds them there; in bf16 they are left to torch."""

    device: torch.device
    formats: frozenset[WeightFormat] = frozenset(packing.LARGEST)

    def pack(self, weight: torch.Tensor, layout: Layout, weight_format: WeightFormat) -> packing.CardWeights:
        """As `Packer.pack`."""
        if weight_format == "bf16":
            raise ValueError("weights in bf16 are not packed for a card")
        values = weight.detach().to(self.device)
        return packing.pack(values if layout == "columns first" else values.T, weight_format)

    def multiply(self, packed: Packed, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """As `Packer.multiply`: rows are bf16 or fp32."""
        assert isinstance(packed, packing.CardWeights)
        return packing.multiply(packed, x, bias)
