"""A cache of payloads under prefixes: whoever asks with a key gets what is kept for its longest known beginning.

Owns the limits, the figures and the lock. The shelf finds entries (a radix trie for each namespace), one eviction order
for all says who leaves. Does not know what a payload is, beyond its size.
Invariants: a payload is found by whole keys only, never by a digest; limits hold after every call; nothing pinned
expires or leaves; an expired entry is taken out before anything is looked up, so it never hides a shorter one.

Thread-safe: one lock around every change. Sizes are taken before and `on_evict` is called after it, so both may take
their time, and `on_evict` may use the manager.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, TypeVar, Unpack

from rekindle.cache.eviction import EvictionOrder, Hints
from rekindle.cache.library.batch import BatchAnalysis, analyze_batch
from rekindle.cache.library.entries import (
    ENTRY_BYTES,
    CacheConfig,
    CacheEntry,
    CacheLimits,
    CacheStats,
    PrefixMatch,
    check_hints,
    clock_time,
    content_key,
    payload_bytes,
    recognition_key,
    whole_bytes,
)
from rekindle.cache.library.entry_store import EntryStore
from rekindle.cache.trie.keys import Key, Keys, SpelledKey, key_kind
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

    `limits` are the fields of `CacheConfig`, in place of those of `config` where both are given; TypeError for one that
    there is not.

    `size_of` gives a payload's bytes. Without it arrays, tensors, bytes, text and containers of these are measured;
    others count as nothing, or are a TypeError where memory is limited. `on_evict` is told of each entry that left to
    make room, was evicted or has expired; the first it raises reaches the caller, once all were told. `digest_of` makes
    the content keys.
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
        self._order = EvictionOrder(self.config.eviction_policy, ttl=self.config.ttl_s)
        self._shelf: EntryStore[P] = EntryStore(keys)
        self._num_limited = 0  # groups that have been given their quota
        self._counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        shelf = self._shelf  # without the lock: a clock or a debugger may ask while it is held
        held = f"{len(shelf):,} of {self.config.max_entries:,} entries, {len(shelf.pinned):,} pinned"
        return f"<CacheManager keys={self.keys!r}: {held}, {shelf.num_bytes:,} bytes>"

    def __len__(self) -> int:
        with self._turn():
            return len(self._shelf)

    def lookup(self, key: Key, *, namespace: str = "") -> PrefixMatch[P] | None:
        """Find the entry that shares the longest beginning with the key, and count it as used.

        The beginning may end inside the entry's key. Of several the one stored under exactly this key, else the most
        recently used. None where fewer than `min_prefix_length` are shared. Costs the length of the two keys, however
        many entries there are.
        """
        wanted = self._wanted(key)
        with self._turn() as (now, _):
            self._counts["lookups"] += 1
            self._counts["tokens_looked_up"] += len(wanted)
            matched, slot = self._shelf.nearest(wanted, namespace)
            if slot is None or matched < self.config.min_prefix_length:
                return None
            self._order.touch(slot, now)
            self._shelf.use(slot)
            self._counts["hits"] += 1
            self._counts["tokens_saved"] += matched
            asked = wanted if isinstance(key, (memoryview, deque)) else key  # neither is sliced as keys are
            return PrefixMatch(self._shelf[slot], asked, matched)

    def store(self, key: Key, payload: P, *, namespace: str = "", hints: Hints | None = None) -> CacheEntry[P] | None:
        """Keep the payload under the key, in place of the one there may be (what was pinned stays so).

        This is a use; hints of lifetime and keeping given for what is pinned hold once it is unpinned.
        None where it is refused, and then everything is as before: it is larger than the whole cache may be, or what
        is pinned leaves no room, or the key is shorter than `min_prefix_length` and could never be found.
        """
        check_hints(hints)
        if not isinstance(namespace, str):
            raise TypeError(f"a namespace is a str, not {type(namespace).__name__}")
        data = self._kind.to_bytes(key)
        size = self._measure(payload) + 2 * len(data) + ENTRY_BYTES
        kept, digest = self._kind.from_bytes(data), self._digest_of(data)
        with self._turn() as (now, left):
            entry = CacheEntry(kept, payload, namespace, digest, size, now)
            old = self._shelf.find(kept, namespace)
            if not self._has_room(entry, old):
                self._counts["refused"] += 1
                return None
            slot = self._put(entry) if old is None else self._put_in_place(entry, old)
            self._make_room(entry, now, left)
            self._order.release(slot, now, hints=hints)
            if slot in self._shelf.pinned:
                self._order.hold(slot)
            self._counts["stores"] += 1
            return entry

    def remove(self, key: Key, *, namespace: str = "") -> CacheEntry[P] | None:
        """Take the entry of exactly this key out, pinned or not; None when there is none."""
        wanted = self._wanted(key)
        with self._turn():
            slot = self._shelf.find(wanted, namespace)
            return None if slot is None else self._drop(slot)

    def pin(self, key: Key, *, namespace: str = "") -> bool:
        """Keep the entry of exactly this key from leaving and expiring; False when there is none. Twice is once."""
        wanted = self._wanted(key)
        with self._turn():
            slot = self._shelf.find(wanted, namespace)
            if slot is not None and slot not in self._shelf.pinned:
                self._order.hold(slot)
                self._shelf.pin(slot)
            return slot is not None

    def unpin(self, key: Key, *, namespace: str = "", hints: Hints | None = None) -> bool:
        """Let the entry of exactly this key leave when its turn comes, as used now; False when it was not pinned."""
        check_hints(hints)
        wanted = self._wanted(key)
        with self._turn() as (now, _):
            slot = self._shelf.find(wanted, namespace)
            if slot is None or slot not in self._shelf.pinned:
                return False
            self._shelf.unpin(slot)
            self._order.release(slot, now, hints=hints)
            return True

    def evict(self, count: int = 1) -> list[CacheEntry[P]]:
        """Take out the next `count` entries in the order they would leave; fewer where the others are pinned."""
        with self._turn() as (now, left):
            before = len(left)
            while len(left) - before < count and self._evict_one(now, left):
                pass
            return left[before:]

    def clear(self, *, namespace: str | None = None) -> int:
        """Take out all entries of a namespace, or of all of them (None), pinned or not; return how many."""
        with self._turn():
            slots = self._shelf.slots(namespace)
            for slot in slots:
                self._drop(slot)
            return len(slots)

    def stats(self) -> CacheStats:
        """The figures so far."""
        with self._turn():
            shelf = self._shelf
            return CacheStats(**self._counts, entries=len(shelf), pinned=len(shelf.pinned), bytes=shelf.num_bytes)

    def analyze_batch(self, prompts: Iterable[Key]) -> BatchAnalysis:
        """What a batch of prompts shares among themselves; what is stored already plays no part."""
        return analyze_batch(prompts, keys=self.keys, min_length=self.config.min_prefix_length)

    def check(self) -> None:
        """Derive everything anew and assert that entries, tries, order, pins and limits agree."""
        with self._lock:
            shelf, config = self._shelf, self.config
            shelf.check(self._digest_of)
            self._order.check()
            assert len(self._order) == len(shelf), f"{len(self._order)} in the order, {len(shelf)} entries"
            for slot in shelf.slots(None):
                assert slot in self._order, f"slot {slot} is not in the order"
                assert self._order.is_held(slot) == (slot in shelf.pinned), f"slot {slot}: held and pinned disagree"
                assert not self._is_over_quota(shelf[slot].namespace), f"{shelf[slot].namespace!r} is over its quota"
            assert len(shelf) <= config.max_entries, f"{len(shelf)} entries, {config.max_entries} may be"
            assert shelf.num_bytes <= config.max_bytes, f"{shelf.num_bytes} bytes, {config.max_bytes} may be"

    @contextmanager
    def _turn(self) -> Iterator[tuple[float, list[CacheEntry[P]]]]:
        """One call: the lock, the time, and a list of who left, the expired first; `on_evict` hears of them at last."""
        left: list[CacheEntry[P]] = []
        try:
            with self._lock:
                now = clock_time(self._clock())
                while (slot := self._order.pop_expired(now)) is not None:
                    left.append(self._shelf.drop(slot))
                    self._counts["expirations"] += 1
                yield now, left
        finally:
            self._tell(left)

    def _tell(self, left: Iterable[CacheEntry[P]]) -> None:
        """Tell of each who left, also where telling of another failed; then raise what failed first."""
        if self._on_evict is None:
            return
        failed: list[Exception] = []
        for entry in left:
            try:
                self._on_evict(entry)
            except Exception as error:
                # Border: whatever the caller's function raises must not keep the others from being told of.
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

    def _wanted(self, key: Key) -> SpelledKey:
        """The key in its one form; TypeError or ValueError for one of another kind, whatever is stored."""
        return self._kind.from_bytes(self._kind.to_bytes(key))

    def _has_room(self, entry: CacheEntry[P], old: int | None) -> bool:
        """Whether the entry can be found and fits beside all that is pinned, save `old` in whose place it comes."""
        shelf, config, space = self._shelf, self.config, self._shelf.space(entry.namespace)
        is_pinned = old in shelf.pinned
        pinned_bytes = shelf.pinned_bytes - (shelf[old].num_bytes if old is not None and is_pinned else 0)
        pinned_here = 0 if space is None else space.num_pinned
        quota = config.max_entries_per_namespace
        return (
            len(entry) >= config.min_prefix_length
            and len(shelf.pinned) - is_pinned < config.max_entries
            and pinned_bytes + entry.num_bytes <= config.max_bytes
            and (quota is None or pinned_here - is_pinned < quota)
        )

    def _put(self, entry: CacheEntry[P]) -> int:
        """Take an entry in, held. A group gets its quota once, and keeps it for the next namespace of that number."""
        key = recognition_key(entry.namespace, entry.content_key)  # may fail on a digest: before any change
        slot, quota = self._shelf.put(entry), self.config.max_entries_per_namespace
        space = self._shelf.space(entry.namespace)
        assert space is not None
        if quota is None:
            self._order.add(slot, key=key)
            return slot
        for group in range(self._num_limited, self._shelf.num_groups):
            self._order.set_quota(group, quota)
        self._num_limited = self._shelf.num_groups
        self._order.add(slot, group=space.group, key=key)
        return slot

    def _put_in_place(self, entry: CacheEntry[P], slot: int) -> int:
        """Give a slot another payload, held; its uses go on counting."""
        self._order.hold(slot)
        self._shelf.replace(slot, entry)
        return slot

    def _make_room(self, entry: CacheEntry[P], now: float, left: list[CacheEntry[P]]) -> None:
        """Let others leave until all limits hold: `entry` is held, and `_has_room` said that the others suffice."""
        while (
            self._is_over_quota(entry.namespace)  # and the only one that is: its entries leave before all others
            or len(self._shelf) > self.config.max_entries
            or self._shelf.num_bytes > self.config.max_bytes
        ):
            made = self._evict_one(now, left)
            assert made, "everything is pinned, though there was room"

    def _is_over_quota(self, namespace: str) -> bool:
        space, quota = self._shelf.space(namespace), self.config.max_entries_per_namespace
        return quota is not None and space is not None and len(space) > quota

    def _evict_one(self, now: float, left: list[CacheEntry[P]]) -> bool:
        slot = self._order.pop(now)
        if slot is not None:
            left.append(self._shelf.drop(slot))
            self._counts["evictions"] += 1
        return slot is not None

    def _drop(self, slot: int) -> CacheEntry[P]:
        self._order.remove(slot)
        return self._shelf.drop(slot)
