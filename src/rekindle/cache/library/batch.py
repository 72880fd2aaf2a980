"""What a batch of prompts has in common, before any of it is sent.

Owns the counting: which beginnings several prompts share, how often each would be computed without a cache, and how
much of the batch has to be computed once. Knows neither tokenizers nor caches. Linear in the total tokens, apart from
putting the shared prefixes in order.

Walking the trie's entries in order, two neighbours share what both share with everything between them, so one stack of
open prefixes sees every place where prompts part. Each counts the stretch beyond the prefix around it:

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
from rekindle.cache.trie.keys import Key, Keys, SpelledKey, key_kind
from rekindle.cache.trie.radix import RadixTrie


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A beginning that `num_prompts` prompts have in common and after which they part, or end.

    `stretch` of its `length` tokens lie beyond the next shorter shared prefix; `saved_tokens` are those of the stretch
    that are computed again without a cache. `first_prompt` is the index of the first prompt that begins with it.
    """

    length: int
    num_prompts: int
    stretch: int
    first_prompt: int

    @property
    def saved_tokens(self) -> int:
        """Tokens of the stretch that need not be computed again."""
        return (self.num_prompts - 1) * self.stretch


@dataclass(frozen=True, slots=True)
class BatchAnalysis:
    """What a batch holds. `distinct_tokens` are left to compute when every shared prefix is computed once.

    `shared` by savings, the largest first, they add up to the difference; `identical` are the indices of equal prompts,
    one tuple for each prompt that comes more than once. Empty prompts count as prompts, and as nothing else.
    """

    num_prompts: int
    total_tokens: int
    distinct_tokens: int
    shared: tuple[SharedPrefix, ...]
    identical: tuple[tuple[int, ...], ...]

    @property
    def saved_tokens(self) -> int:
        """Tokens that need not be computed again."""
        return self.total_tokens - self.distinct_tokens

    @property
    def deduplication(self) -> float:
        """The share of all tokens that need not be computed, 0 to 1."""
        return self.saved_tokens / self.total_tokens if self.total_tokens else 0.0


def analyze_batch(prompts: Iterable[Key], *, keys: Keys = "ids", min_length: int = 1) -> BatchAnalysis:
    """Find what prompts share: each is a sequence of token ids, or bytes, or text, as `keys` says.

    Beginnings shorter than `min_length` are not shared: a cache with that least length would not reuse them.
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
    """A prefix whose prompts are still coming: everything since it was opened begins with it."""

    length: int
    num_prompts: int
    first_prompt: int

    def take(self, other: _Open) -> None:
        """Count the prompts of a longer prefix, or of a prompt, that begin with this one."""
        self.num_prompts += other.num_prompts
        self.first_prompt = min(self.first_prompt, other.first_prompt)


def _shared(trie: RadixTrie[list[int]], min_length: int) -> Iterator[SharedPrefix]:
    """Every shared prefix of at least `min_length`, longer ones before those around them."""
    stack: list[_Open] = []
    before = np.zeros(0, np.uint32)
    for key, same in trie.items():
        ids = np.asarray(key, np.uint32)
        yield from _close(stack, _common(before, ids), min_length)
        stack.append(_Open(len(ids), len(same), same[0]))
        before = ids
    yield from _close(stack, 0, min_length)


def _close(stack: list[_Open], length: int, min_length: int) -> Iterator[SharedPrefix]:
    """Close what is open beyond `length`, and leave a prefix of that length open if anything was."""
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
    """How many ids two keys share from the first on."""
    num = min(len(a), len(b))
    differs = a[:num] != b[:num]
    return int(differs.argmax()) if differs.any() else num


def _units(key: SpelledKey) -> TokenIds:
    """A key as numbers, one for each of its ids, bytes or characters."""
    if isinstance(key, str):
        return np.frombuffer(key.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint32)
    return np.frombuffer(key, np.uint8).astype(np.uint32) if isinstance(key, bytes) else np.asarray(key, np.uint32)
