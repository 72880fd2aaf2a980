"""The file of a model's packed weights: written once, mapped by later starts.

    packed-FAMILY-KEY.bin     a header, an index in JSON, then weights and tensors, each at a multiple of 64 bytes
    .packed-FAMILY-KEY.new    the same while it is written, locked by the process that writes it

Owns these files: their form, whether one is whole, which ones are removed. FAMILY stands for a model and the format of
its weights, KEY for everything that the weights and what was proved of them depend on. Knows names of weights, but no
modules. Where a model's own files are slow to read, what is not packed is in it, too, as tensors. A file is complete
when it gets its name and is never changed afterwards, only replaced or removed, so what a process has mapped stays as
it is.

The header has the size of the file and a digest of the index, the index a sum of the 64-bit words of each weight, and
all are compared before a weight is used. A sum finds damage, not intent, which is enough for a directory that is its
owner's alone: 773 MB take 30 ms, with SHA-256 they would take 440.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import mmap
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rekindle.compute.cpu.kernels.linear import FORMATS, PackedWeights
from rekindle.compute.cpu.kernels.weight_memory import ALIGNMENT
from rekindle.model.kept_tensors import PlainTensor

log = logging.getLogger(__name__)
MAGIC, FORM = b"rkpacked", 2
HEADER = struct.Struct("<8sQQQ32s")  # magic, form, bytes of the index, bytes of the file, digest of the index
PAGE = 4096
PIECE_BYTES = 16 << 20
MOST_FILES = 4  # of all models in one directory
_NOFOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC
SPARE_SHARE = 2  # a file may take half of the free space


class DamagedFile(ValueError):
    """Why a file of weights cannot be used."""


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """Packed weights by the names of their users, of which weights that are shared have several; and notes on them.

    `tensors`: all that is read from the model's own files, by its name there; empty if those are to be read again.
    """

    weights: Mapping[str, PackedWeights]
    notes: tuple[str, ...] = ()
    tensors: Mapping[str, PlainTensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights and tensors, shared ones once."""
        held = sum(each.memory.nbytes for each in self.tensors.values() if each.memory is not None)
        return held + sum(weights.num_bytes for weights in self.users())

    def users(self) -> dict[PackedWeights, list[str]]:
        """The names of each weight's users."""
        users: dict[PackedWeights, list[str]] = {}
        for name, weights in self.weights.items():
            users.setdefault(weights, []).append(name)
        return users


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """The file of one family and key in a directory; it may be missing."""

    directory: Path
    family: str
    key: str

    @property
    def path(self) -> Path:
        """Where it is once it is complete."""
        return self.directory / f"packed-{self.family}-{self.key}.bin"

    @property
    def temporary(self) -> Path:
        """Where it is while it is written."""
        return self.directory / f".packed-{self.family}-{self.key}.new"

    def read(self) -> Contents | None:
        """Map the file; None if there is none, DamagedFile if it is not what was written. Reads every byte once."""
        try:
            with os.fdopen(os.open(self.path, os.O_RDONLY | _NOFOLLOW), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                index, start = _read_index(file, size, self.key)
                data = np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)[start:]
            return _contents(index, data)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DamagedFile(f"it cannot be read ({error.strerror or error})") from error

    def write(self, contents: Contents, *, is_stopped: Callable[[], bool] = lambda: False) -> bool:
        """Write the file and remove others; False if stopped, or if another process is writing it.

        OSError if the disk refuses. Nothing is left then.
        """
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _created(self.temporary) as file:
            if not _is_ours(file, self.temporary):
                return False
            try:
                is_whole = self._fill(file, contents, is_stopped)
                if is_whole:
                    self.temporary.replace(self.path)
                else:
                    self.temporary.unlink()
            except OSError:
                with contextlib.suppress(OSError):
                    self.temporary.unlink()
                raise
        if is_whole:
            _sync(self.directory)
            self._remove_others()
        return is_whole

    def _fill(self, file: FileIO, contents: Contents, is_stopped: Callable[[], bool]) -> bool:
        """Write everything durably; False if stopped before that."""
        os.ftruncate(file.fileno(), 0)
        for piece in self._pieces(contents):
            if is_stopped():
                return False
            _write(file, piece)
        os.fsync(file.fileno())
        return True

    def _pieces(self, contents: Contents) -> Iterator[memoryview]:
        """What the file consists of, in pieces of at most 16 MiB."""
        parts, end = list[tuple[dict[str, Any], np.ndarray]](), 0
        for weights, names in contents.users().items():
            about = {"format": weights.format, "columns": weights.columns, "depth": weights.depth}
            parts.append(({"names": names, **about}, weights.memory))
        for name, tensor in contents.tensors.items():
            of_it = {"tensor": name, "dtype": tensor.dtype, "shape": tensor.shape, "packed": tensor.memory is None}
            parts.append((of_it, np.empty(0, np.uint8) if tensor.memory is None else tensor.memory))
        for entry, memory in parts:
            entry |= {"offset": end, "bytes": memory.nbytes, "sum": _sum(memory)}
            end = _rounded(end + memory.nbytes, ALIGNMENT)
        entries = [entry for entry, _ in parts]
        index = json.dumps({"key": self.key, "notes": contents.notes, "weights": entries}).encode()
        start = _rounded(HEADER.size + len(index), PAGE)
        header = HEADER.pack(MAGIC, FORM, len(index), start + end, _digest(index))
        yield memoryview((header + index).ljust(start, b"\0"))
        for _, memory in parts:
            for at in range(0, memory.nbytes, PIECE_BYTES):
                yield memory[at : at + PIECE_BYTES].data
            yield memoryview(bytes(-memory.nbytes % ALIGNMENT))

    def _remove_others(self) -> None:
        """Remove what this file replaces, the oldest beyond four of all models, and leftovers of killed writers."""
        others = [path for path in self.directory.glob("packed-*-*.bin") if path != self.path]
        try:
            kept = sorted(others, key=lambda path: -path.stat().st_mtime_ns)
            for path in others:
                if path.name.startswith(f"packed-{self.family}-") or path in kept[MOST_FILES - 1 :]:
                    path.unlink()
            for path in self.directory.glob(".packed-*-*.new"):
                with _created(path) as file:
                    if _is_ours(file, path):
                        path.unlink()
        except OSError as error:
            log.warning("old files of packed weights in %s cannot be removed: %s", self.directory, error)


@dataclass(frozen=True, slots=True, eq=False)
class UnsavedWeights:
    """Packed weights that are to be written to a file for later starts."""

    file: WeightsFile
    contents: Contents

    def save(self, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Write them, unless stopped; a disk that refuses is logged, as the next start only takes longer."""
        try:
            if self.file.write(self.contents, is_stopped=is_stopped):
                log.info("packed weights are kept in %s", self.file.path)
        except OSError as error:
            log.warning("%s cannot be written, so the next start takes longer: %s", self.file.path, error)


def lacking_room(directory: Path, num_bytes: int, *, free_bytes: int | None = None) -> str | None:
    """Why a file of this size is not written: it would take more than half of the free space; None if it fits."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        free = shutil.disk_usage(directory).free if free_bytes is None else free_bytes
    except OSError as error:
        return f"{directory} cannot be used ({error.strerror or error})"
    return f"{directory} has {free:,} bytes free" if free < SPARE_SHARE * num_bytes else None


def _read_index(file: BinaryIO, size: int, key: str) -> tuple[dict[str, Any], int]:
    """Return the index and where the weights begin."""
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise DamagedFile(f"it has {size:,} bytes only")
    magic, form, index_bytes, file_bytes, digest = HEADER.unpack(header)
    if magic != MAGIC or form != FORM:
        raise DamagedFile("it has another form")
    if size != file_bytes:
        raise DamagedFile(f"it has {size:,} bytes where its header promises {file_bytes:,}")
    encoded = file.read(min(index_bytes, size))
    if _digest(encoded) != digest:
        raise DamagedFile("its index has changed")
    index: dict[str, Any] = json.loads(encoded)
    if index["key"] != key:
        raise DamagedFile("it is another model's")
    return index, _rounded(HEADER.size + index_bytes, PAGE)


def _contents(index: dict[str, Any], data: np.ndarray) -> Contents:
    """Return the weights in `data`, the mapped bytes after the index."""
    found: dict[str, PackedWeights] = {}
    tensors: dict[str, PlainTensor] = {}
    for entry in index["weights"]:
        memory = data[entry["offset"] : entry["offset"] + entry["bytes"]]
        name = entry["tensor"] if "tensor" in entry else entry["names"][0]
        if memory.nbytes != entry["bytes"]:
            raise DamagedFile("it has another form")
        if _sum(memory) != entry["sum"]:
            raise DamagedFile(f"weights of {name} have changed")
        if "tensor" in entry:
            tensors[name] = PlainTensor(entry["dtype"], tuple(entry["shape"]), None if entry["packed"] else memory)
            continue
        if entry["format"] not in FORMATS:
            raise DamagedFile("it has another form")
        packed = PackedWeights(entry["format"], entry["columns"], entry["depth"], memory, memory.ctypes.data)
        packed.check()
        found |= dict.fromkeys(entry["names"], packed)
    return Contents(found, tuple(index["notes"]), tensors)


def _sum(memory: np.ndarray) -> int:
    """The sum of 64-bit words of memory, and of the bytes of a last one that is cut."""
    whole = memory.nbytes // 8 * 8
    return int(np.add.reduce(memory[:whole].view(np.uint64))) + int(np.add.reduce(memory[whole:], dtype=np.uint64))


def _digest(index: bytes) -> bytes:
    return hashlib.blake2b(index, digest_size=32).digest()


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _created(path: Path) -> FileIO:
    """Open for writing, readable by its owner only; create what is missing."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | _NOFOLLOW, 0o600), "wb", buffering=0)


def _is_ours(file: FileIO, path: Path) -> bool:
    """Lock an open file; False if another process has it, or has given it another name or removed it meanwhile."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _write(file: FileIO, piece: memoryview) -> None:
    """Write all of a piece."""
    done = 0
    while done < piece.nbytes:
        done += file.write(piece[done:])


def _sync(directory: Path) -> None:
    """Make a new name in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
