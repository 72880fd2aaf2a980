"""Geometry of a model's KV cache: layers, formats, and the offset of every byte of a block.

Owns all offsets: no other module computes one. Knows no tensors and no files.

A block holds `block_tokens` consecutive tokens and has one *part* per layer group, of one of the kinds in `parts`. The
payload of a part is the same in memory, in flight and on disk:

    layer 0: | K codes | K scales | V codes | V scales |   layer 1: | ...      (q4h, q8h)
             | K               | V               |                             (native)
             | tensor 0 | tensor 1 | ...                                       (state)

every section starting at a multiple of 64 bytes. Shapes, per layer: codes u32 [head][token][dim/8] of q4h, i8
[head][token][dim] of q8h, scales u8 [head][token][dim/group], native [head][token][dim]; of states as the model has
them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Literal

from rekindle.parts import FULL, STATE, EndingPart, FullPart, Part, StatePart, WindowPart

CodedFormat = Literal["q4h", "q8h"]
Format = Literal["q4h", "q8h", "bf16", "fp16", "fp32", "fp64", "u8"]
CODED: tuple[CodedFormat, ...] = ("q4h", "q8h")  # rotated, and cut into groups of codes that share a scale
NATIVE_BYTES: dict[Format, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "u8": 1}  # u8: another engine's bytes
FORMAT_VERSION = 1
SECTION_ALIGN = 64
CODES_PER_WORD = 8


def rotation_size(dim: int) -> int:
    """The size b of the rotated sub-blocks: the largest power of two that divides the head dimension."""
    return dim & -dim


def group_size(kind: Literal["k", "v"], dim: int, fmt: Format = "q4h") -> int:
    """Codes that share one scale: 32 where it divides the head dimension, else 16; of K in q4h always 16."""
    return 32 if dim % 32 == 0 and (kind == "v" or fmt == "q8h") else 16


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One KV layer: heads and head dimensions, the window in tokens (None: full attention), the stored formats.

    `latent`: of multi-head latent attention (MLA). Its K is the latent of a token and its V the rotary key, both of one
    head that all queries share; scores are of the two together, and what is summed is the latent.
    """

    index: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None
    k_format: Format
    v_format: Format
    latent: bool = False

    def __post_init__(self) -> None:
        for dim, fmt in ((self.k_dim, self.k_format), (self.v_dim, self.v_format)):
            if fmt in CODED and dim % 16:
                raise ValueError(f"layer {self.index}: {fmt} needs a head size divisible by 16, not {dim}")
        if self.latent and self.v_format in CODED:
            raise ValueError(
                f"layer {self.index}: queries of a rotary key are not rotated, so it is not kept in {self.v_format}"
            )

    @property
    def q_dim(self) -> int:
        """The size of a query."""
        return self.k_dim + self.v_dim if self.latent else self.k_dim

    @property
    def out_dim(self) -> int:
        """The size of what attention gives for a query."""
        return self.k_dim if self.latent else self.v_dim

    @property
    def out_format(self) -> Format:
        """The format of what attention sums."""
        return self.k_format if self.latent else self.v_format


StateKind = Literal["conv", "recurrent"]


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a layer's state, without the axis of sequences: the `number`-th of its kind in the layer."""

    kind: StateKind
    number: int
    shape: tuple[int, ...]
    dtype: Format


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state of one recurrent layer: of a short convolution its last inputs, else what was learned of all tokens."""

    index: int
    tensors: tuple[StateTensor, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A typed range of a part's payload; `shape` without the block axis, `dtype` u32, i8 or a native format (or u8)."""

    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class LayerSections:
    """Where one layer's K and V lie: `(codes, scales)` for q4h and q8h, `(values,)` for native formats."""

    k: tuple[Section, ...]
    v: tuple[Section, ...]


@dataclass(frozen=True, slots=True)
class PartLayout:
    """One layer group of a block: its kind, its layers in order and the bytes of its payload.

    A `StatePart` has `states` with the sections of their tensors in place of `layers`.
    """

    index: int
    kind: Part
    layers: tuple[LayerSpec, ...]
    sections: tuple[LayerSections, ...]
    payload_bytes: int
    states: tuple[StateSpec, ...] = ()
    state_sections: tuple[tuple[Section, ...], ...] = ()


@dataclass(frozen=True)
class KVLayout:
    """Parts, sections and sizes of a block of `block_tokens` tokens for these layers and states of others."""

    block_tokens: int
    layers: tuple[LayerSpec, ...]
    states: tuple[StateSpec, ...] = ()
    state_kind: StatePart = STATE

    def __post_init__(self) -> None:
        if not 16 <= self.block_tokens <= 256 or self.block_tokens & (self.block_tokens - 1):
            raise ValueError(f"block_tokens must be a power of two from 16 to 256, not {self.block_tokens}")
        if not self.layers:
            raise ValueError("a model without KV layers has nothing to cache")

    @cached_property
    def parts(self) -> tuple[PartLayout, ...]:
        """The full part first, then one part per window size, ascending, then states."""
        windows = sorted({layer.window for layer in self.layers if layer.window is not None})
        in_all = None if any(layer.window is None for layer in self.layers) else windows.pop(0)
        ending = (self._part(index, WindowPart(window), window) for index, window in enumerate(windows, 1))
        parts = (self._part(0, FULL, in_all), *ending)
        return (*parts, self._state_part(len(parts))) if self.states else parts

    @cached_property
    def ending(self) -> Mapping[int, EndingPart]:
        """The indices of the parts that end (see `parts`), ascending, each with its kind."""
        return {part.index: part.kind for part in self.parts if not isinstance(part.kind, FullPart)}

    @property
    def state_part(self) -> PartLayout | None:
        """The part of recurrent layers' states, if there are any."""
        return next((part for part in self.parts if isinstance(part.kind, StatePart)), None)

    def kept_bytes(self, num_tokens: int) -> int:
        """Bytes of a conversation of `num_tokens` tokens with one resume point, its end."""
        return sum(part.kind.most_kept(num_tokens, self.block_tokens) * part.payload_bytes for part in self.parts)

    def describe(self) -> str:
        """Formats and bytes in one line, for display."""
        formats = ", ".join(f"{name} on {count} layers" for name, count in self.formats().items())
        return f"{formats} (K/V); {self.describe_bytes()}"

    def describe_bytes(self) -> str:
        """What a token takes in each part, for display."""
        return ", ".join(self._described(part) for part in self.parts)

    def _described(self, part: PartLayout) -> str:
        match part.kind:
            case FullPart():
                return f"{part.payload_bytes / self.block_tokens:,.0f} bytes a token"
            case WindowPart(window):
                return f"{part.payload_bytes / self.block_tokens:,.0f} more in the last {window:,}"
            case StatePart():
                return f"{part.payload_bytes:,} in a snapshot of recurrent state"

    def _part(self, index: int, kind: Part, window: int | None) -> PartLayout:
        layers = tuple(layer for layer in self.layers if layer.window == window)
        sections, offset = [], 0
        for layer in layers:
            k, offset = self._sections("k", layer.num_kv_heads, layer.k_dim, layer.k_format, offset)
            v, offset = self._sections("v", layer.num_kv_heads, layer.v_dim, layer.v_format, offset)
            sections.append(LayerSections(k, v))
        return PartLayout(index, kind, layers, tuple(sections), offset)

    def _state_part(self, index: int) -> PartLayout:
        sections, offset = [], 0
        for state in self.states:
            own = []
            for tensor in state.tensors:
                num_bytes = NATIVE_BYTES[tensor.dtype] * math.prod(tensor.shape)
                own.append(Section(offset, num_bytes, tensor.shape, str(tensor.dtype)))
                offset += -(-num_bytes // SECTION_ALIGN) * SECTION_ALIGN
            sections.append(tuple(own))
        return PartLayout(index, self.state_kind, (), (), offset, self.states, tuple(sections))

    def _sections(
        self, kind: Literal["k", "v"], heads: int, dim: int, fmt: Format, offset: int
    ) -> tuple[tuple[Section, ...], int]:
        rows = (heads, self.block_tokens)
        if fmt in CODED:
            codes = ((*rows, dim // CODES_PER_WORD), "u32", 4) if fmt == "q4h" else ((*rows, dim), "i8", 1)
            wanted = [codes, ((*rows, dim // group_size(kind, dim, fmt)), "u8", 1)]
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

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block over all parts but that of states."""
        return sum(part.payload_bytes for part in self.parts if not isinstance(part.kind, StatePart))

    @property
    def token_bytes(self) -> float:
        """Bytes of KV for each token, over all layers that keep any."""
        return self.kv_block_bytes / self.block_tokens

    @property
    def token_bytes_16bit(self) -> int:
        """What these layers would keep for each token in 16 bits."""
        return sum(2 * layer.num_kv_heads * (layer.k_dim + layer.v_dim) for layer in self.layers)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that differ whenever the bytes of a block would be read differently."""
        described: dict[str, object] = {
            "version": FORMAT_VERSION,
            "block_tokens": self.block_tokens,
            "layers": [_described(x) for x in self.layers],
        }
        if self.states:
            described["states"] = [asdict(x) for x in self.states]
        return hashlib.blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=32).digest()

    def formats(self) -> dict[str, int]:
        """Count the layers per K/V format, for display: `{"q4h/q4h": 24}`."""
        counts: dict[str, int] = {}
        for layer in self.layers:
            name = f"{layer.k_format}/{layer.v_format}"
            counts[name] = counts.get(name, 0) + 1
        return counts


def _described(layer: LayerSpec) -> dict[str, object]:
    """All that a layer is; `latent` only of those that are, so that digests of before stay."""
    return {name: value for name, value in asdict(layer).items() if name != "latent" or value}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What people compare models by; nothing is computed with it.

    `family` is transformers' name of the kind, `num_parameters` those of the checkpoint, `file_bytes` those of its
    weight files, `weight_bytes` what the weights take in memory, `weight_format` how they are kept there: a dtype, or
    the way they are quantised.
    """

    family: str
    num_parameters: int
    file_format: Literal["safetensors", "gguf"]
    file_bytes: int
    weight_bytes: int
    weight_format: str


@dataclass(frozen=True, slots=True)
class Change:
    """An input of a fingerprint that differs between what is stored and what computes now; long values as digests."""

    input: str
    before: str
    now: str


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as the engine sees it: names, sizes, the fingerprint of everything that must agree, its KV layout.

    `made_from` names the inputs of the fingerprint but for the layout, each with its value, or a digest of a long one.
    """

    name: str
    architecture: str
    vocab_size: int
    max_context: int
    eos_ids: frozenset[int]
    fingerprint: bytes
    layout: KVLayout
    facts: ModelFacts
    made_from: Mapping[str, str] = field(default_factory=dict, hash=False)
