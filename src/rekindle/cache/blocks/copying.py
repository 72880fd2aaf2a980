"""What must be copied before a block may be written; the arena, or whoever has the bytes, does it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `num_tokens` tokens of block `source` to block `target`, all parts and layers."""

    source: int
    target: int
    num_tokens: int
