"""A prefix cache of payloads: a lookup returns the entry that shares the longest prefix with the key.

Owns the limits, the figures and the lock. `EntryStore` finds entries (a radix trie per namespace); one eviction order
covers all namespaces. Does not know what a payload is, beyond its size.
Invariants: a payload is found by whole keys only, never by a digest; limits hold after every call; nothing pinned
expires or is evicted; expired entries are removed before every lookup, so they never hide a shorter one.

Thread-safe: one lock around every change. Sizes are measured before taking it and `on_evict` is called after releasing
it, so both may be slow, and `on_evict` may use the manager.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, TypeVar, Unpack

from rekindle.cache.eviction import EvictionOrder
from rekindle.cache.library.batch import BatchAnalysis, analyze_batch
from rekindle.cache.library.entries import (
    ENTRY_BYTES,
    CacheConfig,
    CacheEntry,
    CacheLimits,
    CacheStats,
    PrefixMatch,
    clock_time,
    content_key,
    payload_bytes,
    whole_bytes,
)
from rekindle.cache.library.entry_store import EntryStore
from rekindle.cache.trie.keys import Key, Keys, NormalizedKey, key_kind
from rekindle.keywords import check_keywords

P = TypeVar("P")


class CacheManager(Generic[P]):
    """Entries under keys of one kind: "ids" (sequences of ints, integer arrays), "bytes" or "text".

        from rekindle.cache import CacheManager

        cache = CacheManager(keys="text", max_entries=3)
        cache.store("You are a clerk. Sort the letters.", "its KV")
        match = cache.lookup("You are a clerk. Answer the phone.")
        assert match is not None and match.remaining == "Answer the phone."
        print(cache)

    `limits` are fields of `CacheConfig` that override those of `config`; TypeError for an unknown one.

    `size_of` returns a payload's bytes. Without it, arrays, tensors, bytes, text and containers of these are measured;
    others count as zero, or raise TypeError if memory is limited. `on_evict` is called for each entry that was evicted
    or has expired; the first exception it raises reaches the caller after all calls. `digest_of` computes content keys.
    """

    def __init__(
        self,
        config: CacheConfig | None = None,
        *,
        keys: Keys = "ids",
        size_of: Callable[[P], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_evict: Callable[[CacheEntry[P]], None] | None = None,
        digest_of: Callable[[bytes], bytes] = content_key,
        **limits: Unpack[CacheLimits],
    ) -> None:
        if not isinstance(config, CacheConfig | None):
            raise TypeError(f"config is a CacheConfig, not {type(config).__name__}")
        check_keywords("CacheManager", limits, CacheLimits.__annotations__)
        self.config = replace(CacheConfig() if config is None else config, **limits)
        self.keys = keys
        self._kind = key_kind(keys)
        self._size_of = size_of
        self._clock = clock
        self._on_evict = on_evict
        self._digest_of = digest_of
        self._lock = threading.Lock()
        self._order = EvictionOrder(ttl=self.config.ttl_s)
        self._entries: EntryStore[P] = EntryStore(keys)
        self._num_limited = 0  # groups that have been given their quota
        self._counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        entries = self._entries  # without the lock: a clock or a debugger may call this while it is held
        held = f"{len(entries):,} of {self.config.max_entries:,} entries, {len(entries.pinned):,} pinned"
        return f"<CacheManager keys={self.keys!r}: {held}, {entries.num_bytes:,} bytes>"

    def __len__(self) -> int:
        with self._turn():
            return len(self._entries)

    def lookup(self, key: Key, *, namespace: str = "") -> PrefixMatch[P] | None:
        """Find the entry that shares the longest prefix with the key, and record a use of it.

        The shared prefix may end inside the entry's key. Ties go to the entry stored under exactly this key, else to
        the most recently used. None if the prefix is shorter than `min_prefix_length`. Costs the length of the two
        keys, independent of the number of entries.
        """
        wanted = self._normalized(key)
        with self._turn() as (now, _):
            self._counts["lookups"] += 1
            self._counts["tokens_looked_up"] += len(wanted)
            matched, slot = self._entries.nearest(wanted, namespace)
            if slot is None or matched < self.config.min_prefix_length:
                return None
            self._order.touch(slot, now)
            self._entries.use(slot)
            self._counts["hits"] += 1
            self._counts["tokens_saved"] += matched
            asked = wanted if isinstance(key, (memoryview, deque)) else key  # neither slices like the other keys
            return PrefixMatch(self._entries[slot], asked, matched)

    def store(self, key: Key, payload: P, *, namespace: str = "") -> CacheEntry[P] | None:
        """Store the payload under the key, replacing an existing one (a pinned entry stays pinned).

        Counts as a use. None, with no effect, if it is refused: it is larger than the whole cache may be, pinned
        entries take the room, or the key is shorter than `min_prefix_length` and could never be found.
        """
        if not isinstance(namespace, str):
            raise TypeError(f"a namespace is a str, not {type(namespace).__name__}")
        data = self._kind.to_bytes(key)
        size = self._measure(payload) + 2 * len(data) + ENTRY_BYTES
        normalized, digest = self._kind.from_bytes(data), self._digest_of(data)
        if not isinstance(digest, bytes):
            raise TypeError(f"what digest_of returns must be bytes, not {digest!r}")
        with self._turn() as (now, evicted):
            entry = CacheEntry(normalized, payload, namespace, digest, size, now)
            old = self._entries.find(normalized, namespace)
            if not self._has_room(entry, old):
                self._counts["refused"] += 1
                return None
            slot = self._put(entry) if old is None else self._put_in_place(entry, old)
            self._make_room(entry, now, evicted)
            self._order.release(slot, now)
            if slot in self._entries.pinned:
                self._order.hold(slot)
            self._counts["stores"] += 1
            return entry

    def remove(self, key: Key, *, namespace: str = "") -> CacheEntry[P] | None:
        """Remove and return the entry with exactly this key, pinned or not; None if there is none."""
        wanted = self._normalized(key)
        with self._turn():
            slot = self._entries.find(wanted, namespace)
            return None if slot is None else self._drop(slot)

    def pin(self, key: Key, *, namespace: str = "") -> bool:
        """Protect the entry with exactly this key from eviction and expiry; False if there is none. Idempotent."""
        wanted = self._normalized(key)
        with self._turn():
            slot = self._entries.find(wanted, namespace)
            if slot is not None and slot not in self._entries.pinned:
                self._order.hold(slot)
                self._entries.pin(slot)
            return slot is not None

    def unpin(self, key: Key, *, namespace: str = "") -> bool:
        """Unpin the entry with exactly this key, as used now; False if it was not pinned."""
        wanted = self._normalized(key)
        with self._turn() as (now, _):
            slot = self._entries.find(wanted, namespace)
            if slot is None or slot not in self._entries.pinned:
                return False
            self._entries.unpin(slot)
            self._order.release(slot, now)
            return True

    def evict(self, count: int = 1) -> list[CacheEntry[P]]:
        """Evict and return the next `count` entries in eviction order; fewer if the others are pinned."""
        with self._turn() as (now, evicted):
            before = len(evicted)
            while len(evicted) - before < count and self._evict_one(now, evicted):
                pass
            return evicted[before:]

    def clear(self, *, namespace: str | None = None) -> int:
        """Remove all entries of a namespace, or of all namespaces (None), pinned or not; return how many."""
        with self._turn():
            slots = self._entries.slots(namespace)
            for slot in slots:
                self._drop(slot)
            return len(slots)

    def stats(self) -> CacheStats:
        """Return the current figures."""
        with self._turn():
            entries = self._entries
            num_pinned = len(entries.pinned)
            return CacheStats(**self._counts, entries=len(entries), pinned=num_pinned, bytes=entries.num_bytes)

    def analyze_batch(self, prompts: Iterable[Key]) -> BatchAnalysis:
        """Find the prefixes a batch of prompts shares; stored entries are not considered."""
        return analyze_batch(prompts, keys=self.keys, min_length=self.config.min_prefix_length)

    def check(self) -> None:
        """Assert that entries, tries, order, pins and limits agree, recomputing each."""
        with self._lock:
            entries, config = self._entries, self.config
            entries.check(self._digest_of)
            self._order.check()
            assert len(self._order) == len(entries), f"{len(self._order)} in the order, {len(entries)} entries"
            for slot in entries.slots(None):
                assert slot in self._order, f"slot {slot} is not in the order"
                assert self._order.is_held(slot) == (slot in entries.pinned), f"slot {slot}: held and pinned disagree"
                namespace = entries[slot].namespace
                assert not self._is_over_quota(namespace), f"{namespace!r} is over its quota"
            assert len(entries) <= config.max_entries, f"{len(entries)} entries, the limit is {config.max_entries}"
            assert entries.num_bytes <= config.max_bytes, f"{entries.num_bytes} bytes, the limit is {config.max_bytes}"

    @contextmanager
    def _turn(self) -> Iterator[tuple[float, list[CacheEntry[P]]]]:
        """Run one call under the lock: yields the time and a list of removed entries (expired first) for `on_evict`."""
        evicted: list[CacheEntry[P]] = []
        try:
            with self._lock:
                now = clock_time(self._clock())
                while (slot := self._order.pop_expired(now)) is not None:
                    evicted.append(self._entries.drop(slot))
                    self._counts["expirations"] += 1
                yield now, evicted
        finally:
            self._notify(evicted)

    def _notify(self, evicted: Iterable[CacheEntry[P]]) -> None:
        """Call `on_evict` for each entry, even after a failed call; then raise the first failure."""
        if self._on_evict is None:
            return
        failed: list[Exception] = []
        for entry in evicted:
            try:
                self._on_evict(entry)
            except Exception as error:
                # Border: an exception of the caller's function must not prevent the remaining calls.
                failed.append(error)
        if failed:
            raise failed[0]

    def _measure(self, payload: P) -> int:
        if self._size_of is not None:
            return whole_bytes(self._size_of(payload), "what size_of returns")
        known = payload_bytes(payload)
        if known is None and self.config.max_memory_mb is not None:
            raise TypeError(
                f"max_memory_mb needs the size of every payload, and that of a {type(payload).__name__} is not known: "
                "give CacheManager a size_of"
            )
        return known or 0

    def _normalized(self, key: Key) -> NormalizedKey:
        """Return the key in its normalized form; TypeError or ValueError for one of another kind."""
        return self._kind.from_bytes(self._kind.to_bytes(key))

    def _has_room(self, entry: CacheEntry[P], old: int | None) -> bool:
        """Whether the entry is long enough and fits next to all pinned entries, except `old`, which it replaces."""
        entries, config, namespace = self._entries, self.config, self._entries.namespace(entry.namespace)
        is_pinned = old in entries.pinned
        pinned_bytes = entries.pinned_bytes - (entries[old].num_bytes if old is not None and is_pinned else 0)
        pinned_here = 0 if namespace is None else namespace.num_pinned
        quota = config.max_entries_per_namespace
        return (
            len(entry) >= config.min_prefix_length
            and len(entries.pinned) - is_pinned < config.max_entries
            and pinned_bytes + entry.num_bytes <= config.max_bytes
            and (quota is None or pinned_here - is_pinned < quota)
        )

    def _put(self, entry: CacheEntry[P]) -> int:
        """Add an entry, held. A group gets its quota once, and keeps it when its number is reused."""
        slot, quota = self._entries.put(entry), self.config.max_entries_per_namespace
        namespace = self._entries.namespace(entry.namespace)
        assert namespace is not None
        if quota is None:
            self._order.add(slot)
            return slot
        for group in range(self._num_limited, self._entries.num_groups):
            self._order.set_quota(group, quota)
        self._num_limited = self._entries.num_groups
        self._order.add(slot, group=namespace.group)
        return slot

    def _put_in_place(self, entry: CacheEntry[P], slot: int) -> int:
        """Replace a slot's payload, held; its use count continues."""
        self._order.hold(slot)
        self._entries.replace(slot, entry)
        return slot

    def _make_room(self, entry: CacheEntry[P], now: float, evicted: list[CacheEntry[P]]) -> None:
        """Evict others until all limits hold: `entry` is held, and `_has_room` ensured that the others suffice."""
        while (
            self._is_over_quota(entry.namespace)  # the only one over, so its entries are evicted before all others
            or len(self._entries) > self.config.max_entries
            or self._entries.num_bytes > self.config.max_bytes
        ):
            made = self._evict_one(now, evicted)
            assert made, "everything is pinned, though there was room"

    def _is_over_quota(self, namespace: str) -> bool:
        found, quota = self._entries.namespace(namespace), self.config.max_entries_per_namespace
        return quota is not None and found is not None and len(found) > quota

    def _evict_one(self, now: float, evicted: list[CacheEntry[P]]) -> bool:
        slot = self._order.pop(now)
        if slot is not None:
            evicted.append(self._entries.drop(slot))
            self._counts["evictions"] += 1
        return slot is not None

    def _drop(self, slot: int) -> CacheEntry[P]:
        self._order.remove(slot)
        return self._entries.drop(slot)
