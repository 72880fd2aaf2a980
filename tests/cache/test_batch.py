"""What prompts share: batches worked out by hand, and a naive count over all pairs."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from rekindle.cache import BatchAnalysis, SharedPrefix, analyze_batch
from rekindle.cache.trie.keys import Key, Keys


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def rows(analysis: BatchAnalysis) -> list[tuple[int, int, int, int]]:
    """Length, prompts, stretch and savings of each shared prefix."""
    return [(each.length, each.num_prompts, each.stretch, each.saved_tokens) for each in analysis.shared]


def test_nested_prefixes_count_every_token_once() -> None:
    """The batch of the module's header: a system prompt of 4, tool a of 2, tool b of 3."""
    system, tool_a, tool_b = [1, 2, 3, 4], [10, 11], [20, 21, 22]
    prompts = [[*system, *tool_a, 100], [*system, *tool_a, 101], [*system, *tool_b, 102], [*system, 103]]
    analysis = analyze_batch(prompts)
    assert (analysis.num_prompts, analysis.total_tokens) == (4, 7 + 7 + 8 + 5)
    assert analysis.distinct_tokens == 4 + 2 + 3 + 4
    assert rows(analysis) == [(4, 4, 4, 12), (6, 2, 2, 2)]
    assert analysis.saved_tokens == 14 and analysis.deduplication == 14 / 27
    assert analysis.identical == ()


def test_repeated_prompts_are_shared_to_their_ends() -> None:
    analysis = analyze_batch(["abc", "abc", "x", "abc"], keys="text")
    assert (analysis.total_tokens, analysis.distinct_tokens) == (10, 4)
    assert rows(analysis) == [(3, 3, 3, 6)]
    assert analysis.identical == ((0, 1, 3),)
    assert analysis.shared[0].first_prompt == 0


def test_prompts_that_are_prefixes_of_others_are_shared_prefixes() -> None:
    """A conversation that grows, each prompt once, the middle one twice."""
    analysis = analyze_batch([b"a", b"ab", b"abcd", b"ab"], keys="bytes")
    assert (analysis.total_tokens, analysis.distinct_tokens) == (9, 4)
    assert rows(analysis) == [(1, 4, 1, 3), (2, 3, 1, 2)]
    assert analysis.identical == ((1, 3),)
    assert [each.first_prompt for each in analysis.shared] == [0, 1]


def test_what_parts_two_groups_is_not_what_parts_one() -> None:
    analysis = analyze_batch([b"xa1", b"xa2", b"xb1", b"xb2", b"y"], keys="bytes")
    assert rows(analysis) == [(1, 4, 1, 3), (2, 2, 1, 1), (2, 2, 1, 1)]
    assert [each.first_prompt for each in analysis.shared] == [0, 0, 2]
    assert analysis.distinct_tokens == 8


def test_short_beginnings_do_not_count_below_the_least_length() -> None:
    """Between 2 and 3 tokens of the system prompt lie the prefixes that a cache from 3 on would not use."""
    prompts = ["ab1", "ab2", "abcd1", "abcd2", "abcd3"]
    assert rows(analyze_batch(prompts, keys="text")) == [(2, 5, 2, 8), (4, 3, 2, 4)]
    analysis = analyze_batch(prompts, keys="text", min_length=3)
    assert rows(analysis) == [(4, 3, 4, 8)]
    assert analysis.distinct_tokens == 21 - 8
    assert analyze_batch(prompts, keys="text", min_length=6).deduplication == 0


def test_empty_batches_and_empty_prompts() -> None:
    assert analyze_batch([]) == BatchAnalysis(0, 0, 0, (), ())
    assert analyze_batch([]).deduplication == 0.0
    assert analyze_batch([[], [], []]) == BatchAnalysis(3, 0, 0, (), ())
    assert rows(analyze_batch(["", "a", "", "ab"], keys="text")) == [(1, 2, 1, 1)]


def test_every_kind_of_key_counts_its_own_units() -> None:
    assert rows(analyze_batch([[70_000, 2**32 - 1], np.array([70_000, 5])])) == [(1, 2, 1, 1)]
    assert rows(analyze_batch(["grün", "grüß"], keys="text")) == [(3, 2, 3, 3)]
    assert rows(analyze_batch(["\U0001f600a", "\U0001f600b"], keys="text")) == [(1, 2, 1, 1)]
    assert rows(analyze_batch([b"\xc3\xbc", b"\xc3\xb6"], keys="bytes")) == [(1, 2, 1, 1)]
    # Ids that begin with the same byte have nothing in common.
    assert rows(analyze_batch([[0x0101], [0x0201]])) == []


@pytest.mark.parametrize(("keys", "prompt"), [("ids", "abc"), ("text", b"abc"), ("bytes", [1, 2]), ("ids", [-1])])
def test_prompts_of_another_kind_are_refused(keys: Keys, prompt: Key) -> None:
    with pytest.raises((TypeError, ValueError)):
        analyze_batch([prompt], keys=keys)


def test_the_least_length_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="min_length"):
        analyze_batch([], min_length=0)


prompts = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12)


@settings(max_examples=400, deadline=None)
@given(prompts, st.integers(1, 4))
def test_the_savings_are_those_of_a_cache_that_keeps_everything(batch: list[list[int]], least: int) -> None:
    analysis = analyze_batch(batch, min_length=least)
    best = [max((shared(key, earlier) for earlier in batch[:at]), default=0) for at, key in enumerate(batch)]
    saved = sum(length for length in best if length >= least)
    assert (
        analysis.total_tokens - analysis.distinct_tokens == saved == sum(each.saved_tokens for each in analysis.shared)
    )
    prefixes = {tuple(key[:length]) for key in batch for length in range(1, len(key) + 1)}
    if least == 1:
        assert analysis.distinct_tokens == len(prefixes)
    counts = {
        prefix: [at for at, key in enumerate(batch) if tuple(key[: len(prefix)]) == prefix] for prefix in prefixes
    }
    longest = {tuple(counts[prefix]): prefix for prefix in sorted(prefixes, key=len)}  # the place where they part
    expected = sorted((len(p), len(at), at[0]) for at, p in longest.items() if len(at) > 1 and len(p) >= least)
    assert sorted((each.length, each.num_prompts, each.first_prompt) for each in analysis.shared) == expected
    assert list(analysis.shared) == sorted(analysis.shared, key=lambda each: -each.saved_tokens)
    same = {tuple(key): tuple(at for at, other in enumerate(batch) if other == key) for key in batch if key}
    assert analysis.identical == tuple(sorted(at for at in same.values() if len(at) > 1))


def test_deep_nesting_needs_no_recursion() -> None:
    analysis = analyze_batch([b"a" * length for length in range(1, 3000)], keys="bytes")
    assert analysis.distinct_tokens == 2999
    assert analysis.shared[0] == SharedPrefix(1, 2999, 1, 0)
