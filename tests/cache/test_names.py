"""Names in arrays and numbers of roots, against dictionaries."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rekindle.cache.blocks.columns import HashColumn
from rekindle.cache.blocks.contents import Roots
from rekindle.cache.blocks.hashing import BlockHash

NUM_SLOTS = 7
NAMES = [BlockHash(bytes([number]) * 32) for number in range(12)]


class NamesMachine(RuleBasedStateMachine):
    """Few slots, so that buckets hold several."""

    @initialize()
    def begin(self) -> None:
        self.table = HashColumn(NUM_SLOTS)
        self.names: dict[int, bytes] = {}

    @rule(slot=st.integers(0, NUM_SLOTS - 1), name=st.sampled_from(NAMES))
    def put_or_drop(self, slot: int, name: BlockHash) -> None:
        if slot in self.names:
            assert self.table.drop(slot) == self.names.pop(slot)
        elif name not in self.names.values():
            self.table.put(slot, name)
            self.names[slot] = name

    @invariant()
    def they_agree(self) -> None:
        self.table.check()
        assert len(self.table) == len(self.names) and sorted(self.names) == list(self.table)
        slots = {name: slot for slot, name in self.names.items()}
        for name in NAMES:
            assert self.table.find(name) == slots.get(name, -1)
        for slot in range(NUM_SLOTS):
            assert self.table.get(slot) == self.names.get(slot)
            assert all(self.table.has(slot, name) == (name == self.names[slot]) for name in NAMES[: slot in self.names])


TestNames = NamesMachine.TestCase
TestNames.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


class RootsMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.roots = Roots(100)
        self.numbers: dict[BlockHash, int] = {}

    @rule(name=st.sampled_from(NAMES))
    def take(self, name: BlockHash) -> None:
        number = self.roots.take(name)
        assert number >= 100 and self.numbers.setdefault(name, number) == number

    @rule(name=st.sampled_from(NAMES))
    def drop(self, name: BlockHash) -> None:
        if name in self.numbers:
            self.roots.drop(self.numbers.pop(name))

    @invariant()
    def they_agree(self) -> None:
        self.roots.check()
        assert len(set(self.numbers.values())) == len(self.numbers) == len(self.roots)
        assert set(self.roots) == set(self.numbers.values())
        assert all((name in self.roots) == (name in self.numbers) for name in NAMES)
        assert all(self.roots.find(name) == self.numbers.get(name, -1) for name in NAMES)
        assert all(self.roots.get(number) == name for name, number in self.numbers.items())
        assert all(number < 100 + len(NAMES) for number in self.numbers.values()), "numbers are not given again"


TestRoots = RootsMachine.TestCase
TestRoots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_part_of_a_name_is_no_name() -> None:
    table = HashColumn(4)
    table.put(2, NAMES[3])
    for wrong in (NAMES[3][:31], bytearray(NAMES[3]), "x" * 32, 7, None):
        with pytest.raises(ValueError, match="32 bytes"):
            table.find(wrong)
    with pytest.raises(AssertionError, match="32 bytes"):
        table.put(1, NAMES[3] + b"x")


def test_a_slot_has_one_name() -> None:
    table = HashColumn(4)
    table.put(2, NAMES[3])
    with pytest.raises(AssertionError, match="a hash already"):
        table.put(2, NAMES[4])
    with pytest.raises(AssertionError, match="no hash"):
        table.drop(1)
