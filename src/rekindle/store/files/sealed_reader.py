"""Reads encrypted records: pieces are decrypted to where they go while the cache has them, which verifies them.

Every call that reads or decrypts gives Python's lock away, and on a busy machine getting it back takes longer than a
copy: so neighbouring small records are read at once, and each is decrypted by one call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from rekindle.store.files.sealed_records import Pieces
from rekindle.store.files.shards import Bytes, RecordAt

_PIECE = 1 << 18  # bytes that are decrypted at once
_SMALL = 1 << 17  # bytes of a record that is decrypted by one call, and copied
_READ = 1 << 20  # bytes of neighbouring records that are read at once


class SealedReader:
    """Reads encrypted records to where their payloads go, as `shards.ReadRecords`. Any thread."""

    def __init__(self, read: Callable[[int, int, Bytes], int]) -> None:
        self._read_file = read  # open file, offset, where to: how many bytes there were
        self._own = threading.local()  # memory of each thread

    def __call__(self, wanted: Sequence[RecordAt]) -> int:
        """How many leading records are as they must be; the payload of the first other one may be anything."""
        if not hasattr(self._own, "read"):
            self._own.read, self._own.opened = np.empty(_READ, dtype=np.uint8), np.empty(_PIECE, dtype=np.uint8)
        done = 0
        while done < len(wanted):
            neighbours = _neighbours(wanted[done:])
            num_good = self._small(neighbours) if neighbours else int(self._large(wanted[done]))
            done += num_good
            if num_good < max(1, len(neighbours)):
                break
        return done

    def _small(self, records: Sequence[RecordAt]) -> int:
        """Read neighbouring records of at most `_SMALL` bytes each; return how many leading ones are whole."""
        size = _num_bytes(records[0])
        content = self._own.read[: size * len(records)]
        num_bytes = self._read_file(records[0].file, records[0].offset, content)
        for number, at in enumerate(records):
            if num_bytes < size * (number + 1):
                return number
            pieces, opened = Pieces(at.seal, at.place), self._own.opened[:size]
            pieces.put(content[size * number : size * (number + 1)], opened)
            if not pieces.is_whole():
                return number
            at.payload[:] = opened[len(at.header) : len(at.header) + at.payload.nbytes]
        return len(records)

    def _large(self, at: RecordAt) -> bool:
        read, rest = self._own.read[:_PIECE], self._own.opened
        pieces, start, end = Pieces(at.seal, at.place), len(at.header), len(at.header) + at.payload.nbytes
        num_bytes = _num_bytes(at)
        for first in range(0, num_bytes, _PIECE):
            piece = read[: min(_PIECE, num_bytes - first)]
            if self._read_file(at.file, at.offset + first, piece) < piece.nbytes:
                return False
            last = first + piece.nbytes
            low, high = min(max(start, first), last), min(max(end, first), last)  # of the payload, in this piece
            for out, begin, stop in (rest, first, low), (at.payload[low - start :], low, high), (rest, high, last):
                if begin < stop:
                    pieces.put(piece[begin - first : stop - first], out[: stop - begin])
        return pieces.is_whole()


def _num_bytes(at: RecordAt) -> int:
    return len(at.header) + at.payload.nbytes + at.padding_bytes


def _neighbours(wanted: Sequence[RecordAt]) -> Sequence[RecordAt]:
    """The leading records that lie one after the other and are read at once; none if the first is large."""
    first, size = wanted[0], _num_bytes(wanted[0])
    if size > _SMALL:
        return ()
    count = 1
    while count < min(len(wanted), _READ // size):
        at = wanted[count]
        if (at.file, at.offset, _num_bytes(at)) != (first.file, first.offset + size * count, size):
            break
        count += 1
    return wanted[:count]
