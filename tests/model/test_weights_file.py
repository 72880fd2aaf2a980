"""The file of packed weights: what was written is mapped, and what is not whole is refused."""

from __future__ import annotations

import fcntl
import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from rekindle.compute.cpu.kernels.linear import PackedWeights, aligned_memory
from rekindle.compute.cpu.weights_file import (
    HEADER,
    MOST_FILES,
    PAGE,
    PIECE_BYTES,
    Contents,
    DamagedFile,
    PlainTensor,
    UnsavedWeights,
    WeightsFile,
    lacking_room,
)

NOTES = ("model.odd is left to torch",)


def packed(seed: int, num_bytes: int, columns: int = 64, depth: int = 32) -> PackedWeights:
    memory = aligned_memory(num_bytes)
    memory[:] = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    return PackedWeights("int8" if seed % 2 else "bf16", columns, depth, memory, memory.ctypes.data)


@pytest.fixture
def contents() -> Contents:
    """Three weights, the first with two users, the last in several pieces and with a size that is padded."""
    shared = packed(0, 4096)
    return Contents(
        {"head": shared, "up": packed(1, 4608, 7, 9), "embedding": shared, "down": packed(2, 2 * PIECE_BYTES + 8)},
        NOTES,
        {
            "norm": PlainTensor("bfloat16", (3, 7), np.arange(42, dtype=np.uint8)),
            "up": PlainTensor("bfloat16", (7, 9), None),
        },
    )


def file_in(directory: Path, family: str = "f" * 16, key: str = "k" * 32) -> WeightsFile:
    return WeightsFile(directory, family, key)


def test_what_is_read_is_what_was_written(tmp_path: Path, contents: Contents) -> None:
    file = file_in(tmp_path / "new")
    assert file.read() is None
    assert file.write(contents)
    found = file.read()
    assert found is not None and found.notes == NOTES and found.num_bytes == contents.num_bytes
    assert found.weights["head"] is found.weights["embedding"] and ["head", "embedding"] in found.users().values()
    assert found.tensors.keys() == contents.tensors.keys()
    for name, tensor in contents.tensors.items():
        read = found.tensors[name]
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert read.memory is tensor.memory is None or np.array_equal(read.memory, tensor.memory)
    for name, wanted in contents.weights.items():
        mapped = found.weights[name]
        assert (mapped.format, mapped.columns, mapped.depth) == (wanted.format, wanted.columns, wanted.depth)
        assert np.array_equal(mapped.memory, wanted.memory) and not mapped.memory.flags.writeable
        mapped.check()
    assert file.path.stat().st_mode & 0o777 == 0o600 and list(file.directory.iterdir()) == [file.path]


def test_weights_stay_when_their_file_is_replaced_or_removed(tmp_path: Path, contents: Contents) -> None:
    file = file_in(tmp_path)
    file.write(contents)
    found = file.read()
    assert found is not None
    file.write(Contents({"head": packed(9, 4096)}))
    file.path.unlink()
    assert np.array_equal(found.weights["down"].memory, contents.weights["down"].memory)


@pytest.mark.parametrize("size", [0, 1, HEADER.size, PAGE - 1, PAGE, PAGE + 100, -1])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, contents: Contents, size: int) -> None:
    file = file_in(tmp_path)
    file.write(contents)
    os.truncate(file.path, size if size >= 0 else file.path.stat().st_size + size)
    with pytest.raises(DamagedFile, match="bytes"):
        file.read()


def test_a_changed_byte_is_noticed_wherever_it_is(tmp_path: Path, contents: Contents) -> None:
    file = file_in(tmp_path)
    file.write(contents)
    whole = file.path.read_bytes()
    index_end = HEADER.size + HEADER.unpack(whole[: HEADER.size])[2]
    for at in (*range(0, index_end, 5), PAGE, PAGE + 4095, PAGE + 4096, len(whole) - 64, len(whole) - 23):
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        file.path.write_bytes(changed)
        with pytest.raises(DamagedFile):
            file.read()
    file.path.write_bytes(whole)
    assert file.read() is not None


def test_weights_in_each_others_place_are_noticed(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    file.write(Contents({"one": packed(0, 4096), "other": packed(2, 4096)}))
    whole = bytearray(file.path.read_bytes())
    whole[PAGE : PAGE + 8192] = whole[PAGE + 4096 : PAGE + 8192] + whole[PAGE : PAGE + 4096]
    file.path.write_bytes(whole)
    with pytest.raises(DamagedFile, match="weights of one have changed"):
        file.read()


def test_another_models_file_and_what_is_no_file_are_refused(tmp_path: Path, contents: Contents) -> None:
    file, other = file_in(tmp_path), file_in(tmp_path, "g" * 16, "l" * 32)
    other.write(contents)
    other.path.rename(file.path)
    with pytest.raises(DamagedFile, match="it is another model's"):
        file.read()
    file.path.rename(tmp_path / "elsewhere")
    file.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedFile, match="cannot be read"):
        file.read()
    file.path.unlink()
    file.path.mkdir()
    with pytest.raises(DamagedFile, match="cannot be read"):
        file.read()


def test_others_of_the_family_and_the_oldest_of_all_are_removed(tmp_path: Path) -> None:
    small = Contents({"head": packed(0, 4096)})
    families = [character * 16 for character in "abcdef"]
    for number, family in enumerate(families):
        file = file_in(tmp_path, family)
        file.write(small)
        os.utime(file.path, (number, number))
    kept = [file_in(tmp_path, family).path for family in families[-MOST_FILES:]]
    assert sorted(tmp_path.iterdir()) == kept
    leftover = file_in(tmp_path, "d" * 16, "m" * 32).temporary
    leftover.write_bytes(b"of a writer that was killed")
    newest = file_in(tmp_path, "c" * 16, "n" * 32)
    newest.write(small)
    assert sorted(tmp_path.iterdir()) == sorted([newest.path, *kept[1:]])


def test_two_writers_at_once_leave_one_whole_file(tmp_path: Path, contents: Contents) -> None:
    file = file_in(tmp_path)
    file.temporary.write_bytes(b"begun by another process")
    with file.temporary.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not file.write(contents)
        assert not file_in(tmp_path, "g" * 16).write(contents) or file.temporary.exists()  # not removed as a leftover
    assert file.write(contents) and file.read() is not None
    assert not file.temporary.exists()


def test_a_writer_that_is_stopped_leaves_nothing(tmp_path: Path, contents: Contents) -> None:
    answers = iter([False, False, True])
    assert not file_in(tmp_path).write(contents, is_stopped=lambda: next(answers))
    assert list(tmp_path.iterdir()) == []


@contextmanager
def limited_files(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_refuses_is_logged_and_leaves_nothing(
    tmp_path: Path, contents: Contents, caplog: pytest.LogCaptureFixture
) -> None:
    file = file_in(tmp_path)
    with limited_files(PIECE_BYTES), caplog.at_level(logging.WARNING):
        UnsavedWeights(file, contents).save()
    assert "cannot be written, so the next start takes longer" in caplog.text
    assert list(tmp_path.iterdir()) == []
    UnsavedWeights(file, contents).save()
    assert file.read() is not None


def test_a_file_takes_at_most_half_of_the_free_space(tmp_path: Path) -> None:
    assert lacking_room(tmp_path, 500, free_bytes=1000) is None
    assert lacking_room(tmp_path, 501, free_bytes=1000) == f"{tmp_path} has 1,000 bytes free"
    assert lacking_room(tmp_path / "made", 1) is None and (tmp_path / "made").is_dir()
    (tmp_path / "file").touch()
    assert "cannot be used" in str(lacking_room(tmp_path / "file" / "below", 1))
