"""Geometry of a model's KV cache: layers, formats, and the offset of every byte of a block.

Owns all offsets: no other module computes one. Knows no tensors and no files.

A block holds `block_tokens` consecutive tokens and has one *part* per layer group: the full-attention layers
together, then one part per window size, which a block has only where a resume point needs it. The payload of a part is
the same in memory, in flight and on disk:

    layer 0: | K codes | K scales | V codes | V scales |   layer 1: | ...      (q4h)
             | K               | V               |                             (native)

every section starting at a multiple of 64 bytes. Shapes, per layer: codes u32 [head][token][dim/8], scales u8
[head][token][dim/group], native [head][token][dim].
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal

Format = Literal["q4h", "bf16", "fp32", "fp64"]
NATIVE_BYTES: dict[Format, int] = {"bf16": 2, "fp32": 4, "fp64": 8}
FORMAT_VERSION = 1
SECTION_ALIGN = 64
CODES_PER_WORD = 8


def rotation_size(dim: int) -> int:
    """The size b of the rotated sub-blocks: the largest power of two that divides the head dimension."""
    return dim & -dim


def group_size(kind: Literal["k", "v"], dim: int) -> int:
    """Codes that share one scale: 16 for K; for V 32 where it divides the head dimension, else 16."""
    return 32 if kind == "v" and dim % 32 == 0 else 16


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One KV layer: heads and head dimensions, the window in tokens (None: full attention), the stored formats."""

    index: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None
    k_format: Format
    v_format: Format

    def __post_init__(self) -> None:
        for dim, fmt in ((self.k_dim, self.k_format), (self.v_dim, self.v_format)):
            if fmt == "q4h" and dim % 16:
                raise ValueError(f"layer {self.index}: q4h needs a head size divisible by 16, not {dim}")


@dataclass(frozen=True, slots=True)
class Section:
    """A typed range of a part's payload; `shape` without the block axis, `dtype` one of u32 u8 bf16 fp32 fp64."""

    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class LayerSections:
    """Where one layer's K and V lie: `(codes, scales)` for q4h, `(values,)` for native formats."""

    k: tuple[Section, ...]
    v: tuple[Section, ...]


@dataclass(frozen=True, slots=True)
class PartLayout:
    """One layer group of a block: its layers in order and the bytes of its payload."""

    index: int
    name: str
    window: int | None
    layers: tuple[LayerSpec, ...]
    sections: tuple[LayerSections, ...]
    payload_bytes: int


@dataclass(frozen=True)
class KVLayout:
    """Parts, sections and sizes of a block of `block_tokens` tokens for these layers."""

    block_tokens: int
    layers: tuple[LayerSpec, ...]

    def __post_init__(self) -> None:
        if not 16 <= self.block_tokens <= 256 or self.block_tokens & (self.block_tokens - 1):
            raise ValueError(f"block_tokens must be a power of two from 16 to 256, not {self.block_tokens}")
        if not self.layers:
            raise ValueError("a model without KV layers has nothing to cache")

    @cached_property
    def parts(self) -> tuple[PartLayout, ...]:
        """The full-attention part first (if there is one), then one part per window size, ascending."""
        windows = sorted({layer.window for layer in self.layers}, key=lambda w: (w is not None, w or 0))
        return tuple(self._part(index, window) for index, window in enumerate(windows))

    @property
    def ending_parts(self) -> tuple[PartLayout, ...]:
        """The parts that blocks have only near resume points: windows, but for the smallest if all layers have one."""
        return self.parts[1:]

    def cover_blocks(self, part: PartLayout) -> int:
        """How many blocks keep an ending part for one resume point, at most: its window, and a block before it."""
        if part.window is None:
            raise ValueError(f"the part {part.name} does not end")
        return -(-part.window // self.block_tokens) + 2

    def kept_bytes(self, num_tokens: int) -> int:
        """Bytes of a conversation of `num_tokens` tokens with one resume point, its end."""
        num_blocks = -(-num_tokens // self.block_tokens)
        windows = (min(num_blocks, self.cover_blocks(part)) * part.payload_bytes for part in self.ending_parts)
        return num_blocks * self.parts[0].payload_bytes + sum(windows)

    def describe(self) -> str:
        """Formats and bytes in one line, for display."""
        formats = ", ".join(f"{name} on {count} layers" for name, count in self.formats().items())
        parts = [f"{self.parts[0].payload_bytes / self.block_tokens:,.0f} bytes a token"]
        parts += [
            f"{part.payload_bytes / self.block_tokens:,.0f} more in the last {part.window:,}"
            for part in self.ending_parts
        ]
        return f"{formats} (K/V); {', '.join(parts)}"

    def _part(self, index: int, window: int | None) -> PartLayout:
        layers = tuple(layer for layer in self.layers if layer.window == window)
        sections, offset = [], 0
        for layer in layers:
            k, offset = self._sections("k", layer.num_kv_heads, layer.k_dim, layer.k_format, offset)
            v, offset = self._sections("v", layer.num_kv_heads, layer.v_dim, layer.v_format, offset)
            sections.append(LayerSections(k, v))
        name = "full" if window is None else f"window-{window}"
        return PartLayout(index, name, window, layers, tuple(sections), offset)

    def _sections(
        self, kind: Literal["k", "v"], heads: int, dim: int, fmt: Format, offset: int
    ) -> tuple[tuple[Section, ...], int]:
        rows = (heads, self.block_tokens)
        if fmt == "q4h":
            wanted = [((*rows, dim // CODES_PER_WORD), "u32", 4), ((*rows, dim // group_size(kind, dim)), "u8", 1)]
        else:
            wanted = [((*rows, dim), str(fmt), NATIVE_BYTES[fmt])]
        sections = []
        for shape, dtype, size in wanted:
            num_bytes = size * shape[0] * shape[1] * shape[2]
            sections.append(Section(offset, num_bytes, shape, dtype))
            offset += -(-num_bytes // SECTION_ALIGN) * SECTION_ALIGN
        return tuple(sections), offset

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all parts."""
        return sum(part.payload_bytes for part in self.parts)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that differ whenever the bytes of a block would be read differently."""
        described = {
            "version": FORMAT_VERSION,
            "block_tokens": self.block_tokens,
            "layers": [asdict(x) for x in self.layers],
        }
        return hashlib.blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=32).digest()

    def formats(self) -> dict[str, int]:
        """Count the layers per K/V format, for display: `{"q4h/q4h": 24}`."""
        counts: dict[str, int] = {}
        for layer in self.layers:
            name = f"{layer.k_format}/{layer.v_format}"
            counts[name] = counts.get(name, 0) + 1
        return counts


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as the engine sees it: names, sizes, the fingerprint of everything that must agree, its KV layout."""

    name: str
    architecture: str
    vocab_size: int
    max_context: int
    eos_ids: frozenset[int]
    fingerprint: bytes
    layout: KVLayout
