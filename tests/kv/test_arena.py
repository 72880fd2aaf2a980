"""The arena moves exactly the bytes it is asked to, and its views lie where the layout says."""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np
import pytest
import torch

from rekindle.kv.arena import KVArena
from rekindle.spec import KVLayout, LayerSpec

MIXED = KVLayout(
    16,
    (
        LayerSpec(0, 2, 64, 64, None, "q4h", "q4h"),
        LayerSpec(1, 3, 80, 96, 32, "bf16", "q4h"),
        LayerSpec(3, 1, 48, 32, None, "q4h", "fp32"),
        LayerSpec(4, 2, 16, 16, 32, "fp64", "fp64"),
        LayerSpec(5, 2, 48, 64, None, "q8h", "q8h"),
    ),
)


def filled(layout: KVLayout = MIXED, num_blocks: int = 5, seed: int = 0) -> KVArena:
    arena = KVArena(layout, num_blocks)
    generator = torch.Generator().manual_seed(seed)
    for layer in layout.layers:
        for section in (*arena.layer(layer.index).k, *arena.layer(layer.index).v):
            if section.dtype.is_floating_point:
                section.copy_(torch.randn(section.shape, generator=generator))
            else:
                section.copy_(torch.randint(8, 200, section.shape, generator=generator))
    return arena


def payload(arena: KVArena, block: int, part: int, num_tokens: int) -> np.ndarray:
    out = np.full(arena.layout.parts[part].payload_bytes, 0xAA, np.uint8)
    arena.read(block, part, num_tokens, out)
    return out


def test_views_lie_where_the_layout_says():
    arena = filled()
    for part, part_layout in enumerate(MIXED.parts):
        row = arena.parts[part][3].numpy().tobytes()
        for spec, sections in zip(part_layout.layers, part_layout.sections, strict=True):
            layer = arena.layer(spec.index)
            for view, section in zip((*layer.k, *layer.v), (*sections.k, *sections.v), strict=True):
                expected = row[section.offset : section.offset + section.num_bytes]
                assert view[3].contiguous().view(torch.uint8).numpy().tobytes() == expected
                assert view.shape[1:] == section.shape


def test_gathered_rows_hold_the_sections():
    arena = filled()
    for spec in MIXED.layers:
        layer = arena.layer(spec.index)
        rows = layer.rows[[4, 1]]
        for section, view in zip((*layer.k_sections, *layer.v_sections), (*layer.k, *layer.v), strict=True):
            assert torch.equal(layer.within(rows, section, view.dtype), view[[4, 1]].flatten(2))


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 16])
def test_read_then_write_moves_the_first_tokens_and_zeroes_the_rest(num_tokens):
    source, target = filled(), filled(seed=1)
    for part in range(len(MIXED.parts)):
        data = payload(source, 4, part, num_tokens)
        data.flags.writeable = False  # as a reader's bytes may be
        target.write(2, part, data)
    for spec in MIXED.layers:
        ours, theirs = target.layer(spec.index), source.layer(spec.index)
        for got, wanted in zip((*ours.k, *ours.v), (*theirs.k, *theirs.v), strict=True):
            assert torch.equal(got[2, :, :num_tokens], wanted[4, :, :num_tokens])
            assert not got[2, :, num_tokens:].any()


def test_read_of_a_full_block_is_its_row():
    arena = filled()
    for part in range(len(MIXED.parts)):
        assert np.array_equal(payload(arena, 1, part, 16), arena.parts[part][1].numpy())


def test_write_touches_one_block_of_one_part():
    arena = filled()
    before = [part.clone() for part in arena.parts]
    arena.write(2, 1, np.zeros(MIXED.parts[1].payload_bytes, np.uint8))
    assert torch.equal(arena.parts[0], before[0])
    assert not arena.parts[1][2].any()
    others = [0, 1, 3, 4]
    assert torch.equal(arena.parts[1][others], before[1][others])


@pytest.mark.parametrize("num_tokens", [1, 9, 16])
def test_copy_tokens_leaves_the_rest_of_the_target_and_all_others(num_tokens):
    arena = filled()
    before = filled()
    arena.copy_tokens(1, 3, num_tokens)
    for spec in MIXED.layers:
        now, then = arena.layer(spec.index), before.layer(spec.index)
        for got, old in zip((*now.k, *now.v), (*then.k, *then.v), strict=True):
            assert torch.equal(got[3, :, :num_tokens], old[1, :, :num_tokens])
            assert torch.equal(got[3, :, num_tokens:], old[3, :, num_tokens:])
            assert torch.equal(got[[0, 1, 2, 4]], old[[0, 1, 2, 4]])


def test_check_names_the_block_that_is_not_finite():
    arena = filled()
    arena.check()
    arena.layer(0).v[1][3, 0, 0, 0] = 0xF8
    with pytest.raises(AssertionError, match="layer 0: V of row 3"):
        arena.check()
    arena.layer(0).v[1][3, 0, 0, 0] = 0
    arena.layer(1).k[0][2, 1, 5, 7] = float("nan")
    with pytest.raises(AssertionError, match="layer 1: K of row 2"):
        arena.check()


def test_sizes():
    layout = KVLayout(64, tuple(LayerSpec(i, 2, 64, 64, None, "q4h", "q4h") for i in range(24)))
    assert KVArena(layout, 3).num_bytes == 3 * 64 * 3360
    with pytest.raises(KeyError):
        KVArena(MIXED, 1).layer(2)


def num_resident(memory: np.ndarray) -> int:
    """Pages of contiguous memory that the system has given."""
    first = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    count = -(-(memory.ctypes.data + memory.nbytes - first) // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * count)()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert mincore(first, count * mmap.PAGESIZE, flags) == 0, ctypes.get_errno()
    return sum(flags)


def test_memory_is_given_ahead_and_keeps_its_content():
    arena = KVArena(KVLayout(64, (LayerSpec(0, 8, 128, 128, None, "fp32", "fp32"),)), 4096)  # 2 GiB, never used before
    rows = arena.parts[0].numpy()
    assert num_resident(rows[8:]) < 64  # a page, not a whole number of blocks
    rows[8, :100] = 7
    given = arena.populate(8, 16)
    assert (rows[8, :100] == 7).all() and not rows[8, 100:].any() and not rows[9:16].any()
    assert given == (sys.platform == "linux")
    if given:
        assert num_resident(rows[8:16]) >= rows[8:16].nbytes // mmap.PAGESIZE - 1
        assert num_resident(rows[32:]) == 0


def test_there_is_nothing_to_give_of_no_block():
    assert KVArena(MIXED, 2).populate(1, 1) == (sys.platform == "linux")
