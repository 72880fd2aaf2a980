"""How hot memory is divided between layers with and without windows."""

from __future__ import annotations

import pytest

from rekindle.config import CacheSettings
from rekindle.engine.capacity import HotSizes, capacity
from rekindle.errors import ConfigError
from rekindle.model.device import Memory
from rekindle.spec import KVLayout, LayerSpec, ModelSpec
from tests.model.helpers import FACTS

CHUNK = 512


def layout_of(*windows: int | None, heads: int = 2) -> KVLayout:
    return KVLayout(64, tuple(LayerSpec(i, heads, 64, 64, window, "q4h", "q4h") for i, window in enumerate(windows)))


def sizes(layout: KVLayout, hot_bytes: int) -> HotSizes:
    spec = ModelSpec("m", "M", 100, 1 << 17, frozenset(), b"", layout, FACTS)
    return capacity(CacheSettings(hot_bytes=hot_bytes), spec, Memory(total=1 << 40, free=1 << 40), chunk_tokens=CHUNK)


def used(layout: KVLayout, found: HotSizes) -> int:
    """Bytes of all rows but the one of blocks without the part."""
    windows = zip(found.windows, layout.ending, strict=True)
    rest = sum((slots.num_slots - 1) * layout.parts[part].payload_bytes for slots, part in windows)
    return found.num_blocks * layout.parts[0].payload_bytes + rest


@pytest.mark.parametrize("num_blocks", [2, 5, 20, 40, 100, 1000])
@pytest.mark.parametrize("windows", [(None, 1024), (None, 128, 1024), (None, 65536), (None, 24, None, 24)])
def test_the_budget_is_kept_and_a_request_of_the_longest_context_can_run(
    windows: tuple[int | None, ...], num_blocks: int
) -> None:
    layout = layout_of(*windows)
    found = sizes(layout, num_blocks * layout.block_bytes)
    assert found.num_blocks >= num_blocks and used(layout, found) <= num_blocks * layout.block_bytes
    for slots in found.windows:
        in_a_chunk = -(-(slots.kind.window + CHUNK) // 64) + 2
        assert slots.num_slots - 1 >= min(found.num_blocks, in_a_chunk)
    assert found.max_context == min(1 << 17, (found.num_blocks - 1) * 64)


def test_windows_make_room_for_more_tokens() -> None:
    layout = layout_of(None, *[1024] * 5)  # as in Gemma 3
    found = sizes(layout, 1000 * layout.block_bytes)
    (slots,) = found.windows
    assert 2300 < found.num_blocks < 2600 and 650 < slots.num_slots < 800


def test_without_windows_all_memory_is_blocks() -> None:
    layout = layout_of(None, None)
    found = sizes(layout, 10 * layout.block_bytes + 5)
    assert (found.num_blocks, found.windows, found.max_context) == (10, (), 9 * 64)


def test_less_than_two_blocks_are_refused() -> None:
    layout = layout_of(None, 1024)
    with pytest.raises(ConfigError, match=f"give at least {2 * layout.block_bytes}"):
        sizes(layout, 2 * layout.block_bytes - 1)


def test_a_conversation_keeps_its_last_window() -> None:
    layout = layout_of(None, *[1024] * 5)
    full, window = (part.payload_bytes for part in layout.parts)
    assert layout.kept_bytes(32_768) == 512 * full + 18 * window
    assert layout.kept_bytes(640) == 10 * (full + window) == layout.kept_bytes(577)
    token = [size // 64 for size in (full, window)]
    assert layout.describe() == (
        f"q4h/q4h on 6 layers (K/V); {token[0]} bytes a token, {token[1]:,} more in the last 1,024"
    )
