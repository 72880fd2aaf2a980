"""The CPU by our kernels, as what computes a model."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.compute.cpu.fused_attention import FusedAttention
from rekindle.compute.cpu.kernels.library import KernelLibrary
from rekindle.kv.arena import KVArena
from rekindle.kv.attention import PagedAttention
from rekindle.model.compute import Compute, TorchCompute


@dataclass(frozen=True, slots=True)
class KernelCompute:
    """The kernels of one library, and torch for what they do not know."""

    library: KernelLibrary

    @property
    def level(self) -> str:
        """That of the library."""
        return self.library.level

    @property
    def digest(self) -> str:
        """That of the library."""
        return self.library.digest

    def attention(self, arena: KVArena) -> PagedAttention:
        """As `Compute.attention`."""
        return FusedAttention(arena, self.library)


def compute_by(library: KernelLibrary | None) -> Compute:
    """The CPU by these kernels, or torch if there are none."""
    return TorchCompute() if library is None else KernelCompute(library)
