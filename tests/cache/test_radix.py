"""The radix tree against a dict, after every operation."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rekindle.cache import RadixTree
from rekindle.cache.radix import NODE_BYTES, common_prefix

PIECES = [b"", b"a", b"b", b"ab", b"ba", b"\x00", b"\xff\x80", b"a long stretch in common ", b"a long stretch apart "]
keys = st.lists(st.sampled_from(PIECES), max_size=4).map(b"".join)

alike = st.lists(st.sampled_from(b"aaaaaaab"), max_size=40).map(bytes)


def shared(a: bytes, b: bytes) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class RadixMachine(RuleBasedStateMachine):
    """The model is a dict whose order is the order of use, oldest first."""

    @initialize()
    def begin(self) -> None:
        self.tree: RadixTree[int] = RadixTree()
        self.model: dict[bytes, int] = {}
        self.num_inserted = 0

    @rule(key=keys)
    def insert(self, key: bytes) -> None:
        self.num_inserted += 1
        self.model.pop(key, None)
        self.model[key] = self.num_inserted
        self.tree.insert(key, self.num_inserted)

    @rule(key=keys)
    def remove(self, key: bytes) -> None:
        assert self.tree.remove(key) == self.model.pop(key, None)

    @rule()
    def drop_oldest(self) -> None:
        oldest = self.tree.oldest()
        assert oldest == next(iter(self.model.items()), None)
        if oldest is not None:
            assert self.tree.remove(oldest[0]) == self.model.pop(oldest[0])

    @rule(key=keys)
    def touch(self, key: bytes) -> None:
        assert self.tree.touch(key) == (key in self.model)
        if key in self.model:
            self.model[key] = self.model.pop(key)

    @rule(key=keys, limit=st.integers(0, 6))
    def look_up(self, key: bytes, limit: int) -> None:
        num_bytes = self.tree.num_bytes
        recent_first = list(reversed(self.model.items()))
        length = max((shared(key, other) for other in self.model), default=0)
        value = next((value for other, value in recent_first if shared(key, other) == length), None)
        assert self.tree.longest_prefix(key) == (length, value)
        ranked = sorted(((shared(key, other), value) for other, value in recent_first), key=lambda pair: -pair[0])
        assert self.tree.candidates(key, limit) == [pair for pair in ranked if pair[0]][:limit]
        assert self.tree.get(key) == self.model.get(key)
        assert (key in self.tree) == (key in self.model)
        assert self.tree.num_bytes == num_bytes, "a lookup changed the tree"

    @invariant()
    def agrees(self) -> None:
        self.tree.check()
        assert list(self.tree.items()) == sorted(self.model.items())
        assert len(self.tree) == len(self.model)


TestRadix = RadixMachine.TestCase
TestRadix.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@given(st.binary(max_size=20), alike, alike)
def test_common_prefix_is_where_a_loop_would_stop(before: bytes, a: bytes, b: bytes) -> None:
    assert common_prefix(before + a, b, len(before)) == shared(a, b)
    assert common_prefix(before + b + a, b, len(before)) == len(b)


def test_the_bytes_of_a_shared_beginning_count_once() -> None:
    tree: RadixTree[str] = RadixTree()
    tree.insert(b"x" * 1000 + b"left", "l")
    tree.insert(b"x" * 1000 + b"right", "r")
    assert tree.num_bytes == 1000 + 4 + 5 + 3 * NODE_BYTES
    tree.remove(b"x" * 1000 + b"left")
    assert tree.num_bytes == 1000 + 5 + NODE_BYTES
    tree.remove(b"x" * 1000 + b"right")
    assert tree.num_bytes == 0


def test_a_deep_chain_of_extensions_needs_no_recursion() -> None:
    tree: RadixTree[int] = RadixTree()
    for length in range(1, 3000):
        tree.insert(b"a" * length, length)
    assert tree.longest_prefix(b"a" * 5000) == (2999, 2999)
    assert tree.candidates(b"a" * 2000 + b"b", 2) == [(2000, 2999), (2000, 2998)]
    tree.check()
    for length in range(1, 3000):
        tree.remove(b"a" * length)
    tree.check()
    assert len(tree) == 0 and tree.num_bytes == 0
