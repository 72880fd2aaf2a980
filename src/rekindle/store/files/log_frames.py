"""The bytes that SQLite writes for an index, counted by what stands in its write-ahead log.

SQLite does not say what it writes. A transaction appends a frame for every page that it changes; each page that the log
holds is copied into the file once, by a checkpoint, before the log begins anew. So a frame counts as itself, and the
first one of a page since the log began counts the page again: as the piece of the file that a file system writes for
it, which smaller pages share. What counts too little: a page that more than one checkpoint copies, while a reader keeps
the log from beginning anew.
"""

from __future__ import annotations

import os
from pathlib import Path

_FILE_PAGE_BYTES = 4096  # file systems write no less
_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24  # sqlite.org/fileformat2.html, section 4.1


class LogFrames:
    """What was appended to the log of the SQLite file `path` since the last look. One thread looks."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(f"{path.name}-wal")
        self._salts = b""  # of the log that was seen last; each has others
        self._num_seen = 0
        self._pieces: set[int] = set()  # of the file that this log changes
        self.new_bytes()  # an earlier process wrote, and counted, what is there

    def new_bytes(self) -> int:
        """Count the bytes written since the last call, those of later checkpoints included; OSError.

        Costs one read of 24 bytes for each new frame. Only what one log holds is seen: call it after each transaction.
        """
        try:
            file = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            self._begin(b"")
            return 0
        try:
            return self._count(file)
        finally:
            os.close(file)

    def _begin(self, salts: bytes) -> None:
        self._salts, self._num_seen, self._pieces = salts, 0, set()

    def _count(self, file: int) -> int:
        header = os.pread(file, _HEADER_BYTES, 0)
        if len(header) < _HEADER_BYTES:  # emptied
            self._begin(b"")
            return 0
        page_bytes, salts = int.from_bytes(header[8:12], "big"), header[16:24]
        piece_bytes = max(page_bytes, _FILE_PAGE_BYTES)
        num_bytes, frame_bytes = 0, _FRAME_HEADER_BYTES + page_bytes
        if salts != self._salts:
            self._begin(salts)
            num_bytes += _HEADER_BYTES
        while True:
            frame = os.pread(file, _FRAME_HEADER_BYTES, _HEADER_BYTES + self._num_seen * frame_bytes)
            if frame[8:16] != salts:  # left from an earlier log, or the end of the file
                return num_bytes
            piece = (int.from_bytes(frame[:4], "big") - 1) * page_bytes // piece_bytes
            num_bytes += frame_bytes + (piece_bytes if piece not in self._pieces else 0)
            self._pieces.add(piece)
            self._num_seen += 1
