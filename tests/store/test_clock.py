"""A wall clock that goes backwards makes nobody immortal, breaks no order and loosens no pin."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.config import StoreSettings
from rekindle.store.commands import Pin
from rekindle.store.warm import WarmStore
from tests.store.chains import BLOCK_BYTES, FINGERPRINT, LAYOUT, SIZE, Chain, fast_directory, warm_tokens

NUM_BLOCKS = 12
YEAR_S = 365.0 * 86400


class Clock:
    """Wall time as a test sets it."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Stand:
    """One store over restarts at times that the test chooses; every agent has two blocks of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = Clock(0.0)
        self.store: WarmStore | None = None

    def restart(self, now: float) -> WarmStore:
        self.close()
        self.clock.now = now
        self.store = WarmStore.open(
            self.directory,
            fingerprint=FINGERPRINT,
            layout=LAYOUT,
            settings=StoreSettings(staging_bytes=1 << 20, disk_bytes=NUM_BLOCKS * BLOCK_BYTES),
            clock=self.clock,
            shard_bytes=1 << 15,
        )
        self.store.start()
        return self.store

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
        self.store = None

    def chain(self, agent: str) -> Chain:
        assert self.store is not None
        return Chain.of(self.store, [ord(letter) for letter in agent.ljust(2 * SIZE)])

    def save(self, *agents: str) -> None:
        assert self.store is not None
        for agent in agents:
            self.clock.now += 1
            chain = self.chain(agent)
            for block in chain.blocks:
                assert self.store.stage(block)
            self.store.save_turn(replace(chain.record(agent), last_use=self.clock.now))
            assert self.store.flush(10)
            self.store.check("records")

    def left(self) -> set[str]:
        assert self.store is not None
        assert self.store.stats().blocks_refused == 0 and self.store.stats().turns_unsaved == 0
        names = {record.agent for record in self.store.sequences() if record.num_tokens == 2 * SIZE}
        for name in names:
            assert warm_tokens(self.store, self.chain(name)) == 2 * SIZE
        return names


@pytest.fixture
def stand() -> Iterator[Stand]:
    directory = fast_directory()
    made = Stand(directory)
    yield made
    made.close()
    shutil.rmtree(directory)


def agents(first: int, last: int) -> list[str]:
    return [f"agent {number}" for number in range(first, last)]


@pytest.mark.parametrize("back_to", [0.0, 10.0, YEAR_S])
@pytest.mark.parametrize("how", ["at a restart", "while running"])
def test_who_was_used_in_the_future_can_leave(stand: Stand, back_to: float, how: str) -> None:
    stand.restart(50 * YEAR_S)
    stand.save(*agents(0, 6))
    if how == "at a restart":
        stand.restart(back_to)
    else:
        stand.clock.now = back_to
    stand.save(*agents(6, 12))
    assert stand.left() == set(agents(6, 12)), "those of the future stayed"
    stand.save(*agents(12, 15))
    assert stand.left() == set(agents(9, 15)), "the order after the clock went back is wrong"


def test_the_order_holds_through_a_clock_that_goes_to_and_fro(stand: Stand) -> None:
    moments = [1000.0, 10.0, 5000.0, 20.0, 4000.0, 30.0, 9000.0]
    for number, moment in enumerate(moments):
        stand.restart(moment)
        stand.save(*agents(2 * number, 2 * number + 2))
        assert set(agents(2 * number, 2 * number + 2)) <= stand.left(), "what was just saved has left"
        assert len(stand.left()) <= 6
    assert len(stand.left()) == 6


def test_a_touch_from_the_future_counts_as_now(stand: Stand) -> None:
    store = stand.restart(100.0)
    stand.save(*agents(0, 6))
    store.touch("default", "agent 0", 0, 90 * YEAR_S)
    assert store.flush(10)
    stand.save(*agents(6, 11))
    assert "agent 0" in stand.left()
    stand.save(*agents(11, 17))
    assert stand.left() == set(agents(11, 17)), "one touch made it immortal"


def test_pins_hold_when_the_clock_goes_back_and_end_when_it_goes_on(stand: Stand) -> None:
    store = stand.restart(1000.0)
    stand.save(*agents(0, 4))
    for agent, until in (("agent 0", math.inf), ("agent 1", 2000.0), ("agent 2", 1500.0)):
        assert store.submit(Pin("default", agent, until)).result(10)
    store = stand.restart(10.0)
    assert store.pins() == {
        ("default", "agent 0"): math.inf,
        ("default", "agent 1"): 2000.0,
        ("default", "agent 2"): 1500.0,
    }
    stand.save(*agents(4, 12))
    assert {"agent 0", "agent 1", "agent 2"} <= stand.left() and "agent 3" not in stand.left()
    stand.clock.now = 1600.0
    stand.save(*agents(12, 18))
    assert {"agent 0", "agent 1"} <= stand.left() and "agent 2" not in stand.left()
    store = stand.restart(3000.0)
    assert store.pins() == {("default", "agent 0"): math.inf}
    stand.save(*agents(18, 24))
    assert "agent 0" in stand.left() and "agent 1" not in stand.left()
    assert not store.submit(Pin("default", "nobody", math.inf)).result(10)
