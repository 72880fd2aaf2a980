"""The file system under the store: holes read as zeros and nothing else changes."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from rekindle.store.files.sync import OsFileSystem


@pytest.mark.parametrize("how", ["punch", "write_zeros"])
@pytest.mark.parametrize(("offset", "num_bytes"), [(0, 4096), (8192, 200_000), (5, 70_000)])
def test_a_hole_reads_as_zeros(tmp_path: Path, how: str, offset: int, num_bytes: int) -> None:
    fs = OsFileSystem()
    fd = fs.open_file(tmp_path / "file", "create")
    content = np.random.default_rng(0).integers(1, 256, 300_000, dtype=np.uint8)
    fs.write(fd, 0, content)
    getattr(fs, how)(fd, offset, num_bytes)
    found = np.full(len(content), 7, dtype=np.uint8)
    assert fs.read(fd, 0, found) == len(content)
    fs.close_file(fd)
    content[offset : offset + num_bytes] = 0
    assert np.array_equal(found, content)


def test_reading_past_the_end_says_how_much_there_was(tmp_path: Path) -> None:
    fs = OsFileSystem()
    fd = fs.open_file(tmp_path / "file", "create")
    fs.write(fd, 0, b"abc")
    fs.resize(fd, 5)
    assert fs.read(fd, 1, np.empty(10, dtype=np.uint8)) == 4
    assert fs.read(fd, 9, np.empty(10, dtype=np.uint8)) == 0
    fs.close_file(fd)


def test_a_missing_file_is_not_made_by_reading(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        OsFileSystem().open_file(tmp_path / "file", "existing")
    assert caught.value.errno == errno.ENOENT
    assert list(tmp_path.iterdir()) == []
