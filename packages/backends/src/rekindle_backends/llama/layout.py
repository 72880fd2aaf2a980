"""The layout of blocks that hold what llama-server keeps of its tokens: each row as it is, in the format u8.

Owns which memories of llama.cpp can be blocks, and as what. A layer of a file is a layer of one head here, in the
file's order; after the layers of a memory follows one more, its *cells*, which say which rows are there:

    K of the cells   i32 [token]       position + 1; 0: this row is absent
    V of the cells   12 bytes [token]  x, y and token of M-RoPE cells, else zeros

The state of recurrent layers is one part more, of the kind `TurnStatePart`: its tensors as they are, and before them
i32 how many tokens it is after (0: it is absent).

A file has the last rows of a window only, so the first block of a window is there in part: `WindowSlots.has` says that
a block has a place for the rows, its cells that they are there.
"""

from __future__ import annotations

from rekindle.errors import RekindleError
from rekindle.parts import TURN_STATE
from rekindle.spec import KVLayout, LayerSpec, PartLayout, Section, StateSpec, StateTensor
from rekindle_backends.llama.sections import EXTRA_BYTES
from rekindle_backends.llama.shapes import AttentionShape, FileShape

BLOCK_TOKENS = 64
PRESENCE_BYTES = MARK_BYTES = 4
NO_ROWS = AttentionShape(False, False, 0, 0, (), ())  # of a model whose layers are all recurrent


class Unsupported(RekindleError):
    """What a model of llama.cpp keeps cannot be kept in blocks; the message says why."""


def layout_of(shape: FileShape, window: int | None) -> KVLayout:
    """The layout of blocks for files of this shape; `window`: tokens that a window of the model sees (its GGUF says).

    Unsupported for a model with windows that no layer reads as a whole, or that has recurrent layers, too: llama-server
    goes on from none of these that it restores (its seq_pos_min is that of the state, which is never below a window).
    """
    if shape.attention and not shape.attention[0].k:
        raise Unsupported("all its layers have windows")
    if len(shape.attention) > 2 or (len(shape.attention) == 2 and window is None):
        raise Unsupported("it keeps more of a token than full attention and windows do")
    if shape.recurrent is not None and len(shape.attention) > 1:
        raise Unsupported("it has windows and recurrent layers, and llama-server goes on from no such state")
    layers: list[LayerSpec] = []
    for section, seen in zip(shape.attention or (NO_ROWS,), (None, window), strict=False):
        layers += _layers(section, seen, len(layers))
    if shape.recurrent is None:
        return KVLayout(BLOCK_TOKENS, tuple(layers))
    sizes = (MARK_BYTES, *(each.row_bytes for each in shape.recurrent.tensors))
    tensors = tuple(StateTensor("recurrent", number, (size,), "u8") for number, size in enumerate(sizes))
    return KVLayout(BLOCK_TOKENS, tuple(layers), (StateSpec(len(layers), tensors),), TURN_STATE)


def _layers(section: AttentionShape, window: int | None, first: int) -> list[LayerSpec]:
    v_bytes = [each.row_bytes for each in section.v] or [0] * len(section.k)
    rows = [(k.row_bytes, v) for k, v in zip(section.k, v_bytes, strict=True)]
    rows.append((PRESENCE_BYTES, EXTRA_BYTES))
    return [LayerSpec(first + index, 1, k, v, window, "u8", "u8") for index, (k, v) in enumerate(rows)]


def presence_section(part: PartLayout) -> Section:
    """Where a part says which of its rows are there, i32 [token]."""
    return part.sections[-1].k[0]


def extra_section(part: PartLayout) -> Section:
    """Where a part has what M-RoPE cells have more, 12 bytes [token]."""
    return part.sections[-1].v[0]
