"""Values of the cache manager's interface: limits, entries, matches, figures. All frozen.

Owns the ranges of the limits, an entry's content key, and the default size of payloads. Lengths count ids, bytes or
characters, depending on the keys.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, TypedDict, TypeVar

from rekindle.cache.trie.keys import Key, NormalizedKey

P = TypeVar("P")

CONTENT_BYTES = 32
NUMBER_BYTES = 8
ENTRY_BYTES = 1_500  # counted per entry, payload and key excluded: really 400 to 900, 2,600 if alone in a namespace


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Limits of a manager; ValueError for an invalid one.

    `max_memory_mb` (of 2**20 bytes) covers payloads, keys (stored once in the entry, once in the trie) and ENTRY_BYTES
    per entry; None is no limit. An entry unused for `ttl_s` seconds expires. A match shorter than `min_prefix_length`
    does not count. No namespace has more than `max_entries_per_namespace` entries.
    """

    max_entries: int = 1000
    max_memory_mb: float | None = None
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

    @property
    def max_bytes(self) -> float:
        """`max_memory_mb` in bytes; infinity without a limit."""
        return math.inf if self.max_memory_mb is None else self.max_memory_mb * (1 << 20)


class CacheLimits(TypedDict, total=False):
    """The fields of `CacheConfig`, as keyword arguments."""

    max_entries: int
    max_memory_mb: float | None
    ttl_s: float | None
    min_prefix_length: int
    max_entries_per_namespace: int | None


@dataclass(frozen=True, slots=True, eq=False)
class CacheEntry(Generic[P]):
    """A payload and the key it is stored under: ids as a read-only u32 array [n], or bytes, or text.

    `content_key` is a 32-byte digest of the key, for use where an entry is also stored elsewhere (file, row); the
    manager never looks anything up by it. `num_bytes` counts against `max_memory_mb`; `stored_at` is the clock's time.
    """

    key: NormalizedKey
    payload: P
    namespace: str
    content_key: bytes
    num_bytes: int
    stored_at: float

    def __len__(self) -> int:
        return len(self.key)


@dataclass(frozen=True, slots=True, eq=False)
class PrefixMatch(Generic[P]):
    """The entry that shares the longest prefix with `key`: its first `matched` ids, bytes or characters."""

    entry: CacheEntry[P]
    key: Key
    matched: int

    @property
    def payload(self) -> P:
        """The whole payload, for all of `len(entry)`, which may exceed the shared prefix."""
        return self.entry.payload

    @property
    def remaining(self) -> Key:
        """The part of the key after the match, in the type it was looked up with; O(its length)."""
        return self.key[self.matched :]

    @property
    def is_exact(self) -> bool:
        """Whether the entry was stored under exactly this key."""
        return self.matched == len(self.key) == len(self.entry)

    @property
    def savings_ratio(self) -> float:
        """The matched fraction of the key, above 0 and at most 1."""
        return self.matched / len(self.key)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the manager was created, and its current contents. Tokens are the units of the keys."""

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
        """Fraction of lookups with a match, 0 to 1."""
        return self.hits / self.lookups if self.lookups else 0.0

    @property
    def token_savings_rate(self) -> float:
        """Fraction of the looked-up tokens that were found, 0 to 1."""
        return self.tokens_saved / self.tokens_looked_up if self.tokens_looked_up else 0.0


def content_key(data: bytes) -> bytes:
    """BLAKE2b-256 digest of a key's bytes (ids as u32 little-endian, text as UTF-8)."""
    return blake2b(data, digest_size=CONTENT_BYTES).digest()


def payload_bytes(payload: object) -> int | None:
    """Size of arrays and tensors (their `nbytes`), bytes, text, numbers, and tuples, lists and mappings of these.

    An object contained twice counts once. None if it contains anything else, whose size is unknown.
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
    """Return the size as an int; TypeError unless it is a whole number, ValueError below 0, both naming `source`."""
    try:
        count = operator.index(size)
    except TypeError:
        raise TypeError(f"{source} must be a whole number of bytes, not {size!r}") from None
    if count < 0:
        raise ValueError(f"{source} must be a number of bytes from 0 up, not {size!r}")
    return count


def clock_time(now: float) -> float:
    """Return the time as a float; TypeError or ValueError unless it is a finite number."""
    try:
        is_finite = math.isfinite(now)
    except TypeError:
        raise TypeError(f"clock must return a number of seconds, not {now!r}") from None
    except OverflowError:
        is_finite = False
    if not is_finite:
        raise ValueError(f"clock must return a finite number of seconds, not {now!r}")
    return float(now)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
