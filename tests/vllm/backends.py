"""Memory of other engines' attention backends, in the orders that they have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rekindle_vllm.packing import BlockShape

BACKENDS = ("heads first", "tokens first", "k before v", "paired", "interleaved layers", "random")


@dataclass(frozen=True)
class Backend:
    """A layer's `cache` [blocks, ...] and the operator that writes K and V of one block into it."""

    cache: Tensor
    shape: BlockShape
    write: Callable[[Tensor, Tensor, int], None]

    def fill(self, seed: int) -> tuple[Tensor, Tensor]:
        """Write random K and V into all blocks; return them as [blocks, heads, tokens, dim]."""
        made = torch.Generator().manual_seed(seed)
        k, v = (
            torch.randn(len(self.cache), self.shape.heads, self.shape.tokens, dim, generator=made).to(self.cache.dtype)
            for dim in (self.shape.k_dim, self.shape.v_dim)
        )
        for block in range(len(self.cache)):
            self.write(k[block].transpose(0, 1), v[block].transpose(0, 1), block)
        return k, v


def backend(kind: str, shape: BlockShape, dtype: torch.dtype, num_blocks: int) -> Backend:
    """A backend of this kind whose memory is zeros."""
    tokens, heads, k_dim, v_dim = shape.tokens, shape.heads, shape.k_dim, shape.v_dim
    k_of, v_of = None, None
    if kind == "heads first":
        cache = torch.zeros(num_blocks, heads, tokens, k_dim + v_dim, dtype=dtype)
    elif kind == "tokens first":
        cache = torch.zeros(num_blocks, tokens, heads, k_dim + v_dim, dtype=dtype).transpose(1, 2)
    elif kind == "interleaved layers":
        cache = torch.zeros(num_blocks, 3, heads, tokens, k_dim + v_dim, dtype=dtype)[:, 1]
    elif kind == "k before v":  # all keys of a head, then all its values
        cache = torch.zeros(num_blocks, heads, tokens, k_dim + v_dim, dtype=dtype)
        k_of, v_of = cache.view(num_blocks, heads, 2 * tokens, k_dim).chunk(2, dim=2)
    elif kind == "paired":  # keys of 16 tokens together, two dimensions next to each other; values plain
        cache = torch.zeros(num_blocks, heads, tokens, k_dim + v_dim, dtype=dtype)
        keys = cache.view(num_blocks, heads, 2, -1)[:, :, 0].view(num_blocks, heads, tokens // 16, k_dim // 2, 16, 2)
        k_of = keys.permute(0, 1, 2, 4, 3, 5)
        v_of = cache.view(num_blocks, heads, 2 * tokens, v_dim).chunk(2, dim=2)[1]
    else:
        return _random(shape, dtype, num_blocks)
    k_of = cache[..., :k_dim] if k_of is None else k_of
    v_of = cache[..., k_dim:] if v_of is None else v_of

    def write(k: Tensor, v: Tensor, block: int) -> None:
        k_of[block].copy_(k.transpose(0, 1).reshape(k_of.shape[1:]))
        v_of[block].copy_(v.transpose(0, 1).reshape(v_of.shape[1:]))

    return Backend(cache, shape, write)


def _random(shape: BlockShape, dtype: torch.dtype, num_blocks: int) -> Backend:
    order = torch.randperm(shape.num_values, generator=torch.Generator().manual_seed(0))
    cache = torch.zeros(num_blocks, shape.num_values, dtype=dtype)

    def write(k: Tensor, v: Tensor, block: int) -> None:
        flat = torch.cat((k.transpose(0, 1).reshape(-1), v.transpose(0, 1).reshape(-1)))
        cache[block, order] = flat

    return Backend(cache, shape, write)
