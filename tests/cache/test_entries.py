"""Limits and what they say when they cannot be; sizes, digests and shares worked out by hand."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import pytest

from rekindle.cache import CacheConfig, CacheEntry, CacheStats, PrefixMatch, content_key
from rekindle.cache.library.entries import payload_bytes

IMPOSSIBLE: list[tuple[str, Any]] = [
    *(("max_entries", value) for value in (0, -1, 1.5, "many", None, True)),
    *(("max_memory_mb", value) for value in (0, -1.0, "1", float("inf"), float("nan"), True, 10**400)),
    *(("ttl_s", value) for value in (0, -5, float("inf"), "never", 10**400)),
    *(("min_prefix_length", value) for value in (0, -1, 2.0, None)),
    *(("max_entries_per_namespace", value) for value in (0, -3, 0.5)),
]


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE, ids=lambda value: repr(value)[:24])
def test_limits_that_cannot_be_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        CacheConfig(**{name: value})


def test_limits_that_can_be() -> None:
    assert CacheConfig().max_bytes == float("inf")
    assert CacheConfig(max_memory_mb=0.5).max_bytes == 1 << 19
    CacheConfig(max_entries=1, ttl_s=0.1, max_entries_per_namespace=1)


ARRAY = np.zeros((3, 5), np.float32)


@pytest.mark.parametrize(
    ("payload", "size"),
    [
        (b"12345", 5),
        (bytearray(3), 3),
        ("grün", 5),
        (ARRAY, 60),
        ((ARRAY, [ARRAY, b"1"]), 61),  # the same array is held once
        ((ARRAY, ARRAY.copy()), 120),
        ({"k": ARRAY, "v": [1, 2.5, None, True]}, 1 + 1 + 60 + 4 * 8),
        ([], 0),
        (object(), None),
        ([b"1", object()], None),
        ({1, 2}, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_payloads_are_measured_where_it_can_be_known(payload: Any, size: int | None) -> None:
    assert payload_bytes(payload) == size


def test_what_holds_itself_is_counted_once() -> None:
    around: list[Any] = [b"123"]
    around.append(around)
    assert payload_bytes(around) == 3


def test_a_payload_of_less_than_nothing_is_an_error() -> None:
    class Lying:
        nbytes = -(10**9)

    with pytest.raises(ValueError, match="nbytes of a Lying must be a number of bytes from 0 up"):
        payload_bytes([Lying()])


def test_content_keys_are_whole_digests() -> None:
    assert content_key(b"abc") == blake2b(b"abc", digest_size=32).digest()


def entry(key: Any) -> CacheEntry[str]:
    return CacheEntry(key, "kept", "", b"", 0, 0.0)


def test_a_match_says_what_is_left_and_what_was_saved() -> None:
    match = PrefixMatch(entry("abcd"), "abxyz", 2)
    assert (match.payload, match.remaining, match.savings_ratio) == ("kept", "xyz", 0.4)
    assert not match.is_exact
    inside = PrefixMatch(entry("abcd"), "ab", 2)
    assert inside.remaining == "" and inside.savings_ratio == 1.0 and not inside.is_exact
    assert PrefixMatch(entry("abcd"), "abcd", 4).is_exact
    assert PrefixMatch(entry(np.array([1, 2])), [1, 2, 3], 2).remaining == [3]


def test_rates_of_nothing_are_zero() -> None:
    assert (CacheStats().hit_rate, CacheStats().token_savings_rate) == (0.0, 0.0)
    stats = CacheStats(lookups=4, hits=3, tokens_looked_up=200, tokens_saved=50)
    assert (stats.hit_rate, stats.token_savings_rate) == (0.75, 0.25)
