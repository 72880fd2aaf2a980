"""Hot memory is taken ahead for what is stored, and for no more than its share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.engine.started_once import Prefault
from rekindle.kv.arena import KVArena
from rekindle.spec import KVLayout, LayerSpec
from tests.engine.conftest import Start
from tests.tiny_models import tiny_model_dir

LAYOUT = KVLayout(64, (LayerSpec(0, 8, 128, 128, None, "fp32", "fp32"),))  # 512 KiB a block


class Watched(KVArena):
    """Notes which blocks' memory was asked for."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(LAYOUT, num_blocks)
        self.asked: list[tuple[int, int]] = []
        self.stop: Callable[[], None] = lambda: None

    def populate(self, first: int, end: int) -> bool:
        self.asked.append((first, end))
        self.stop()
        return super().populate(first, end)


def taken(arena: Watched, num_stored: int) -> list[tuple[int, int]]:
    prefault = Prefault(arena, num_stored)
    prefault.start()
    prefault.worker.join(60.0)
    prefault.stop()
    return arena.asked


@pytest.mark.parametrize(
    ("num_stored", "asked"),
    [(0, []), (3, [(0, 3)]), (40, [(0, 16), (16, 32), (32, 40)]), (1000, [(0, 16), (16, 32), (32, 48), (48, 50)])],
)
def test_blocks_that_are_allocated_first_are_taken_in_pieces(num_stored: int, asked: list[tuple[int, int]]) -> None:
    some = asked if sys.platform == "linux" else asked[:1]  # others cannot be asked
    assert taken(Watched(400), num_stored) == some


def test_a_stop_ends_it_after_the_current_piece() -> None:
    arena = Watched(400)
    prefault = Prefault(arena, 1000)
    arena.stop = prefault.stop
    prefault.start()
    prefault.worker.join(60.0)
    assert arena.asked == [(0, 16)]


def test_an_engine_takes_it_for_what_its_store_has(start: Start, tmp_path: Path) -> None:
    model = tiny_model_dir("llama", "fp32", tmp_path)
    for is_first in (True, False):
        engine = start(model, store=str(tmp_path / "store"))
        prefault = engine.components.prefault
        assert prefault is not None
        stored = engine.stats().store["num_blocks"]
        assert (prefault.num_blocks == 0) == is_first and prefault.num_blocks <= stored
        engine.chat("ada", [{"role": "user", "content": "hello " * 40}], max_tokens=3)
        engine.close()
