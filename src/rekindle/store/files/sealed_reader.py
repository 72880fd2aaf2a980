"""Reads encrypted records: pieces are decrypted to where they go while the cache has them, which verifies them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from rekindle.store.files.sealed_records import Pieces
from rekindle.store.files.shards import Bytes, RecordAt

_PIECE = 1 << 18  # bytes read at once


class SealedReader:
    """Reads encrypted records to where their payloads go, as `shards.ReadRecords`. Any thread."""

    def __init__(self, read: Callable[[int, int, Bytes], int]) -> None:
        self._read_file = read  # open file, offset, where to: how many bytes there were
        self._own = threading.local()  # memory of each thread

    def __call__(self, wanted: Sequence[RecordAt]) -> int:
        """How many leading records are as they must be; the payload of the first other one may be anything."""
        for number, at in enumerate(wanted):
            if not self._read(at):
                return number
        return len(wanted)

    def _read(self, at: RecordAt) -> bool:
        if not hasattr(self._own, "memory"):
            self._own.memory = np.empty((2, _PIECE), dtype=np.uint8)
        read, rest = self._own.memory
        pieces, start, end = Pieces(at.seal, at.place), len(at.header), len(at.header) + at.payload.nbytes
        num_bytes = end + at.padding_bytes
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
