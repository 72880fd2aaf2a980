"""A copy to be made before a block may be written, by the arena or another owner of the bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `num_tokens` tokens of block `source` to block `target`, all parts and layers."""

    source: int
    target: int
    num_tokens: int
