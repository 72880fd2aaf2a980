"""The radix trie against a dict, after every operation, on all kinds of keys; and the memory that it says it takes."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rekindle.cache.trie.keys import Key, Keys, key_kind
from rekindle.cache.trie.radix import FORK_BYTES, NODE_BYTES, RadixTrie, common_prefix

BYTES = [b"", b"a", b"b", b"ab", b"ba", b"\x00", b"\xff\x80", b"a long stretch in common ", b"a long stretch apart "]
# Neighbours in UTF-8: the first bytes of two characters agree, once across lengths of 2, 3 and 4 bytes.
TEXTS = ["", "a", "é", "è", "漢", "漣", "😀", "😁", "\ud800", "\x00", "long, é", "long, è", "long, 漢", "long, 漣"]
TEXTS += ["long, 😀", "long, 😁"]
# Neighbours in u32: ids whose first one, two or three bytes agree.
IDS = [(), (0,), (1,), (257,), (65_793,), (16_843_009,), (2**32 - 1,), tuple(range(40)), (*range(39), 295)]
alike = st.lists(st.sampled_from(b"aaaaaaab"), max_size=40).map(bytes)


def shared(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class RadixMachine(RuleBasedStateMachine):
    """The model is a dict whose order is the order of use, oldest first; its keys are what a trie's keys spell."""

    kind: ClassVar[Keys] = "bytes"
    pieces: ClassVar[Sequence[Any]] = BYTES

    @initialize()
    def begin(self) -> None:
        self.trie: RadixTrie[int] = RadixTrie(self.kind)
        self.model: dict[Any, int] = {}
        self.num_inserted = 0

    def key(self, data: st.DataObject) -> Any:
        chosen = data.draw(st.lists(st.sampled_from(self.pieces), max_size=4))
        return reduce(add, chosen, self.pieces[0])

    def plain(self, key: Key) -> Any:
        return tuple(key.tolist()) if isinstance(key, np.ndarray) else key

    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        key = self.key(data)
        self.num_inserted += 1
        self.model.pop(key, None)
        self.model[key] = self.num_inserted
        self.trie.insert(key, self.num_inserted)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = self.key(data)
        assert self.trie.remove(key) == self.model.pop(key, None)

    @precondition(lambda self: self.model)
    @rule()
    def drop_oldest(self) -> None:
        key = next(iter(self.model))
        assert self.trie.remove(key) == self.model.pop(key)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        key = self.key(data)
        assert self.trie.touch(key) == (key in self.model)
        if key in self.model:
            self.model[key] = self.model.pop(key)

    @rule(data=st.data(), limit=st.integers(0, 6))
    def look_up(self, data: st.DataObject, limit: int) -> None:
        key = self.key(data)
        num_bytes, recent_first = self.trie.num_bytes, list(reversed(self.model.items()))
        length = max((shared(key, other) for other in self.model), default=0)
        value = next((value for other, value in recent_first if length and shared(key, other) == length), None)
        assert self.trie.find_longest_prefix(key) == (length, value)
        ranked = sorted(((shared(key, other), value) for other, value in recent_first), key=lambda pair: -pair[0])
        assert self.trie.candidates(key, limit) == [pair for pair in ranked if pair[0]][:limit]
        assert self.trie.get(key) == self.model.get(key)
        assert (key in self.trie) == (key in self.model)
        assert self.trie.num_bytes == num_bytes, "a lookup changed the trie"

    @invariant()
    def agrees(self) -> None:
        self.trie.check()
        found = [(self.plain(key), value) for key, value in self.trie.items()]
        to_bytes = key_kind(self.kind).to_bytes
        assert found == sorted(self.model.items(), key=lambda item: to_bytes(item[0]))
        assert len(self.trie) == len(self.model)


class IdMachine(RadixMachine):
    kind = "ids"
    pieces = IDS


class TextMachine(RadixMachine):
    kind = "text"
    pieces = TEXTS


TestBytes = RadixMachine.TestCase
TestIds = IdMachine.TestCase
TestText = TextMachine.TestCase
TestBytes.settings = TestIds.settings = TestText.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None
)


@given(st.binary(max_size=20), alike, alike)
def test_common_prefix_is_where_a_loop_would_stop(before: bytes, a: bytes, b: bytes) -> None:
    assert common_prefix(before + a, b, len(before)) == shared(a, b)
    assert common_prefix(before + b + a, b, len(before)) == len(b)


def test_the_bytes_of_a_shared_beginning_count_once() -> None:
    trie: RadixTrie[str] = RadixTrie("bytes")
    trie.insert(b"x" * 1000 + b"left", "l")
    trie.insert(b"x" * 1000 + b"right", "r")
    assert trie.num_bytes == 1000 + 4 + 5 + 3 * NODE_BYTES + 2 * FORK_BYTES
    trie.remove(b"x" * 1000 + b"left")
    assert trie.num_bytes == 1000 + 5 + NODE_BYTES + FORK_BYTES
    trie.remove(b"x" * 1000 + b"right")
    assert trie.num_bytes == 0


def test_a_deep_chain_of_extensions_needs_no_recursion() -> None:
    trie: RadixTrie[int] = RadixTrie("bytes")
    for length in range(1, 3000):
        trie.insert(b"a" * length, length)
    assert trie.find_longest_prefix(b"a" * 5000) == (2999, 2999)
    assert trie.candidates(b"a" * 2000 + b"b", 2) == [(2000, 2999), (2000, 2998)]
    trie.check()
    for length in range(1, 3000):
        trie.remove(b"a" * length)
    trie.check()
    assert len(trie) == 0 and trie.num_bytes == 0


def test_a_shared_prefix_ends_at_a_unit() -> None:
    text: RadixTrie[int] = RadixTrie("text")
    text.insert("ab漢", 1)
    assert text.find_longest_prefix("ab漣") == (2, 1)
    assert text.find_longest_prefix("ab漢字") == (3, 1)
    ids: RadixTrie[int] = RadixTrie()
    ids.insert([5, 65_793], 1)
    assert ids.find_longest_prefix([5, 257]) == (1, 1), "their first two bytes agree"


@pytest.mark.parametrize("kind", ["ids", "bytes", "text"])
def test_nothing_shared_is_no_value(kind: Keys) -> None:
    empty: Any = {"ids": [], "bytes": b"", "text": ""}[kind]
    one: Any = {"ids": [7], "bytes": b"x", "text": "x"}[kind]
    trie: RadixTrie[str] = RadixTrie(kind)
    assert trie.find_longest_prefix(one) == (0, None) and trie.candidates(one, 3) == []
    trie.insert(empty, "the empty key")
    assert trie.get(empty) == "the empty key" and empty in trie
    assert trie.find_longest_prefix(one) == trie.find_longest_prefix(empty) == (0, None)


def test_all_forms_of_the_same_ids_are_one_key() -> None:
    trie: RadixTrie[str] = RadixTrie()
    trie.insert([1, 2, 300], "stored")
    for key in (
        (1, 2, 300),
        np.array([1, 2, 300], np.int64),
        np.array([1, 2, 300], np.uint16),
        np.array([1, 0, 2, 0, 300, 0], np.uint32)[::2],
        np.array([1, 2, 300], ">u4"),
    ):
        assert trie.find_longest_prefix(key) == (3, "stored")
        assert trie.get(key) == "stored"
    assert trie.find_longest_prefix(range(1, 9)) == (2, "stored")
    trie.insert([0, 2**32 - 1], "largest")
    assert [key.tolist() for key, _ in trie.items() if isinstance(key, np.ndarray)] == [[0, 2**32 - 1], [1, 2, 300]]


@pytest.mark.parametrize(
    ("kind", "key", "error", "says"),
    [
        ("ids", "text", TypeError, "sequence of ints.*not str"),
        ("ids", b"bytes", TypeError, "sequence of ints.*not bytes"),
        ("ids", {1, 2}, TypeError, "sequence of ints.*not set"),
        ("ids", 5, TypeError, "sequence of ints.*not int"),
        ("ids", [1.0], TypeError, "ints only"),
        ("ids", ["1"], TypeError, "ints only"),
        ("ids", [3, -1], ValueError, "-1 does not"),
        ("ids", [2**32], ValueError, "4294967296 does not"),
        ("ids", [2**70], ValueError, "does not"),
        ("ids", np.array([3, -1]), ValueError, "-1 does not"),
        ("ids", np.array([2**32]), ValueError, "4294967296 does not"),
        ("ids", np.array([1.0]), TypeError, "not float64"),
        ("ids", np.array([True]), TypeError, "not bool"),
        ("ids", np.zeros((1, 2), np.uint32), TypeError, r"one dimension, not uint32 \[1, 2\]"),
        ("bytes", "text", TypeError, "bytes, not str"),
        ("bytes", [1, 2], TypeError, "bytes, not list"),
        ("text", b"bytes", TypeError, "str, not bytes"),
    ],
)
def test_what_is_no_key_is_refused_and_changes_nothing(kind: Keys, key: Any, error: type[Exception], says: str) -> None:
    trie: RadixTrie[int] = RadixTrie(kind)
    operations: list[Callable[[], object]] = [
        lambda: trie.insert(key, 1),
        lambda: trie.remove(key),
        lambda: trie.get(key),
        lambda: trie.touch(key),
        lambda: key in trie,
        lambda: trie.find_longest_prefix(key),
        lambda: trie.candidates(key, 1),
    ]
    for operation in operations:
        with pytest.raises(error, match=says):
            operation()
    assert len(trie) == 0 and trie.num_bytes == 0
    trie.check()


def test_there_are_three_kinds_of_keys() -> None:
    unknown: Any = "words"
    with pytest.raises(ValueError, match="'ids', 'bytes', 'text', not 'words'"):
        RadixTrie(unknown)


def test_check_finds_an_edge_that_ends_inside_an_id() -> None:
    trie: RadixTrie[int] = RadixTrie()
    trie.insert([1, 2, 3], 1)
    trie.check()
    (child,) = trie.root.below()
    child.edge = child.edge[:-1]
    with pytest.raises(AssertionError, match="inside a unit"):
        trie.check()


def grown(count: int) -> list[np.ndarray]:
    """Conversations of ten turns, every turn a key."""
    chooser = np.random.default_rng(1)
    whole = [chooser.integers(0, 150_000, 500, dtype=np.uint32) for _ in range(count // 10)]
    return [ids[: 50 * turn] for ids in whole for turn in range(1, 11)]


def forked(count: int) -> list[np.ndarray]:
    """Every ten keys share their first 100 of 120 ids."""
    chooser = np.random.default_rng(2)
    heads = [chooser.integers(0, 150_000, 100, dtype=np.uint32) for _ in range(count // 10)]
    return [np.append(head, chooser.integers(0, 150_000, 20, dtype=np.uint32)) for head in heads for _ in range(10)]


def short(count: int) -> list[np.ndarray]:
    """Three ids each."""
    chooser = np.random.default_rng(3)
    return [chooser.integers(0, 150_000, 3, dtype=np.uint32) for _ in range(count)]


def nested(count: int) -> list[np.ndarray]:
    """Every beginning of a long key."""
    ids = np.random.default_rng(4).integers(0, 150_000, 1_000, dtype=np.uint32)
    return [ids[:end] for end in range(min(count, len(ids)))]


@pytest.mark.parametrize("shape", [grown, forked, short, nested])
def test_the_bytes_it_says_are_the_bytes_it_takes(shape: Callable[[int], list[np.ndarray]]) -> None:
    keys = shape(5_000)
    trie: RadixTrie[None] = RadixTrie()
    gc.collect()
    tracemalloc.start()
    for key in keys:
        trie.insert(key, None)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.9 < trie.num_bytes / taken < 1.15


def test_a_trie_prints_how_much_it_holds() -> None:
    trie: RadixTrie[int] = RadixTrie("text")
    trie.insert("one", 1)
    trie.insert("once", 2)
    assert repr(trie) == f"<RadixTrie keys='text': 2 entries, {trie.num_bytes:,} bytes>"
