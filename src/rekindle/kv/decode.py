"""Decodes the blocks of a query range to K and V in the compute dtype, in a few passes over cached memory.

Owns the resulting order of dimensions, which is `q4h.unpacking_order` for Q4H. Of that, sixteen codes are one int64:
its low nibbles and its high nibbles become eight bytes each by a shift and a mask, and a byte 2 * code minus 15 is the
level. The arena's row of a layer is gathered first, 3 to 9 kB a block.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from rekindle.kv.arena import TORCH_DTYPES, LayerView
from rekindle.kv.coded import CODECS
from rekindle.kv.plan import QueryRange
from rekindle.spec import CODED, group_size

_TWICE_LOW_NIBBLES = 0x1E1E1E1E1E1E1E1E
_CODES_PER_INT64 = 16


# Memory that layers and steps reuse: one flat tensor per name and dtype, grown when a request is larger.
#
# Starts as zeros and keeps what its users write.


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


class Decoder:
    """Reads blocks of `block_tokens` tokens through scratch memory."""

    def __init__(self, block_tokens: int, scratch: Scratch) -> None:
        self._block_tokens = block_tokens
        self._scratch = scratch

    def decode(self, layer: LayerView, query_range: QueryRange, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys [kv heads, context, q_dim] and values [kv heads, context, out_dim]; finite but undefined beyond the
        range's blocks."""
        blocks = query_range.blocks
        rows = self._scratch.take("rows", torch.int64, len(blocks), layer.rows.shape[1])
        torch.index_select(layer.rows, 0, blocks, out=rows)
        tokens = query_range.num_context
        k = self._scratch.take("keys", dtype, layer.spec.num_kv_heads, tokens, layer.spec.k_dim)
        v = self._scratch.take("values", dtype, layer.spec.num_kv_heads, tokens, layer.spec.v_dim)
        self._decode_sections(layer, rows, "k", k)
        self._decode_sections(layer, rows, "v", v)
        if not layer.spec.latent:
            return k, v
        keys = self._scratch.take("latents and rotary keys", dtype, *k.shape[:2], layer.spec.q_dim)
        return torch.cat((k, v), dim=-1, out=keys), k

    def _decode_sections(self, layer: LayerView, rows: Tensor, kind: Literal["k", "v"], out: Tensor) -> None:
        sections = layer.k_sections if kind == "k" else layer.v_sections
        fmt = layer.spec.k_format if kind == "k" else layer.spec.v_format
        num_tokens = rows.shape[0] * self._block_tokens
        filled = out[:, :num_tokens].unflatten(1, (rows.shape[0], -1)).flatten(2)  # [heads, blocks, tokens * dim]
        if fmt not in CODED:
            stored = layer.within(rows, sections[0], TORCH_DTYPES[sections[0].dtype])
            filled.copy_(stored.transpose(0, 1))
            return
        table = CODECS[fmt].step_table(group_size(kind, out.shape[-1], fmt), out.dtype, out.device)
        steps = self._steps(layer.within(rows, sections[1], torch.uint8), table)
        if fmt == "q8h":
            filled.copy_(layer.within(rows, sections[0], torch.int8).transpose(0, 1)).mul_(steps)
            return
        levels = self._levels(layer.within(rows, sections[0], torch.int64), out.dtype)
        torch.mul(levels, steps, out=filled)

    def _steps(self, scale_bytes: Tensor, table: Tensor) -> Tensor:
        """The step of every value, [heads, blocks, values], of bytes [blocks, heads, groups]; table [256, group]."""
        num_blocks, heads, groups = scale_bytes.shape
        index = self._scratch.take("scale index", torch.int32, heads, num_blocks, groups)
        index.copy_(scale_bytes.transpose(0, 1))
        steps = self._scratch.take("steps", table.dtype, heads * num_blocks * groups, table.shape[1])
        torch.index_select(table, 0, index.view(-1), out=steps)
        return steps.view(heads, num_blocks, groups * table.shape[1])

    def _levels(self, words: Tensor, dtype: torch.dtype) -> Tensor:
        """2 * code - 15 for every value, [heads, blocks, values], of int64 words [blocks, heads, n]."""
        num_blocks, heads, count = words.shape
        nibbles = self._scratch.take("nibbles", torch.int64, heads, num_blocks, count, 2)
        by_head = words.transpose(0, 1)
        torch.bitwise_left_shift(by_head, 1, out=nibbles[..., 0])
        torch.bitwise_right_shift(by_head, 3, out=nibbles[..., 1])
        in_bytes = nibbles.bitwise_and_(_TWICE_LOW_NIBBLES).view(torch.int8)
        levels = self._scratch.take("levels", dtype, heads, num_blocks, count * _CODES_PER_INT64)
        return levels.copy_(in_bytes.sub_(15).view(levels.shape))
