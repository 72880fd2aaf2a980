"""Blocks on their way between a card and the host: in the order of what changes them, and without a stop.

On a card the streams are its own. Elsewhere `InTurn` stands for them: copies are done at once, and it notes who waits
for what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from rekindle.kv.copies import BlockPart
from rekindle_cuda.arena import CardArena, CudaStreams, Point, Streams
from tests.cuda.test_attention import DEVICE
from tests.kv.test_arena import MIXED


class InTurn:
    """Streams of a processor, on which everything is done before the next call."""

    def __init__(self) -> None:
        self.points: list[NotedPoint] = []
        self.afters: list[Point | None] = []

    def point(self) -> NotedPoint:
        self.points.append(NotedPoint())
        return self.points[-1]

    @contextmanager
    def own(self, after: Point | None) -> Iterator[None]:
        self.afters.append(after)
        yield

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.full([num_bytes], 0xBB, dtype=torch.uint8)


class NotedPoint:
    waits = 0

    def synchronize(self) -> None:
        self.waits += 1


def arena(streams: Streams | None = None) -> CardArena:
    streams = streams or (CudaStreams(DEVICE) if DEVICE.type == "cuda" else InTurn())
    found = CardArena(MIXED, 5, DEVICE, (), streams)
    generator = torch.Generator().manual_seed(2)
    for part in found.parts:
        part.copy_(torch.randint(0, 200, part.shape, generator=generator, dtype=torch.uint8))
    return found


def parts_of(arena: CardArena, blocks: list[int], num_tokens: int = 16) -> list[BlockPart]:
    sizes = [(part.index, part.payload_bytes) for part in arena.layout.parts]
    return [
        BlockPart(block, part, num_tokens, np.full(size, 0xAA, np.uint8)) for block in blocks for part, size in sizes
    ]


@pytest.mark.parametrize("num_tokens", [0, 7, 16])
def test_what_is_saved_are_the_bytes_before_a_change(num_tokens: int) -> None:
    ours = arena()
    wanted = parts_of(ours, [3, 1], num_tokens)
    for each in wanted:
        ours.read(each.block, each.part, num_tokens, each.payload)
    saved = parts_of(ours, [3, 1], num_tokens)
    wait = ours.copy_out(saved)
    for block in (1, 3):
        ours.wipe(block)
    wait()
    saved[0].payload[0] ^= 1  # the writer's from then on
    wait()
    saved[0].payload[0] ^= 1
    assert all(np.array_equal(one.payload, other.payload) for one, other in zip(saved, wanted, strict=True))
    assert wanted[0].payload.any() or not num_tokens


def test_a_payload_is_not_touched_before_its_copy_is_waited_for() -> None:
    streams = InTurn()
    ours = arena(streams)
    (saved, *_), noted = parts_of(ours, [2]), len(streams.points)
    wait = ours.copy_out([saved])
    assert (saved.payload == 0xAA).all() and len(streams.points) == noted + 1 and not streams.points[-1].waits
    wait()
    assert streams.points[-1].waits == 1 and not (saved.payload == 0xAA).all()


def test_what_is_loaded_is_there_and_nothing_else_is_changed() -> None:
    ours, rng = arena(), np.random.default_rng(1)
    before = [part.cpu().clone() for part in ours.parts]
    loaded = [
        BlockPart(block, part.index, 16, ours.room(block, part.index)) for block in (4, 0) for part in MIXED.parts
    ]
    for each in loaded:
        each.payload[:] = rng.integers(0, 256, each.payload.size)
        before[each.part][each.block] = torch.from_numpy(each.payload)
    loaded[1].payload.flags.writeable = False
    ours.copy_in(loaded)
    assert all(torch.equal(part.cpu(), wanted) for part, wanted in zip(ours.parts, before, strict=True))


def test_a_load_is_copied_after_what_was_saved_or_wiped_before() -> None:
    """The block that is saved may be evicted for one that is loaded; a purge wipes those that the next load takes."""
    streams = InTurn()
    ours = arena(streams)
    ours.copy_in(parts_of(ours, [2]))
    changes: list[Any] = []
    changes_of_block: tuple[Callable[[], object], ...] = (
        lambda: ours.copy_out(parts_of(ours, [2])),
        lambda: ours.wipe(2),
        lambda: ours.wipe(2, 3),
        lambda: ours.copy_tokens(0, 2, 5),
    )
    for change in changes_of_block:
        change()
        changes.append(streams.points[-1])
        ours.copy_in(parts_of(ours, [2]))
    assert streams.afters == [None, *changes] and len(set(map(id, changes))) == 4
