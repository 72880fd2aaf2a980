"""Many threads on one manager: no payload of another key, no lost count, every limit kept."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator

import pytest

from rekindle.cache import CacheConfig, CacheEntry, CacheManager
from rekindle.cache.library.entries import ENTRY_BYTES

THREADS = 6
CALLS = 400
SYSTEMS = [tuple(range(100 * number, 100 * number + 20)) for number in range(4)]
Payload = tuple[str, tuple[int, ...]]


@pytest.fixture(autouse=True)
def switching() -> Iterator[None]:
    """Threads that take turns every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Hammer(threading.Thread):
    """Calls everything at random; a payload says whose key it was stored under."""

    def __init__(self, manager: CacheManager[Payload], seed: int, start: threading.Barrier) -> None:
        super().__init__()
        self.manager = manager
        self.chooser = random.Random(seed)
        self.barrier = start
        self.error: BaseException | None = None
        self.lookups = self.hits = self.saved = self.stored = self.refused = self.removed = self.evicted = 0

    def run(self) -> None:
        self.barrier.wait()
        try:
            for _ in range(CALLS):
                self.call()
        except BaseException as error:
            self.error = error

    def call(self) -> None:
        chooser, manager = self.chooser, self.manager
        key = (*chooser.choice(SYSTEMS), *(chooser.randrange(3) for _ in range(chooser.randrange(4))))
        namespace = chooser.choice(["ada", "bob"])
        match chooser.randrange(12):
            case 0 | 1 | 2 | 3:
                entry = manager.store(key, (namespace, key), namespace=namespace)
                self.stored += entry is not None
                self.refused += entry is None
            case 4:
                self.removed += manager.remove(key, namespace=namespace) is not None
            case 5:
                manager.pin(key, namespace=namespace)
            case 6 | 7:
                manager.unpin(key, namespace=namespace)
            case 8:
                self.evicted += len(manager.evict(chooser.randrange(3)))
            case _:
                self.look_up(key, namespace)

    def look_up(self, key: tuple[int, ...], namespace: str) -> None:
        found = self.manager.lookup(key, namespace=namespace)
        self.lookups += 1
        if found is None:
            return
        self.hits += 1
        self.saved += found.matched
        space, stored = found.payload
        assert space == namespace == found.entry.namespace
        assert stored == tuple(found.entry.key)
        assert found.matched >= 20 and stored[: found.matched] == key[: found.matched]


def test_threads_hammer_one_manager() -> None:
    config = CacheConfig(
        max_entries=40,
        max_memory_mb=30 * ENTRY_BYTES / (1 << 20),
        ttl_s=0.05,
        min_prefix_length=20,
    )
    left: list[CacheEntry[Payload]] = []
    manager: CacheManager[Payload] = CacheManager(config, size_of=lambda payload: len(payload[1]), on_evict=left.append)
    barrier = threading.Barrier(THREADS + 1)
    hammers = [Hammer(manager, seed, barrier) for seed in range(THREADS)]
    for hammer in hammers:
        hammer.start()
    barrier.wait()
    while any(hammer.is_alive() for hammer in hammers):
        manager.check()
        assert manager.stats().entries <= 40
    for hammer in hammers:
        hammer.join()
        assert hammer.error is None, hammer.error
    stats = manager.stats()
    manager.check()
    assert stats.lookups == sum(hammer.lookups for hammer in hammers)
    assert stats.hits == sum(hammer.hits for hammer in hammers) > 0
    assert stats.tokens_saved == sum(hammer.saved for hammer in hammers)
    assert stats.stores == sum(hammer.stored for hammer in hammers)
    assert stats.refused == sum(hammer.refused for hammer in hammers)
    assert stats.evictions + stats.expirations == len(left) > 0
    assert stats.evictions >= sum(hammer.evicted for hammer in hammers) > 0
