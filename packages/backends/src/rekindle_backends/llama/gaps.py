"""The ids that llama-server leaves out of a stream, from the text that it sends.

A token that ends inside a character is not sent; the next one that completes the character comes with the text of all
of them, and with the number of tokens so far. So the bytes and the number of the missing ids are known. Owns the search
for ids that fit both; does not know events.

    ids      a1   b2   c3                        bytes   F0 9F │ 99 │ 82
    sent               c3, "🙂", 3 tokens                missing: 2 ids with the bytes F0 9F 99

Every missing id ends inside a character, or it would have been sent; with that one answer is left nearly always.

Where several fit, a turn is remembered up to the gap, and its ids are not taken from the slot's file when that is read:
the next prompt encodes the rest of the reply again, and what was drawn in other tokens is computed again, once. Several
fit only what a tokenizer would have cut otherwise: of 88,525 gaps in texts of many scripts as two tokenizers cut them
(SmolLM2's and the bundled one), one answer was left for each.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Set
from dataclasses import dataclass

REPLACED = "\ufffd"  # llama-server writes it for bytes that are no UTF-8
MOST_MISSING = 64  # more in a row complete no character


@dataclass(frozen=True, slots=True)
class Filling:
    """Ids that have the text of a gap, and whether no others do in this number."""

    ids: tuple[int, ...]
    is_only: bool


@dataclass(frozen=True, slots=True)
class _Ways:
    """In how many ways tokens reach a byte, and the ids of the likeliest, `largest` among them; None: with none."""

    count: int
    largest: int = -1
    ids: tuple[int, ...] | None = ()


class Gaps:
    """Finds missing ids among those of a vocabulary. Immutable; any thread may use it.

    `pieces` are the bytes of each id as llama-server writes it: none for control tokens. `ends` never are in a gap.
    """

    def __init__(self, pieces: Iterable[bytes], ends: Set[int] = frozenset()) -> None:
        self._pieces = tuple(pieces)
        self._ids: dict[bytes, list[int]] = {}
        for token_id, piece in enumerate(self._pieces):
            if token_id not in ends:
                self._ids.setdefault(piece, []).append(token_id)
        self._num_silent = len(self._ids.pop(b"", ()))
        self._longest = max(map(len, self._ids), default=0)

    def in_grammar(self) -> Gaps:
        """Return the same for a reply that a grammar keeps free of control tokens."""
        found = copy.copy(self)
        found._num_silent = 0
        return found

    def is_own(self, token_id: int, text: str) -> bool:
        """Whether a text is that of this token alone, so that none was left out before it."""
        return text.encode("utf-8", "surrogatepass") == self._piece(token_id)

    def fill(self, num_missing: int, came: int, text: str) -> Filling:
        """Return ids for the `num_missing` before the id that `came` with this text, which covers all of them.

        Of several answers the one whose largest id is smallest, as tokenizers merge the pairs of small ids first. Where
        none fits, as many as the text takes. ValueError for more text than any tokens in this number have.
        """
        if len(text) > (min(num_missing, MOST_MISSING) + 1) * max(self._longest, len(self._piece(came))):
            raise ValueError(f"{len(text):,} characters for {num_missing + 1:,} tokens")
        data, last = text.encode("utf-8", "surrogatepass"), self._piece(came)
        end = len(data) - len(last)
        if not data.endswith(last) or REPLACED in text or num_missing > MOST_MISSING:
            return Filling(self._greedy(data[: max(end, 0)]), is_only=False)
        found = self._ways(data, end, num_missing)
        if found is None or found.ids is None:
            return Filling(self._greedy(data[:end]), is_only=False)
        return Filling(found.ids, is_only=found.count == 1)

    def _piece(self, token_id: int) -> bytes:
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def _ways(self, data: bytes, end: int, num_tokens: int) -> _Ways | None:
        """Return the ways to write data[:end] as so many tokens that end inside characters of the data."""
        reached = {0: _Ways(1)}
        for _ in range(num_tokens):
            before, reached = reached, {}
            for start, ways in before.items():
                for stop in range(start, min(end, start + self._longest) + 1):
                    if stop < len(data) and data[stop] & 0xC0 == 0x80:
                        _add(reached, stop, ways, self._between(data[start:stop]))
        return reached.get(end)

    def _between(self, piece: bytes) -> tuple[int, int | None]:
        """Return how many ids have these bytes, and the smallest; of those without bytes none is proposed."""
        if not piece:
            return self._num_silent, None
        ids = self._ids.get(piece, [])
        return len(ids), ids[0] if ids else None

    def _greedy(self, data: bytes) -> tuple[int, ...]:
        """Return ids with these bytes, the longest first; bytes that no id has are left out."""
        ids, at = [], 0
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            size = next((size for size in sizes if data[at : at + size] in self._ids), None)
            if size is not None:
                ids.append(self._ids[data[at : at + size]][0])
            at += size or 1
        return tuple(ids)


def _add(reached: dict[int, _Ways], stop: int, ways: _Ways, step: tuple[int, int | None]) -> None:
    """Add the ways that come to a byte by one more token."""
    num_ids, token_id = step
    if not num_ids:
        return
    known, largest, ids = reached.get(stop, _Ways(0, ids=None)), ways.largest, None
    if ways.ids is not None and token_id is not None:
        largest, ids = max(largest, token_id), (*ways.ids, token_id)
    better = known if ids is None or (known.ids is not None and known.largest <= largest) else _Ways(0, largest, ids)
    reached[stop] = _Ways(known.count + ways.count * num_ids, better.largest, better.ids)
