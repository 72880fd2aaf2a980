"""Keyed hashes (MACs) over the rows of SQLite files. SQLite has no checksums: a flipped bit reads like valid data.

Owns how a row's columns are laid out for hashing, so that no two different rows give the same bytes, whatever their
types. Each row carries its MAC in its last column, so it can be moved but not changed without detection.

    key = BLAKE2b-256(person "rekindle.rowkey"; store's secret as key; name of the file)
    mac = BLAKE2b-128(person "rekindle.row", key; table and kinds; lengths of text and blobs, numbers; text and blobs)

Tables and kinds are part of the hash input, so a row does not verify in another table or file. MACs are on disk: a
changed layout needs a new version of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from operator import itemgetter
from typing import Any

MAC_BYTES = 16
_KEY_BYTES = 32
_NULL = -1  # the length of a text that is NULL


def row_key(secret: bytes, file: str) -> bytes:
    """The key of all MACs of one kind of file."""
    return blake2b(file.encode(), digest_size=_KEY_BYTES, key=secret, person=b"rekindle.rowkey").digest()


class TableMac:
    """MACs of one table's rows. A letter of `kinds` per column: b(lob), i(nteger), f(loat), t(ext), n: text or NULL."""

    def __init__(self, key: bytes, table: str, kinds: str) -> None:
        self._base = blake2b(digest_size=MAC_BYTES, key=key, person=b"rekindle.row")
        self._base.update(len(table).to_bytes(8, "little") + table.encode())
        self._base.update(len(kinds).to_bytes(8, "little") + kinds.encode())
        sized = [at for at, kind in enumerate(kinds) if kind in "btn"]
        numbers = [at for at, kind in enumerate(kinds) if kind in "if"]
        assert len(sized) + len(numbers) == len(kinds), f"{kinds!r} are no kinds of columns"
        self._texts = [(place, kinds[at]) for place, at in enumerate(sized) if kinds[at] != "b"]
        self._sized, self._numbers = _picked(sized), _picked(numbers)
        head = "<" + "q" * len(sized) + "".join("d" if kinds[at] == "f" else "q" for at in numbers)
        self._pack = struct.Struct(head).pack
        self._num_columns = len(kinds)

    def of(self, row: Sequence[Any]) -> bytes:
        """The MAC of a row's columns [16]; further items of `row` are ignored. About 2 µs.

        TypeError, ValueError or struct.error if a column is not of its kind.
        """
        blobs: Sequence[bytes] = self._sized(row)
        lengths: Iterable[int] = map(len, blobs)
        if self._texts:
            blobs, lengths = self._encoded(list(blobs))
        digest = self._base.copy()
        digest.update(self._pack(*lengths, *self._numbers(row)))
        digest.update(b"".join(blobs))
        return digest.digest()

    def _encoded(self, blobs: list[Any]) -> tuple[list[bytes], list[int]]:
        nulls = []
        for place, kind in self._texts:
            if blobs[place] is None and kind == "n":
                blobs[place] = b""
                nulls.append(place)
            elif isinstance(blobs[place], str):
                blobs[place] = blobs[place].encode()
            else:
                raise TypeError(f"{blobs[place]!r} is no text")
        lengths = list(map(len, blobs))
        for place in nulls:
            lengths[place] = _NULL
        return blobs, lengths

    def holds(self, row: Sequence[Any]) -> bool:
        """Whether the column after the hashed ones is the row's MAC; False for a row of another shape or kind."""
        try:
            return bool(self.of(row) == row[self._num_columns])
        except (TypeError, ValueError, struct.error):
            return False


def _picked(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that picks these columns of a row."""
    if len(places) > 1:
        return itemgetter(*places)
    return (lambda row: (row[places[0]],)) if places else (lambda row: ())
