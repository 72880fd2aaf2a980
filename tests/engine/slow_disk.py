"""A disk that is slow at the moment a test chooses."""

from __future__ import annotations

import threading

from rekindle.store.files.sync import OsFileSystem
from rekindle.store.values import Bytes


class SlowDisk(OsFileSystem):
    """Reads of whole records wait until they are let go."""

    def __init__(self) -> None:
        self.reading = threading.Event()
        self.go = threading.Event()

    def read(self, fd: int, offset: int, out: Bytes) -> int:
        if offset:  # the first page of a shard is its header
            self.reading.set()
            assert self.go.wait(60)
        return super().read(fd, offset, out)
