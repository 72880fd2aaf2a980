"""The part of recurrent states: its sections, its rows, and what tells two layouts apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rekindle.cache.blocks.windows import WindowSlots
from rekindle.kv.arena import KVArena
from rekindle.parts import FULL, STATE, WindowPart
from rekindle.spec import KVLayout, LayerSpec, StateSpec, StateTensor

CONV = StateTensor("conv", 0, (5, 3), "bf16")
LEARNED = StateTensor("recurrent", 0, (2, 4, 4), "fp32")
LAYERS = (LayerSpec(1, 2, 16, 16, None, "q4h", "q4h"), LayerSpec(3, 2, 16, 16, 40, "q4h", "q4h"))
LAYOUT = KVLayout(16, LAYERS, (StateSpec(0, (CONV, LEARNED)), StateSpec(2, (LEARNED,))))


def test_states_are_the_last_part() -> None:
    full, window, states = LAYOUT.parts
    assert [part.kind for part in LAYOUT.parts] == [FULL, WindowPart(40), STATE]
    assert LAYOUT.state_part is states and LAYOUT.ending == {1: WindowPart(40), 2: STATE}
    assert [[section.offset for section in own] for own in states.state_sections] == [[0, 64], [192]]
    assert states.payload_bytes == 64 + 128 + 128
    assert LAYOUT.token_bytes == KVLayout(16, LAYERS).block_bytes / 16
    assert LAYOUT.kept_bytes(1600) == 100 * full.payload_bytes + 5 * window.payload_bytes + states.payload_bytes
    assert LAYOUT.describe().endswith("320 in a snapshot of recurrent state")
    assert KVLayout(16, LAYERS).state_part is None


def test_layouts_with_other_states_have_other_digests() -> None:
    others = [
        KVLayout(16, LAYERS),
        replace(LAYOUT, states=LAYOUT.states[:1]),
        replace(LAYOUT, states=(StateSpec(0, (LEARNED, CONV)), LAYOUT.states[1])),
        replace(LAYOUT, states=(LAYOUT.states[0], StateSpec(2, (replace(LEARNED, shape=(4, 2, 4)),)))),
    ]
    assert len({layout.digest for layout in (LAYOUT, *others)}) == 5


def test_a_window_of_one_token_is_another_part_than_states() -> None:
    layout = KVLayout(16, (LAYERS[0], replace(LAYERS[1], window=1)), LAYOUT.states)
    assert layout.ending == {1: WindowPart(1), 2: STATE}
    slots = [WindowSlots(WindowPart(1), num_slots=4, num_blocks=6), WindowSlots(STATE, num_slots=3, num_blocks=6)]
    assert [len(rows) for rows in KVArena(layout, 6, "cpu", slots).parts] == [6, 4, 3]


def test_where_all_layers_have_windows_the_smallest_does_not_end() -> None:
    layout = KVLayout(16, (replace(LAYERS[0], window=80), LAYERS[1]))
    assert [part.kind for part in layout.parts] == [FULL, WindowPart(80)]
    assert [layer.window for layer in layout.parts[0].layers] == [40]


def test_a_state_is_read_written_copied_and_wiped_as_a_whole() -> None:
    slots = [WindowSlots(kind, num_slots=4, num_blocks=6) for kind in (WindowPart(40), STATE)]
    arena, part = KVArena(LAYOUT, 6, "cpu", slots), 2
    for block in (4, 5):
        for each in slots:
            assert each.take(block)
    data = np.zeros(LAYOUT.parts[part].payload_bytes, np.uint8)
    data[:30] = np.arange(15, dtype=np.float32).view(np.uint32).astype(np.uint16).view(np.uint8)
    arena.write(4, part, data)
    assert arena.states(0)[0].shape == (4, 5, 3) and arena.states(2)[0].shape == (4, 2, 4, 4)
    arena.copy_tokens(4, 5, 3)
    out = np.empty_like(data)
    arena.read(5, part, 3, out)
    assert (out == data).all(), "whatever the number of tokens"
    arena.wipe(5, 3)
    arena.read(5, part, 3, out)
    assert (out == data).all(), "it is of the tokens that stay"
    arena.wipe(5)
    arena.read(5, part, 3, out)
    assert not out.any()
    slots[1].release(5)
    slots[1].drop(5)
    arena.copy_tokens(4, 5, 3)
    arena.check()


def test_a_state_that_is_not_finite_is_found() -> None:
    arena = KVArena(LAYOUT, 2)
    arena.states(2)[0][1, 0, 0, 0] = float("inf")
    with pytest.raises(AssertionError, match="a state of layer 2"):
        arena.check()
