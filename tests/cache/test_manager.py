"""The manager against a naive dictionary after every call, and what it promises at the edges."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, fields
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rekindle.cache import CacheConfig, CacheEntry, CacheManager, content_key
from rekindle.cache.library.entries import ENTRY_BYTES, CacheLimits

PIECES = ["", "a", "b", "ü", "\U0001f600"]  # few, so that keys meet
keys = st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("in common ".join)
namespaces = st.sampled_from(["", "", "ada"])
Name = tuple[str, str]  # namespace and key


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def weak(data: bytes) -> bytes:
    """A digest of three values: nearly everything collides."""
    return bytes([sum(data) % 3])


def shared(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass
class Kept:
    payload: bytes
    last_use: float
    is_pinned: bool = False


class ManagerMachine(RuleBasedStateMachine):
    """The model is a dict whose order is the order of use, oldest first; whoever should leave is searched for in it."""

    @initialize(
        entries=st.integers(1, 6),
        budget=st.none() | st.integers(2 * ENTRY_BYTES, 6 * ENTRY_BYTES),
        quota=st.none() | st.integers(1, 3),
        ttl=st.none() | st.integers(2, 8),
        least=st.sampled_from([1, 1, 2, 5]),
        digest=st.sampled_from([weak, content_key]),
    )
    def begin(
        self, entries: int, budget: int | None, quota: int | None, ttl: int | None, least: int, digest: Any
    ) -> None:
        self.config = CacheConfig(entries, None if budget is None else budget / (1 << 20), ttl, least, quota)
        self.clock = Clock()
        self.told: list[CacheEntry[bytes]] = []
        self.manager: CacheManager[bytes] = CacheManager(
            self.config, keys="text", clock=self.clock, on_evict=self.told.append, digest_of=digest
        )
        self.model: dict[Name, Kept] = {}
        self.counts = {"lookups": 0, "hits": 0, "tokens_looked_up": 0, "tokens_saved": 0, "stores": 0, "refused": 0}
        self.evicted = self.expired = self.serial = 0

    @rule(seconds=st.integers(0, 4))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule(key=keys, namespace=namespaces, size=st.sampled_from([0, 10, ENTRY_BYTES, 9 * ENTRY_BYTES]))
    def store(self, key: str, namespace: str, size: int) -> None:
        self.serial += 1
        payload = self.serial.to_bytes(4, "little") + bytes(size)
        expired = self.expire()
        name = (namespace, key)
        fits = self.fits(name, payload)
        entry = self.manager.store(key, payload, namespace=namespace)
        assert (entry is not None) == fits
        self.counts["stores" if fits else "refused"] += 1
        if entry is None:
            return self.hear(expired, [])
        old = self.model.pop(name, None)
        self.model[name] = Kept(payload, self.clock.now, old is not None and old.is_pinned)
        self.hear(expired, self.make_room(name))
        assert (entry.key, entry.namespace, entry.payload) == (key, namespace, payload)

    @rule(key=keys, namespace=namespaces)
    def look_up(self, key: str, namespace: str) -> None:
        self.hear_after(lambda: self.manager.lookup(key, namespace=namespace), key, namespace)

    def hear_after(self, call: Any, key: str, namespace: str) -> None:
        expired = self.expire()
        match = call()
        self.hear(expired, [])
        here = [other for space, other in reversed(self.model) if space == namespace]
        length = max((shared(key, other) for other in here), default=0)
        self.counts["lookups"] += 1
        self.counts["tokens_looked_up"] += len(key)
        if length < self.config.min_prefix_length:
            assert match is None
            return
        found = key if key in here else next(other for other in here if shared(key, other) == length)
        assert match is not None
        assert (match.matched, match.remaining) == (length, key[length:])
        assert (match.entry.key, match.payload) == (found, self.model[namespace, found].payload)
        assert match.is_exact == (found == key)
        self.counts["hits"] += 1
        self.counts["tokens_saved"] += length
        self.use((namespace, found))

    @rule(key=keys, namespace=namespaces)
    def remove(self, key: str, namespace: str) -> None:
        expired = self.expire()
        entry = self.manager.remove(key, namespace=namespace)
        self.hear(expired, [])
        kept = self.model.pop((namespace, key), None)
        assert (entry.payload if entry else None) == (kept.payload if kept else None)

    @rule(key=keys, namespace=namespaces)
    def pin(self, key: str, namespace: str) -> None:
        expired = self.expire()
        assert self.manager.pin(key, namespace=namespace) == ((namespace, key) in self.model)
        self.hear(expired, [])
        if (namespace, key) in self.model:
            self.model[namespace, key].is_pinned = True

    @rule(key=keys, namespace=namespaces)
    def unpin(self, key: str, namespace: str) -> None:
        expired = self.expire()
        kept = self.model.get((namespace, key))
        was_pinned = kept is not None and kept.is_pinned
        assert self.manager.unpin(key, namespace=namespace) == was_pinned
        self.hear(expired, [])
        if kept is not None and was_pinned:
            kept.is_pinned = False
            self.use((namespace, key))

    @rule(count=st.integers(0, 3))
    def evict(self, count: int) -> None:
        expired = self.expire()
        idle = [name for name, kept in self.model.items() if not kept.is_pinned]
        left = [(entry.namespace, entry.key) for entry in self.manager.evict(count)]
        assert left == idle[:count]
        for name in left:
            del self.model[name]
        self.hear(expired, left)

    @rule(namespace=st.none() | namespaces)
    def clear(self, namespace: str | None) -> None:
        expired = self.expire()
        gone = [name for name in self.model if namespace in (None, name[0])]
        assert self.manager.clear(namespace=namespace) == len(gone)
        self.hear(expired, [])
        for name in gone:
            del self.model[name]

    @invariant()
    def agrees(self) -> None:
        self.manager.check()
        expired = self.expire()
        stats = self.manager.stats()
        self.hear(expired, [])
        assert {name: getattr(stats, name) for name in self.counts} == self.counts
        assert (stats.entries, stats.bytes) == (len(self.model), sum(map(self.size, self.model)))
        assert (stats.evictions, stats.expirations) == (self.evicted, self.expired)
        assert stats.pinned == sum(kept.is_pinned for kept in self.model.values())
        assert len(self.manager) == len(self.model)

    def use(self, name: Name) -> None:
        kept = self.model.pop(name)
        kept.last_use = self.clock.now
        self.model[name] = kept

    def size(self, name: Name) -> int:
        return len(self.model[name].payload) + 2 * len(name[1].encode()) + ENTRY_BYTES

    def expire(self) -> set[Name]:
        """Take out of the model what is expired by now; the next call should tell of it."""
        ttl = self.config.ttl_s or math.inf
        gone = [
            name for name, kept in self.model.items() if not kept.is_pinned and kept.last_use + ttl <= self.clock.now
        ]
        for name in gone:
            del self.model[name]
        self.expired += len(gone)
        return set(gone)

    def fits(self, name: Name, payload: bytes) -> bool:
        pinned = [other for other, kept in self.model.items() if kept.is_pinned and other != name]
        size = len(payload) + 2 * len(name[1].encode()) + ENTRY_BYTES
        return (
            len(name[1]) >= self.config.min_prefix_length
            and len(pinned) < self.config.max_entries
            and sum(map(self.size, pinned)) + size <= self.config.max_bytes
            and sum(space == name[0] for space, _ in pinned) < (self.config.max_entries_per_namespace or math.inf)
        )

    def make_room(self, new: Name) -> list[Name]:
        """Let the least recently used leave the model, those of a namespace over its quota before others."""
        left = []
        while True:
            here = [name for name in self.model if name[0] == new[0]]
            is_over = len(here) > (self.config.max_entries_per_namespace or math.inf)
            total = sum(map(self.size, self.model))
            if not (is_over or len(self.model) > self.config.max_entries or total > self.config.max_bytes):
                return left
            among = here if is_over else list(self.model)
            left.append(next(name for name in among if name != new and not self.model[name].is_pinned))
            del self.model[left[-1]]

    def hear(self, expired: set[Name], evicted: list[Name]) -> None:
        """What was told is what the model lost: the expired first."""
        told = [(str(entry.namespace), str(entry.key)) for entry in self.told]
        self.told.clear()
        assert set(told[: len(expired)]) == expired
        assert told[len(expired) :] == evicted
        self.evicted += len(evicted)


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def held(manager: CacheManager[Any]) -> list[str]:
    """Keys still stored, of single characters."""
    return [key for key in "abcdefgh" if (match := manager.lookup(key)) is not None and match.is_exact]


def test_a_prefix_is_found_inside_an_entry() -> None:
    manager: CacheManager[str] = CacheManager()
    manager.store([1, 2, 3, 4], "kv of four")
    match = manager.lookup(np.array([1, 2, 9], np.int64))
    assert match is not None
    assert (match.matched, match.payload, len(match.entry)) == (2, "kv of four", 4)
    assert list(match.remaining) == [9]


def test_the_exact_entry_comes_before_a_more_recent_longer_one() -> None:
    manager: CacheManager[str] = CacheManager(keys="text")
    manager.store("turn one", "short")
    manager.store("turn one, turn two", "long")
    match = manager.lookup("turn one")
    assert match is not None and match.is_exact and match.payload == "short"
    inside = manager.lookup("turn one, t")
    assert inside is not None and inside.payload == "long"


def test_an_expired_entry_does_not_hide_a_shorter_valid_one() -> None:
    clock = Clock()
    manager: CacheManager[str] = CacheManager(CacheConfig(ttl_s=10), keys="text", clock=clock)
    manager.store("system and more", "long")
    clock.now += 9
    manager.store("system", "short")
    clock.now += 1
    match = manager.lookup("system and more of it")
    assert match is not None and (match.payload, match.matched) == ("short", 6)
    assert manager.stats().expirations == 1 and len(manager) == 1


def test_a_use_begins_a_lifetime_anew() -> None:
    clock = Clock()
    manager: CacheManager[str] = CacheManager(CacheConfig(ttl_s=10), keys="text", clock=clock)
    for key in "ab":
        manager.store(key, key)
    clock.now += 9
    assert manager.lookup("a") is not None
    clock.now += 9
    assert held(manager) == ["a"]


def test_a_pinned_entry_neither_expires_nor_leaves() -> None:
    clock = Clock()
    manager: CacheManager[str] = CacheManager(CacheConfig(max_entries=2, ttl_s=5), keys="text", clock=clock)
    manager.store("a", "a")
    assert manager.pin("a") and not manager.pin("b")
    clock.now += 60
    for key in "bcd":
        manager.store(key, key)
    assert held(manager) == ["a", "d"]
    assert manager.evict(9) != [] and held(manager) == ["a"]
    assert manager.unpin("a") and not manager.unpin("a")
    clock.now += 5
    assert held(manager) == []


def test_what_is_too_large_is_refused_and_nobody_leaves_for_it() -> None:
    left: list[CacheEntry[bytes]] = []
    manager: CacheManager[bytes] = CacheManager(CacheConfig(max_memory_mb=1), keys="text", on_evict=left.append)
    assert manager.store("a", bytes(1000)) is not None
    most = (1 << 20) - ENTRY_BYTES - 2
    assert manager.store("b", bytes(most + 1)) is None
    assert manager.store("a", bytes(most + 1)) is None
    match = manager.lookup("a")
    assert match is not None and len(match.payload) == 1000 and left == []
    assert manager.store("b", bytes(most)) is not None
    assert [entry.key for entry in left] == ["a"]
    assert manager.stats().refused == 2 and manager.stats().bytes == 1 << 20
    manager.check()


def test_what_is_pinned_can_leave_no_room() -> None:
    manager: CacheManager[str] = CacheManager(CacheConfig(max_entries=1), keys="text")
    manager.store("a", "old")
    manager.pin("a")
    assert manager.store("b", "b") is None
    assert manager.store("a", "new") is not None
    match = manager.lookup("a")
    assert match is not None and match.payload == "new" and manager.stats().pinned == 1
    assert manager.evict() == []


def test_what_is_pinned_counts_its_bytes_and_its_place_among_its_own() -> None:
    manager: CacheManager[bytes] = CacheManager(CacheConfig(max_memory_mb=1, max_entries_per_namespace=1), keys="text")
    assert manager.store("a", bytes(1 << 19)) is not None and manager.pin("a")
    assert manager.store("b", bytes(1 << 19), namespace="ada") is None
    assert manager.store("b", b"small") is None, "the only place of its namespace is taken"
    assert manager.store("b", b"small", namespace="ada") is not None
    assert manager.store("a", b"in its own place") is not None
    assert manager.store("b", bytes(1 << 19), namespace="ada") is not None
    manager.check()
    assert manager.stats().pinned == 1 and manager.stats().refused == 2


def test_of_several_the_one_used_last_is_found() -> None:
    manager: CacheManager[str] = CacheManager(keys="text")
    for key in ("system one", "system two", "system three"):
        manager.store(key, key)
    assert manager.lookup("system one, and more") is not None
    match = manager.lookup("system")
    assert match is not None and match.payload == "system one"


def test_one_namespace_cannot_drive_out_another() -> None:
    manager: CacheManager[str] = CacheManager(CacheConfig(max_entries=4, max_entries_per_namespace=3), keys="text")
    manager.store("a", "mine", namespace="ada")
    for key in "abcdefgh":
        manager.store(key, key, namespace="bob")
    match = manager.lookup("a", namespace="ada")
    assert match is not None and match.payload == "mine"
    assert manager.lookup("a", namespace="bob") is None
    assert [manager.lookup(key, namespace="bob") is None for key in "efgh"] == [True, False, False, False]
    assert manager.lookup("a") is None and manager.lookup("a", namespace="eve") is None
    assert manager.clear(namespace="bob") == 3 and len(manager) == 1


def test_namespaces_that_come_and_go_keep_their_quotas() -> None:
    manager: CacheManager[int] = CacheManager(CacheConfig(max_entries_per_namespace=2), keys="text")
    for number in range(20):
        for key in "abc":
            manager.store(key, number, namespace=f"n{number}")
        assert len(manager) == 2
        manager.check()
        assert manager.clear() == 2


def test_a_crowd_keeps_to_the_limits() -> None:
    manager: CacheManager[int] = CacheManager(CacheConfig(max_entries=10))
    for number in range(200):
        manager.store([number % 7, number % 11, number % 13], number)
        manager.lookup([number % 5, number % 3])
        assert len(manager) <= 10
    manager.check()
    assert manager.stats().evictions > 50


def test_keys_of_another_kind_are_errors_whatever_is_stored() -> None:
    manager: CacheManager[str] = CacheManager()
    for key in ("text", b"bytes", [-1], [2**32], [1.5]):
        for call in (manager.lookup, manager.remove, manager.pin, manager.unpin):
            with pytest.raises((TypeError, ValueError)):
                call(key)  # a key that the annotations allow for other managers
        with pytest.raises((TypeError, ValueError)):
            manager.store(key, "x")
    assert manager.stats().lookups == 0
    with pytest.raises(ValueError, match="'ids', 'bytes', 'text'"):
        CacheManager(keys="words")


def test_a_key_that_is_changed_afterwards_changes_nothing() -> None:
    ids = np.array([1, 2, 3], np.uint32)
    manager: CacheManager[str] = CacheManager()
    entry = manager.store(ids, "kept")
    ids[0] = 9
    match = manager.lookup([1, 2, 3])
    assert match is not None and match.entry is entry and match.is_exact
    assert entry is not None and entry.content_key == content_key(np.array([1, 2, 3], "<u4").tobytes())
    assert isinstance(entry.key, np.ndarray)
    with pytest.raises(ValueError, match="read-only"):
        entry.key[0] = 9
    manager.check()


def test_a_weak_digest_never_gives_another_payload() -> None:
    manager: CacheManager[int] = CacheManager(digest_of=lambda data: b"same")
    prompts = {(number, number * 7 % 31, number % 3): number for number in range(300)}
    for key, payload in prompts.items():
        manager.store(key, payload)
    for key, payload in prompts.items():
        match = manager.lookup(key)
        assert match is not None and match.is_exact and match.payload == payload
    manager.check()


def test_sizes_that_nobody_knows_are_asked_for() -> None:
    unlimited: CacheManager[object] = CacheManager(keys="text")
    entry = unlimited.store("a", object())
    assert entry is not None and entry.num_bytes == ENTRY_BYTES + 2
    limited: CacheManager[object] = CacheManager(CacheConfig(max_memory_mb=1), keys="text")
    with pytest.raises(TypeError, match="size_of"):
        limited.store("a", object())
    sized: CacheManager[object] = CacheManager(CacheConfig(max_memory_mb=1), keys="text", size_of=lambda payload: 7)
    entry = sized.store("a", object())
    assert entry is not None and entry.num_bytes == ENTRY_BYTES + 2 + 7


@pytest.mark.parametrize("size", [-1, math.nan, math.inf, 1.5, None, "a", np.float32(3)], ids=repr)
@pytest.mark.parametrize("limit", [None, 1.0])
def test_sizes_that_are_no_number_of_bytes_are_errors(size: Any, limit: float | None) -> None:
    manager: CacheManager[object] = CacheManager(
        CacheConfig(max_memory_mb=limit), keys="text", size_of=lambda payload: size
    )
    with pytest.raises((TypeError, ValueError), match="what size_of returns must be a"):
        manager.store("a", object())
    assert len(manager) == 0 and manager.stats().bytes == 0


def test_sizes_are_summed_as_ints() -> None:
    manager: CacheManager[object] = CacheManager(keys="text", size_of=lambda payload: np.uint8(250))
    for key in "abc":
        entry = manager.store(key, object())
        assert entry is not None and type(entry.num_bytes) is int and entry.num_bytes == 250 + 2 + ENTRY_BYTES
    manager.check()


def test_what_cannot_be_stored_changes_nothing() -> None:
    manager: CacheManager[int] = CacheManager(keys="text")
    nobody: Any = None
    with pytest.raises(TypeError, match="a namespace is a str"):
        manager.store("a", 1, namespace=nobody)
    manager.check()
    assert len(manager) == 0 and manager.evict(9) == []


def test_a_digest_that_is_none_changes_nothing() -> None:
    nothing: dict[bytes, Any] = {}
    manager: CacheManager[int] = CacheManager(keys="text", digest_of=nothing.get)
    with pytest.raises(TypeError, match="what digest_of returns must be bytes"):
        manager.store("a", 1)
    assert len(manager) == 0 and manager.evict(9) == []


@pytest.mark.parametrize(
    "now", [None, "5", math.nan, math.inf, -math.inf, 10**400], ids=["None", "text", "nan", "inf", "-inf", "big"]
)
def test_a_clock_that_gives_no_time_changes_nothing(now: Any) -> None:
    times: list[Any] = [1.0]
    manager: CacheManager[int] = CacheManager(CacheConfig(ttl_s=5), keys="text", clock=lambda: times[-1])
    manager.store("a", 1)
    times.append(now)
    for call in (lambda: manager.store("b", 2), lambda: manager.lookup("a"), manager.evict):
        with pytest.raises((TypeError, ValueError), match="clock must return a"):
            call()
    times.append(2.0)
    manager.check()
    assert held(manager) == ["a"] and [entry.payload for entry in manager.evict(9)] == [1]


def test_a_config_is_no_dict() -> None:
    wrong: Any = {"max_entries": 5}
    with pytest.raises(TypeError, match="config is a CacheConfig, not dict"):
        CacheManager(wrong)


def test_all_are_told_of_though_telling_fails_and_the_first_failure_is_raised() -> None:
    told: list[Any] = []

    def tell(entry: CacheEntry[int]) -> None:
        told.append(entry.payload)
        raise RuntimeError(f"no room for {entry.payload}")

    manager: CacheManager[int] = CacheManager(keys="text", on_evict=tell)
    for number, key in enumerate("abc"):
        manager.store(key, number)
    with pytest.raises(RuntimeError, match="no room for 0"):
        manager.evict(3)
    assert told == [0, 1, 2] and len(manager) == 0


def test_what_expired_is_told_of_though_the_call_fails() -> None:
    clock, told, wrong = Clock(), [], []
    manager: CacheManager[int] = CacheManager(CacheConfig(ttl_s=1), keys="text", clock=clock, on_evict=told.append)
    manager.store("a", 1)
    clock.now += 5
    namespace: Any = wrong
    with pytest.raises(TypeError):
        manager.lookup("a", namespace=namespace)
    assert [entry.payload for entry in told] == [1]
    manager.check()


def test_a_match_counts_ids_and_bytes_whatever_holds_them() -> None:
    ids: CacheManager[int] = CacheManager()
    ids.store([1, 2, 3], 1)
    match = ids.lookup(deque([1, 2, 4]))
    assert match is not None and match.matched == 2 and list(match.remaining) == [4]
    data: CacheManager[int] = CacheManager(keys="bytes")
    data.store(b"abcdefgh", 1)
    words: Any = memoryview(np.frombuffer(b"abcdefgh", dtype="<u4"))
    found = data.lookup(words)
    assert found is not None and found.is_exact and found.savings_ratio == 1 and found.remaining == b""


def test_whoever_is_told_may_use_the_manager_and_fail() -> None:
    def told(entry: CacheEntry[str]) -> None:
        manager.store("saved " + str(entry.key), entry.payload)
        raise RuntimeError("disk full")

    manager: CacheManager[str] = CacheManager(CacheConfig(max_entries=3), keys="text", on_evict=told)
    for key in "abc":
        manager.store(key, key)
    manager.evict(0)
    with pytest.raises(RuntimeError, match="disk full"):
        manager.evict(2)
    assert manager.lookup("saved a") is not None and held(manager) == ["c"]
    manager.check()


def test_a_batch_is_analysed_with_the_managers_keys_and_least_length() -> None:
    manager: CacheManager[str] = CacheManager(CacheConfig(min_prefix_length=3), keys="text")
    assert manager.analyze_batch(["abcd", "abce", "abx"]).saved_tokens == 3


def test_limits_are_keyword_arguments_or_one_value() -> None:
    assert CacheManager(max_entries=3).config == CacheConfig(max_entries=3)
    assert CacheManager().config == CacheConfig()
    both = CacheManager(CacheConfig(max_entries=3, ttl_s=9.0), keys="text", ttl_s=4.0)
    assert both.config == CacheConfig(max_entries=3, ttl_s=4.0)
    assert list(CacheLimits.__annotations__) == [limit.name for limit in fields(CacheConfig)]
    with pytest.raises(TypeError, match=r"'max_entrys'; did you mean max_entries\?"):
        CacheManager(max_entrys=3)
    with pytest.raises(ValueError, match="max_entries must be"):
        CacheManager(max_entries=0)


def test_a_manager_prints_what_it_holds_even_to_its_own_clock() -> None:
    said: list[str] = []
    cache: CacheManager[int] = CacheManager(
        keys="text", max_entries=1000, clock=lambda: said.append(repr(cache)) or 0.0
    )
    cache.store("one", 1)
    cache.pin("one")
    assert repr(cache) == "<CacheManager keys='text': 1 of 1,000 entries, 1 pinned, 1,514 bytes>"
    assert said[-1].endswith("1 of 1,000 entries, 0 pinned, 1,514 bytes>")
