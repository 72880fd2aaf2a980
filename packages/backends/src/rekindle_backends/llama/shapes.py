"""The shapes of slot files: what llama-server keeps of each token and after the last one, for a model and flags."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class RowShape:
    """What a tensor of a layer keeps of one token: ggml's type and the bytes of its row.

    `element_bytes` is that of a channel where V is transposed, else 0.
    """

    ggml_type: int
    row_bytes: int
    element_bytes: int = 0


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One memory of attention: the rows of its layers, those of V in none or in all; `has_extra` of M-RoPE cells."""

    has_extra: bool
    is_transposed: bool
    k_rotation: int
    v_rotation: int
    k: tuple[RowShape, ...]
    v: tuple[RowShape, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return sum(each.row_bytes for each in (*self.k, *self.v))


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """The memory of recurrent layers: the tensors R of those that have one, then their S."""

    num_layers: int
    tensors: tuple[RowShape, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the state after one token."""
        return sum(each.row_bytes for each in self.tensors)


@dataclass(frozen=True, slots=True)
class FileShape:
    """All of a file that depends neither on its tokens nor on its slot: what another one is written by."""

    version: int
    num_streams: int
    attention: tuple[AttentionShape, ...]
    recurrent: RecurrentShape | None = None

    @property
    def reading(self) -> tuple[bool, bool]:
        """What the fields of a file do not say: whether its cells are those of M-RoPE, and whether it has V."""
        return any(each.has_extra for each in self.attention), any(each.v for each in self.attention)

    @property
    def identity(self) -> bytes:
        """Differs whenever rows would be read differently; the same however many slots a server has."""
        described = {name: value for name, value in asdict(self).items() if name != "num_streams"}
        return json.dumps(described, sort_keys=True).encode()
