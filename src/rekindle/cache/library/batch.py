"""The prefixes a batch of prompts shares, before any of it is sent.

Owns the counting: which prefixes several prompts share, how often each would be computed without a cache, and how much
of the batch must be computed once. Knows neither tokenizers nor caches. Linear in the total tokens, apart from sorting
the shared prefixes.

In a sorted walk of the trie's entries, two entries share the prefix common to everything between them, so one stack of
open prefixes sees every point where prompts diverge. Each counts the stretch beyond its enclosing prefix:

    system . tool a . one        shared:  system          (all four)    saves 3 x system
    system . tool a . two                 system . tool a (two of them) saves 1 x tool a
    system . tool b . one        The savings of nested prefixes add up and never count a token twice.
    system . other
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from rekindle.cache.blocks.hashing import TokenIds
from rekindle.cache.trie.keys import Key, Keys, NormalizedKey, key_kind
from rekindle.cache.trie.radix import RadixTrie


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix shared by `num_prompts` prompts, after which they diverge or end.

    `stretch` of its `length` tokens lie beyond the next shorter shared prefix; `saved_tokens` counts how many would be
    recomputed without a cache. `first_prompt` is the index of the first prompt that starts with it.
    """

    length: int
    num_prompts: int
    stretch: int
    first_prompt: int

    @property
    def saved_tokens(self) -> int:
        """Recomputed tokens of the stretch that a cache saves."""
        return (self.num_prompts - 1) * self.stretch


@dataclass(frozen=True, slots=True)
class BatchAnalysis:
    """Result of `analyze_batch`. `distinct_tokens` remain to be computed if every shared prefix is computed once.

    `shared` is sorted by savings, largest first; the savings add up to the difference from `total_tokens`. `identical`
    has one tuple of indices for each prompt that occurs more than once. Empty prompts count only in `num_prompts`.
    """

    num_prompts: int
    total_tokens: int
    distinct_tokens: int
    shared: tuple[SharedPrefix, ...]
    identical: tuple[tuple[int, ...], ...]

    @property
    def saved_tokens(self) -> int:
        """Tokens that need not be recomputed."""
        return self.total_tokens - self.distinct_tokens

    @property
    def deduplication(self) -> float:
        """Fraction of all tokens that need not be computed, 0 to 1."""
        return self.saved_tokens / self.total_tokens if self.total_tokens else 0.0


def analyze_batch(prompts: Iterable[Key], *, keys: Keys = "ids", min_length: int = 1) -> BatchAnalysis:
    """Find the prefixes that prompts share; each is a sequence of token ids, or bytes, or text, by `keys`.

    Prefixes shorter than `min_length` do not count: a cache with that minimum length would not reuse them.
    """
    if min_length < 1:
        raise ValueError(f"min_length must be at least 1, not {min_length}")
    kind = key_kind(keys)
    trie: RadixTrie[list[int]] = RadixTrie("ids")
    num_prompts = total = 0
    for index, prompt in enumerate(prompts):
        ids = _units(kind.from_bytes(kind.to_bytes(prompt)))
        num_prompts, total = index + 1, total + len(ids)
        same = trie.get(ids)
        if same is None:
            trie.insert(ids, [index])
        else:
            same.append(index)
    shared = sorted(_shared(trie, min_length), key=lambda each: (-each.saved_tokens, -each.length, each.first_prompt))
    saved = sum(each.saved_tokens for each in shared)
    identical = sorted(
        (tuple(same) for key, same in trie.items() if len(same) > 1 and len(key)), key=lambda same: same[0]
    )
    return BatchAnalysis(num_prompts, total, total - saved, tuple(shared), tuple(identical))


@dataclass(slots=True)
class _Open:
    """A prefix whose prompts are still being counted: everything since it was opened starts with it."""

    length: int
    num_prompts: int
    first_prompt: int

    def take(self, other: _Open) -> None:
        """Add the prompts of a longer prefix that starts with this one."""
        self.num_prompts += other.num_prompts
        self.first_prompt = min(self.first_prompt, other.first_prompt)


def _shared(trie: RadixTrie[list[int]], min_length: int) -> Iterator[SharedPrefix]:
    """Yield every shared prefix of at least `min_length`, inner ones before those that enclose them."""
    stack: list[_Open] = []
    before = np.zeros(0, np.uint32)
    for key, same in trie.items():
        ids = np.asarray(key, np.uint32)
        yield from _close(stack, _common(before, ids), min_length)
        stack.append(_Open(len(ids), len(same), same[0]))
        before = ids
    yield from _close(stack, 0, min_length)


def _close(stack: list[_Open], length: int, min_length: int) -> Iterator[SharedPrefix]:
    """Close the prefixes longer than `length`; if there were any, one of that length is open afterwards."""
    while stack and stack[-1].length > length:
        done = stack.pop()
        around = max(length, stack[-1].length if stack else 0)
        if done.num_prompts > 1 and done.length >= min_length:
            yield SharedPrefix(
                done.length, done.num_prompts, done.length - around * (around >= min_length), done.first_prompt
            )
        if stack and stack[-1].length == around:
            stack[-1].take(done)
        else:
            stack.append(_Open(around, done.num_prompts, done.first_prompt))


def _common(a: TokenIds, b: TokenIds) -> int:
    """Number of leading ids two keys share."""
    num = min(len(a), len(b))
    differs = a[:num] != b[:num]
    return int(differs.argmax()) if differs.any() else num


def _units(key: NormalizedKey) -> TokenIds:
    """Return a key as numbers, one per id, byte or character."""
    if isinstance(key, str):
        return np.frombuffer(key.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint32)
    return np.frombuffer(key, np.uint8).astype(np.uint32) if isinstance(key, bytes) else np.asarray(key, np.uint32)
