"""What computes a model's steps: all that the others know of a device and its kernels.

`TorchCompute` is torch alone, on any of its devices. What packs weights and has kernels of its own stands elsewhere and
is chosen when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rekindle.kv.arena import KVArena
from rekindle.kv.attention import PagedAttention

BY_TORCH = "torch"


class Compute(Protocol):
    """What computes: two that are equal give the same bits."""

    @property
    def level(self) -> str:
        """Its name."""

    @property
    def digest(self) -> str | None:
        """A digest of code that is not in this package's Python; None if there is none."""

    def attention(self, arena: KVArena) -> PagedAttention:
        """Attention over the blocks of an arena."""


@dataclass(frozen=True, slots=True)
class TorchCompute:
    """Torch's own operations."""

    level: str = BY_TORCH
    digest: str | None = None

    def attention(self, arena: KVArena) -> PagedAttention:
        """As `Compute.attention`."""
        return PagedAttention(arena)


class Unsaved(Protocol):
    """What a start made of a model's weights and later starts can do without, if it is written to a file."""

    def save(self, is_stopped: Callable[[], bool] = ...) -> None:
        """Write it, unless stopped; what goes wrong is logged."""
