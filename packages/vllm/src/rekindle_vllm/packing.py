"""Where another engine's backend keeps each value of a block, learned by writing numbers through its own operator.

Backends interleave K with V, put tokens before heads, or pack keys for one instruction set, and say so nowhere. So
numbers are written as K and V of one block, digit by digit, and looked for in its memory: a permutation, or the backend
is refused. Knows no engine. What was in the block before is there afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rekindle.errors import ModelRefused

BASE = 64  # of the digits: exact in bf16, whose integers are exact up to 256
# Write K [tokens, heads, k_dim] and V [tokens, heads, v_dim] of one block by the backend's own operator.
WriteBlock = Callable[[Tensor, Tensor, int], object]


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A block of the engine: its tokens, and one worker's heads."""

    tokens: int
    heads: int
    k_dim: int
    v_dim: int

    @property
    def num_values(self) -> int:
        """Values of K and V together."""
        return self.tokens * self.heads * (self.k_dim + self.v_dim)


class Values:
    """K or V of one layer's blocks, read and written as [n, heads, tokens, dim] whatever their order in memory.

    A block is `pieces` pieces of as many tokens; `block * pieces + n` is its `n`-th. `offsets` are the places of one
    block's values [heads, tokens, dim], in elements from the beginning of the block.
    """

    def __init__(self, cache: Tensor, offsets: np.ndarray, pieces: int = 1) -> None:
        heads, tokens, dim = offsets.shape
        assert tokens % pieces == 0, f"{pieces} pieces of {tokens} tokens"
        cut = offsets.reshape(heads, pieces, tokens // pieces, dim).swapaxes(0, 1)
        self._shape = cut.shape[1:]
        self._pieces = pieces
        self._block_stride = cache.stride(0)
        split = _piece_split(cut)
        if split is None:
            end = self._block_stride * (len(cache) - 1) + int(offsets.max()) + 1
            self._flat = cache.as_strided((end,), (1,), cache.storage_offset())
            self._offsets = torch.from_numpy(cut.reshape(pieces, -1).astype(np.int64)).to(cache.device)
            self._view = None
        else:
            shape, strides = split
            start = cache.storage_offset() + int(cut[0, 0, 0, 0])
            view = cache.as_strided((len(cache), *shape), (self._block_stride, *strides), start)
            self._view = view[:, 0] if pieces == 1 else view

    @property
    def is_strided(self) -> bool:
        """Whether memory is a strided view, which is copied several times as fast as single values are."""
        return self._view is not None

    def read(self, pieces: Tensor) -> Tensor:
        """A copy of these pieces (int64 [n]): [n, heads, tokens, dim]."""
        found = self._flat[self._places(pieces)] if self._view is None else self._view[self._index(pieces)]
        return found.reshape(len(pieces), *self._shape)

    def write(self, pieces: Tensor, values: Tensor) -> None:
        """Replace these pieces (int64 [n], each once) by `values` [n, heads, tokens, dim]."""
        if self._view is None:
            self._flat[self._places(pieces)] = values.reshape(len(pieces), -1)
        else:
            index = self._index(pieces)
            self._view[index] = values.reshape(len(pieces), *self._view.shape[len(index) :])

    def _index(self, pieces: Tensor) -> tuple[Tensor, ...]:
        """Where each piece is in the view: its block, and if there are several in one, which of them it is."""
        if self._pieces == 1:
            return (pieces,)
        blocks = torch.div(pieces, self._pieces, rounding_mode="floor")
        return blocks, pieces - blocks * self._pieces

    def _places(self, pieces: Tensor) -> Tensor:
        blocks = torch.div(pieces, self._pieces, rounding_mode="floor")
        return (blocks * self._block_stride)[:, None] + self._offsets[pieces - blocks * self._pieces]


@dataclass(frozen=True, slots=True)
class LayerValues:
    """K and V of one layer of the engine."""

    k: Values
    v: Values


def learn(cache: Tensor, shape: BlockShape, write: WriteBlock, block: int = 0, pieces: int = 1) -> LayerValues:
    """Learn the order of a layer's `cache` [blocks, ...] from `block`, which nobody may be using; values by `pieces`.

    ModelRefused if a block does not hold every value of K and V once and as it is.
    """
    if not cache.is_floating_point() or cache.itemsize < 2 or cache[0].numel() != shape.num_values:
        raise ModelRefused(
            f"a block of {tuple(cache.shape[1:])} values of {cache.dtype} does not hold K and V of {shape.tokens} "
            f"tokens and {shape.heads} heads of {shape.k_dim} and {shape.v_dim} as they are: let the engine keep KV in "
            "the model's own precision (kv_cache_dtype auto)"
        )
    kept = cache[block].clone()
    try:
        found = _numbers_in(cache, shape, write, block)
    finally:
        cache[block].copy_(kept)
    if not np.array_equal(np.sort(found), np.arange(shape.num_values)):
        raise ModelRefused("this backend does not keep every value of K and V once, so its blocks cannot be stored")
    offsets = np.empty(shape.num_values, dtype=np.int64)
    offsets[found] = _offsets(tuple(cache.shape[1:]), cache.stride()[1:])
    num_k = shape.tokens * shape.heads * shape.k_dim
    k = offsets[:num_k].reshape(shape.heads, shape.tokens, shape.k_dim)
    v = offsets[num_k:].reshape(shape.heads, shape.tokens, shape.v_dim)
    return LayerValues(Values(cache, k, pieces), Values(cache, v, pieces))


def _numbers_in(cache: Tensor, shape: BlockShape, write: WriteBlock, block: int) -> np.ndarray:
    """The number of the value at each place of a block, in the order of its logical axes."""
    numbers = torch.arange(shape.num_values, device=cache.device)
    num_k = shape.tokens * shape.heads * shape.k_dim
    found = torch.zeros(shape.num_values, dtype=torch.int64, device=cache.device)
    scale = 1
    while scale < shape.num_values:
        digits = ((numbers // scale) % BASE).to(cache.dtype)
        k = digits[:num_k].view(shape.heads, shape.tokens, shape.k_dim).transpose(0, 1).contiguous()
        v = digits[num_k:].view(shape.heads, shape.tokens, shape.v_dim).transpose(0, 1).contiguous()
        write(k, v, block)
        found += cache[block].reshape(-1).to(torch.int64) * scale
        scale *= BASE
    return found.cpu().numpy()


def _offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Offsets in memory of the values of a tensor, in the order of its axes, flat."""
    offsets = np.zeros((), dtype=np.int64)
    for size, stride in zip(shape, strides, strict=True):
        offsets = offsets[..., None] + stride * np.arange(size)
    return offsets.reshape(-1)


def _piece_split(cut: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shape and strides of a view [pieces, heads, ..., dim ...] of the values at these offsets; None if there is none.

    `cut` [pieces, heads, tokens, dim].
    """
    starts = cut[:, 0, 0, 0]
    step = int(starts[1] - starts[0]) if len(starts) > 1 else 0
    is_regular = step >= 0 and np.array_equal(cut - cut[:1], np.broadcast_to(_steps(len(cut), step), cut.shape))
    split = next(_affine_splits(cut[0]), None) if is_regular else None
    if split is None:
        return None
    shape, strides = split
    return (len(cut), *shape), (step, *strides)


def _steps(count: int, step: int) -> np.ndarray:
    return (step * np.arange(count)).reshape(-1, 1, 1, 1)


def _affine_splits(offsets: np.ndarray) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes and strides of a view of [heads, tokens, dim] whose values are at these offsets, the fewest axes first.

    Tokens and dimensions may each be two axes, as in packings for matrix instructions.
    """
    heads, tokens, dim = offsets.shape
    for token_split in _splits(tokens):
        for dim_split in _splits(dim):
            shape = (heads, *token_split, *dim_split)
            grid = offsets.reshape(shape)
            first = int(offsets[0, 0, 0])
            strides = tuple(int(grid[_unit(len(shape), axis)]) - first if n > 1 else 0 for axis, n in enumerate(shape))
            if min(strides) >= 0 and np.array_equal(offsets.reshape(-1), first + _offsets(shape, strides)):
                yield shape, strides


def _splits(size: int) -> list[tuple[int, ...]]:
    return [(size,), *((size // inner, inner) for inner in range(2, size) if size % inner == 0)]


def _unit(num_axes: int, axis: int) -> tuple[int, ...]:
    return tuple(int(number == axis) for number in range(num_axes))
