"""The layout of blocks that hold what llama-server keeps of its tokens: each row as it is, in the format u8.

Owns which memories of llama.cpp can be blocks, and as what. A layer of a file is a layer of one head here, in the
file's order; after the layers of a memory follows one more, its *cells*, which say which rows are there:

    K of the cells   i32 [token]       position + 1; 0: this row is absent
    V of the cells   12 bytes [token]  x, y and token of M-RoPE cells, else zeros

A file has the last rows of a window only, so the first block of a window is there in part: `WindowSlots.has` says that
a block has a place for the rows, its cells that they are there.
"""

from __future__ import annotations

from rekindle.errors import RekindleError
from rekindle.spec import KVLayout, LayerSpec, PartLayout, Section
from rekindle_backends.llama.slot_file import EXTRA_BYTES, AttentionShape, FileShape

BLOCK_TOKENS = 64
PRESENCE_BYTES = 4


class Unsupported(RekindleError):
    """What a model of llama.cpp keeps cannot be kept in blocks; the message says why."""


def layout_of(shape: FileShape, window: int | None) -> KVLayout:
    """The layout of blocks for files of this shape; `window`: tokens that a window of the model sees (its GGUF says).

    Unsupported for a model whose states are not rows of tokens, or that no layer reads as a whole.
    """
    if shape.recurrent is not None:
        raise Unsupported("its recurrent layers keep a state that cannot be cut into blocks of tokens")
    if not shape.attention[0].k:
        raise Unsupported("all its layers have windows")
    if len(shape.attention) > 2 or (len(shape.attention) == 2 and window is None):
        raise Unsupported("it keeps more of a token than full attention and windows do")
    layers: list[LayerSpec] = []
    for section, seen in zip(shape.attention, (None, window), strict=False):
        layers += _layers(section, seen, len(layers))
    return KVLayout(BLOCK_TOKENS, tuple(layers))


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
