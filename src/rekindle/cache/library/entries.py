"""What a cache manager is told and what it answers: limits, entries, matches, figures. Frozen, all of them.

Owns the ranges of the limits, an entry's content key, and what payloads are counted as whose size nobody gives. Lengths
count ids, bytes or characters, as the keys do.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, TypedDict, TypeVar

from rekindle.cache.eviction import POLICIES, Hints
from rekindle.cache.trie.keys import Key, SpelledKey

P = TypeVar("P")

CONTENT_BYTES = 32
NUMBER_BYTES = 8
ENTRY_BYTES = 1_500  # counted for an entry beside payload and key: 400 to 900, or 2,600 alone in its namespace


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Limits of a manager; ValueError says which one cannot be.

    `max_memory_mb` (of 2**20 bytes) holds for payloads, keys (once as kept, once in the trie) and ENTRY_BYTES for each
    entry; None is no limit. An entry unused for `ttl_s` seconds expires. A match shorter than `min_prefix_length` is
    none. No namespace has more than `max_entries_per_namespace` entries.
    """

    max_entries: int = 1000
    max_memory_mb: float | None = None
    eviction_policy: str = "lru"
    ttl_s: float | None = None
    min_prefix_length: int = 1
    max_entries_per_namespace: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_entries", "min_prefix_length", "max_entries_per_namespace"):
            value = getattr(self, name)
            if value is None and name == "max_entries_per_namespace":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
        for name in ("max_memory_mb", "ttl_s"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value <= sys.float_info.max):
                raise ValueError(f"{name} must be a number above 0, or None for no limit, not {value!r}")
        if self.eviction_policy not in POLICIES:
            raise ValueError(f"eviction_policy must be one of {', '.join(POLICIES)}, not {self.eviction_policy!r}")

    @property
    def max_bytes(self) -> float:
        """`max_memory_mb` in bytes; infinity without a limit."""
        return math.inf if self.max_memory_mb is None else self.max_memory_mb * (1 << 20)


class CacheLimits(TypedDict, total=False):
    """The fields of `CacheConfig`, as keyword arguments."""

    max_entries: int
    max_memory_mb: float | None
    eviction_policy: str
    ttl_s: float | None
    min_prefix_length: int
    max_entries_per_namespace: int | None


@dataclass(frozen=True, slots=True, eq=False)
class CacheEntry(Generic[P]):
    """A payload and the key it is stored under: ids as a read-only u32 array [n], or bytes, or text.

    `content_key` names the key's content wherever an entry is kept besides (file, row): 32 bytes. The manager never
    finds anything by it. `num_bytes` is what the entry counts against `max_memory_mb`; `stored_at` is the clock's.
    """

    key: SpelledKey
    payload: P
    namespace: str
    content_key: bytes
    num_bytes: int
    stored_at: float

    def __len__(self) -> int:
        return len(self.key)


@dataclass(frozen=True, slots=True, eq=False)
class PrefixMatch(Generic[P]):
    """The entry that shares the longest beginning with `key`: its first `matched` ids, bytes or characters."""

    entry: CacheEntry[P]
    key: Key
    matched: int

    @property
    def payload(self) -> P:
        """The whole payload: of `len(entry)`, which may be more than what is shared."""
        return self.entry.payload

    @property
    def remaining(self) -> Key:
        """What of the key is not covered, as it was asked; O(its length)."""
        return self.key[self.matched :]

    @property
    def is_exact(self) -> bool:
        """Whether the entry was stored under exactly this key."""
        return self.matched == len(self.key) == len(self.entry)

    @property
    def savings_ratio(self) -> float:
        """The covered share of the key, above 0 and at most 1."""
        return self.matched / len(self.key)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the manager was made, and what it holds now. Tokens are whatever the keys are made of."""

    lookups: int = 0
    hits: int = 0
    tokens_looked_up: int = 0
    tokens_saved: int = 0
    stores: int = 0
    evictions: int = 0
    expirations: int = 0
    refused: int = 0
    entries: int = 0
    pinned: int = 0
    bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of lookups that found something, 0 to 1."""
        return self.hits / self.lookups if self.lookups else 0.0

    @property
    def token_savings_rate(self) -> float:
        """The share of the tokens looked up that was found, 0 to 1."""
        return self.tokens_saved / self.tokens_looked_up if self.tokens_looked_up else 0.0


def content_key(data: bytes) -> bytes:
    """The digest of a key's bytes (ids as u32 little-endian, text as UTF-8): BLAKE2b-256."""
    return blake2b(data, digest_size=CONTENT_BYTES).digest()


def recognition_key(namespace: str, content_key: bytes) -> int:
    """64 bits by which a policy knows again what left: of equal keys in two namespaces they differ."""
    return int.from_bytes(blake2b(content_key + namespace.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def payload_bytes(payload: object) -> int | None:
    """The bytes of arrays and tensors (their `nbytes`), bytes, text, numbers, and tuples, lists and mappings of these.

    What stands in it twice counts once. None where something else is among it: then only its owner knows.
    """
    total, pending, seen = 0, [payload], set[int]()
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        nbytes = getattr(part, "nbytes", None)
        if isinstance(nbytes, int):
            total += whole_bytes(nbytes, f"nbytes of a {type(part).__name__}")
        elif isinstance(part, bytes | bytearray | str):
            total += len(part.encode("utf-8", "surrogatepass")) if isinstance(part, str) else len(part)
        elif isinstance(part, Mapping):
            pending += [*part.keys(), *part.values()]
        elif isinstance(part, tuple | list):
            pending += part
        elif part is None or isinstance(part, bool | int | float):
            total += NUMBER_BYTES
        else:
            return None
    return total


def whole_bytes(size: int, source: str) -> int:
    """The size as an int. TypeError where it is no whole number, ValueError below 0, both with its `source`."""
    try:
        count = operator.index(size)
    except TypeError:
        raise TypeError(f"{source} must be a whole number of bytes, not {size!r}") from None
    if count < 0:
        raise ValueError(f"{source} must be a number of bytes from 0 up, not {size!r}")
    return count


def clock_time(now: float) -> float:
    """The time as a float. TypeError or ValueError where a clock gave what is no finite number."""
    try:
        is_finite = math.isfinite(now)
    except TypeError:
        raise TypeError(f"clock must return a number of seconds, not {now!r}") from None
    except OverflowError:
        is_finite = False
    if not is_finite:
        raise ValueError(f"clock must return a finite number of seconds, not {now!r}")
    return float(now)


def check_hints(hints: Hints | None) -> None:
    """TypeError for what is no Hints, ValueError for times that no float holds."""
    if hints is None:
        return
    if not isinstance(hints, Hints):
        raise TypeError(f"hints are rekindle.cache.Hints, not {type(hints).__name__}")
    for name, value in (("ttl", hints.ttl), ("next_use_in", hints.next_use_in)):
        try:
            float(0 if value is None else value)
        except OverflowError:
            raise ValueError(f"{name} of the hints is larger than any float") from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
