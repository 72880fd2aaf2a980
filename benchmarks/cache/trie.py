"""Rows of the trie: cost of lookups and memory, at three shares of common prefixes.

    half           every hundred sequences share the first half
    nine tenths    every hundred sequences share the first nine tenths
    conversations  ten turns of a conversation, each stored with all before it

One sequence is fifty times as long; in `conversations` its turns each add a tenth of a short one's length.
Ids are random, so what is not shared on purpose differs.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.cache.rows import Part, Row, Target, Track, counted_bytes, mean_us, most
from rekindle.cache.blocks.hashing import TokenIds
from rekindle.cache.trie.keys import Key
from rekindle.cache.trie.radix import RadixTrie

GROUP = 100  # sequences with the same beginning
TURNS = 10
LONG = 50  # a long sequence, in short ones
VOCABULARY = 150_000
SAMPLE = 1_000  # short sequences to look up
NUM_LONG_LOOKUPS = 20
LOOKUP_US, LONG_LOOKUP_US, BYTES_PER_DISTINCT_BYTE = 50, 1_000, 3


@dataclass(frozen=True, slots=True)
class Shape:
    """How sequences share prefixes: a share `shared` in groups of `GROUP`, or (None) turn by turn."""

    name: str
    shared: float | None


SHAPES = (Shape("half", 0.5), Shape("nine tenths", 0.9), Shape("conversations", None))


class Library:
    """A trie of `count` sequences of `tokens` ids and a long one, with a sample to look up."""

    def __init__(self, shape: Shape, count: int, tokens: int, seed: int) -> None:
        self.shape = shape
        self.part = Part(f"trie, {shape.name}")
        self._count = count
        self._tokens = tokens
        self._chooser = np.random.default_rng(seed)
        self.trie: RadixTrie[int] = RadixTrie("ids")
        self.num_distinct = 0  # ids, each prefix counted once
        self.num_bytes = 0  # of the whole trie, as traced in the interpreter
        self.sample: list[TokenIds] = []
        self.long = self.random_ids(LONG * tokens)

    def random_ids(self, count: int) -> TokenIds:
        """Return `count` random ids."""
        return self._chooser.integers(0, VOCABULARY, count, dtype=np.uint32)

    def fill(self, track: Track) -> None:
        """Store everything while tracemalloc counts."""
        every = max(1, self._count // SAMPLE)
        sequences = self._conversations() if self.shape.shared is None else self._groups(self.shape.shared)
        chosen = np.empty((self._count // every + 1, self._tokens), np.uint32)
        lengths: list[int] = []
        with counted_bytes() as held:
            for number in track(range(self._count), f"{self.part.name}: storing sequences"):
                ids = next(sequences)
                self.trie.insert(ids, number)
                if number % every == every - 1:
                    chosen[len(lengths), : len(ids)] = ids
                    lengths.append(len(ids))
            self._store_long()
            sequences.close()
            del ids
            self.num_bytes = held()
        self.sample = [chosen[i, :length].copy() for i, length in enumerate(lengths)]

    def _groups(self, shared: float) -> Generator[TokenIds, None, None]:
        num_shared = int(shared * self._tokens)
        for number in range(self._count):
            if number % GROUP == 0:
                head = self.random_ids(num_shared)
                self.num_distinct += num_shared
            self.num_distinct += self._tokens - num_shared
            yield np.concatenate([head, self.random_ids(self._tokens - num_shared)])

    def _conversations(self) -> Generator[TokenIds, None, None]:
        for number in range(self._count):
            turn = number % TURNS
            if turn == 0:
                whole = self.random_ids(self._tokens)
            self.num_distinct += self._end(turn) - self._end(turn - 1)
            yield whole[: self._end(turn)]

    def _end(self, turn: int) -> int:
        return self._tokens * (turn + 1) // TURNS

    def _store_long(self) -> None:
        first = 0 if self.shape.shared is None else LONG * TURNS - 1
        for turn in range(first, LONG * TURNS):
            self.trie.insert(self.long[: self._end(turn)], -1)
        self.num_distinct += len(self.long)


def trie_rows(count: int, tokens: int, *, repeats: int, seed: int, track: Track) -> Iterator[Row]:
    """Yield all rows of all shapes."""
    for shape in SHAPES:
        library = Library(shape, count, tokens, seed)
        library.fill(track)
        yield from _lookups(library, tokens, repeats)
        yield from _changes(library, tokens, repeats)
        distinct = 4 * library.num_distinct
        yield library.part.row(
            f"memory ({len(library.trie):,} sequences)",
            "× distinct",
            [library.num_bytes / distinct],
            most(BYTES_PER_DISTINCT_BYTE),
            bytes=library.num_bytes,
            said_bytes=library.trie.num_bytes,
            distinct_ids=library.num_distinct,
        )


def _lookups(library: Library, tokens: int, repeats: int) -> Iterator[Row]:
    apart = [(_changed(library, ids), len(ids) * 3 // 4) for ids in library.sample]
    stored = [(ids, len(ids)) for ids in library.sample]
    short, long = most(LOOKUP_US), most(LONG_LOOKUP_US)
    yield _lookup(library, f"{tokens:,} ids, stored", stored, repeats, short)
    yield _lookup(library, f"{tokens:,} ids, apart at 3/4", apart, repeats, short)
    as_lists = [(ids.tolist(), length) for ids, length in stored]
    yield _lookup(library, f"{tokens:,} ids in a list", as_lists, repeats, short)
    whole = library.long
    longs = [(whole, len(whole))] * NUM_LONG_LOOKUPS
    yield _lookup(library, f"{len(whole):,} ids, stored", longs, repeats, long)
    changed = [(_changed(library, whole), len(whole) * 3 // 4)] * NUM_LONG_LOOKUPS
    yield _lookup(library, f"{len(whole):,} ids, apart at 3/4", changed, repeats, long)
    listed = [(whole.tolist(), len(whole))] * NUM_LONG_LOOKUPS
    yield _lookup(library, f"{len(whole):,} ids in a list", listed, repeats, long)


def _changed(library: Library, ids: TokenIds) -> TokenIds:
    """Return the ids up to three quarters, then an id that no sequence has, then random ones."""
    kept = ids[: len(ids) * 3 // 4]
    rest = library.random_ids(len(ids) - len(kept))
    rest[:1] = VOCABULARY
    return np.concatenate([kept, rest])


def _lookup(library: Library, what: str, queries: Sequence[tuple[Key, int]], repeats: int, target: Target) -> Row:
    """Measure microseconds per lookup; assert that each finds the right number of ids."""
    find = library.trie.find_longest_prefix
    for query, length in queries:
        found, _ = find(query)
        assert found == length, f"{library.part.name}, {what}: {found} ids found, not {length}"
    calls = [(query,) for query, _ in queries]
    values = [mean_us(find, calls) for _ in range(repeats)]
    return library.part.row(f"find {what}", "µs", values, target, lookups=len(calls))


def _changes(library: Library, tokens: int, repeats: int) -> Iterator[Row]:
    """Remove and reinsert the sample; afterwards only the trie's recency order differs."""
    removed: list[float] = []
    inserted: list[float] = []
    size = len(library.trie)
    for _ in range(repeats):
        removed.append(mean_us(library.trie.remove, [(ids,) for ids in library.sample]))
        assert len(library.trie) == size - len(library.sample), "not every sequence of the sample was removed"
        inserted.append(mean_us(library.trie.insert, [(ids, 0) for ids in library.sample]))
    yield library.part.row(f"remove {tokens:,} ids", "µs", removed)
    yield library.part.row(f"insert {tokens:,} ids", "µs", inserted)
