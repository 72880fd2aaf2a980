"""Probes of `rekindle doctor` for the store's directory: its owner, what the disk supports, and how fast it is.

Durability, holes and speed are tried on a scratch file in a directory that is removed afterwards: next to the stores,
or in the nearest existing directory if the store's does not exist yet.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rekindle.cli.findings import Finding
from rekindle.config import MiB, StoreSettings, show_bytes
from rekindle.spec import KVLayout
from rekindle.store.admin import list_stores
from rekindle.store.files.records import RecordFormat
from rekindle.store.files.sync import OsFileSystem
from rekindle.store.maintenance.room import budget

SPEED_BYTES = 64 * MiB
HOLE_BYTES = 4 * MiB
NETWORK = ("nfs", "cifs", "smb", "9p", "fuse.sshfs", "ceph", "glusterfs", "lustre")
IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Bytes a second, made durable and read back; `cached` if the page cache could not be dropped before reading."""

    written: float
    read: float
    cached: bool


def nearest(directory: Path) -> Path:
    """Return the directory, or its closest parent that exists."""
    while not directory.exists():
        directory = directory.parent
    return directory


def probe_directory(directory: Path) -> Finding:
    """Whether the store can be created or used by this user, and by no other."""
    where = nearest(directory)
    if not where.is_dir():
        return Finding("store", "fail", f"{where} is no directory", "remove it, or choose another with --store")
    if not os.access(where, os.R_OK | os.W_OK | os.X_OK):
        return Finding("store", "fail", f"this user cannot write {where}", "chown it, or choose another with --store")
    if where != directory:
        return Finding("store", "ok", f"{directory} does not exist yet: the first start creates it in {where}")
    status = directory.stat()
    if status.st_uid != os.geteuid():
        return Finding(
            "store", "warn", f"{directory} belongs to user {status.st_uid}", f"chown it to user {os.geteuid()}"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        text = f"{directory} is open to other users (mode {mode:03o}); they can read agents' conversations"
        return Finding("store", "warn", text, f"chmod 700 {directory}")
    return Finding("store", "ok", f"{directory} (mode {mode:03o})")


def probe_stores(directory: Path) -> Iterator[Finding]:
    """What the directory holds of each model, and which process uses it."""
    for store in list_stores(directory):
        held = f", in use by {store.in_use_by}" if store.in_use_by else ""
        text = f"{store.num_agents:,} agents in {show_bytes(store.bytes)}{held}"
        slot = "" if store.slot is None else f" in slot-{store.slot}"
        yield Finding(f"store of {store.model or store.fingerprint[:12]}{slot}", "ok", text)


def probe_lock(settings: StoreSettings, fingerprint: bytes, *, is_served: bool) -> Finding | None:
    """Which process holds the store this model would use; None if none does. That is ok if our server has the port."""
    if settings.slot == "auto":
        return None
    for store in list_stores(settings.own_directory()):
        if store.slot is None and store.fingerprint == fingerprint.hex() and store.in_use_by is not None:
            text = f"this model's store is in use by {store.in_use_by}"
            if is_served:
                return Finding("lock", "ok", text)
            return Finding(
                "lock",
                "warn",
                text,
                "stop it before you serve here, or serve with another --store or --slot auto",
            )
    return None


def probe_space(settings: StoreSettings) -> Finding:
    """Compare free space with the store's budget; space the store already uses counts as available."""
    directory = settings.directory()
    free, used = OsFileSystem().free_bytes(nearest(directory)), taken_bytes(directory)
    most = budget(settings.disk_bytes, free_bytes=free, used_bytes=used)
    who = "" if settings.slot == "off" else "each slot "
    text = f"{show_bytes(free)} free, the store takes {show_bytes(used)} and {who}may take {show_bytes(most)}"
    if most > free + used:
        return Finding("space", "warn", text, "the disk will be full first: lower --disk-bytes, or free some space")
    if free < SPEED_BYTES:
        return Finding("space", "fail", text, "free some space: turns cannot be saved")
    return Finding("space", "ok", text)


def taken_bytes(directory: Path) -> int:
    """Bytes allocated to all files below the directory."""
    statuses = (path.lstat() for path in directory.rglob("*"))
    return sum(status.st_blocks * 512 for status in statuses if stat.S_ISREG(status.st_mode))


def probe_file_system(directory: Path) -> Iterator[Finding]:
    """The kind of file system, if known, and what it does when data is synced and holes are punched."""
    where = nearest(directory)
    kind = kind_of_mount(where, Path("/proc/self/mounts"))
    if kind is not None and kind.startswith(NETWORK):
        yield Finding(
            "disk", "warn", f"{kind}: over a network", "locks and syncing may not hold there: use a local disk"
        )
    elif kind in IN_MEMORY:
        yield Finding("disk", "warn", f"{kind}: in memory", "nothing there survives a reboot: use a disk")
    elif kind is not None:
        yield Finding("disk", "ok", kind)
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=where) as scratch:
            yield from _try_file(Path(scratch) / "probe")
    except OSError as error:
        yield Finding(
            "durability", "fail", f"a file in {where}: {error.strerror or error}", "repair the disk, or change --store"
        )


def kind_of_mount(where: Path, mounts: Path) -> str | None:
    """The type of the mount that contains `where`; None if unknown."""
    if not mounts.is_file():
        return None
    rows = [line.split(" ")[1:3] for line in mounts.read_text().splitlines()]
    above = [(place, kind) for place, kind in rows if where.resolve().is_relative_to(place.replace("\\040", " "))]
    return max(above, key=lambda row: len(row[0]), default=(None, None))[1]


def _try_file(path: Path) -> Iterator[Finding]:
    fs = OsFileSystem()
    fd = fs.open_file(path, "create")
    try:
        fs.write(fd, 0, np.full(HOLE_BYTES, 0xA5, dtype=np.uint8))
        began = time.perf_counter()
        try:
            fs.sync_data(fd)
        except OSError as error:
            why = error.strerror or str(error)
            yield Finding("durability", "fail", f"syncing fails: {why}", "conversations may be lost: use another disk")
        else:
            took = time.perf_counter() - began
            yield Finding("durability", "ok", f"synced {show_bytes(HOLE_BYTES)} in {1e3 * took:.0f} ms")
        yield _try_hole(fs, fd)
    finally:
        fs.close_file(fd)


def _try_hole(fs: OsFileSystem, fd: int) -> Finding:
    before = os.fstat(fd).st_blocks
    fs.punch(fd, 0, HOLE_BYTES)
    fs.sync_data(fd)
    left = np.ones(HOLE_BYTES, dtype=np.uint8)
    fs.read(fd, 0, left)
    if left.any():
        return Finding(
            "holes", "fail", "punched ranges keep their bytes", "deleted text stays on this disk: use another"
        )
    if os.fstat(fd).st_blocks >= before:
        text = "not supported: deleted blocks are overwritten with zeros and keep their space for new ones"
        return Finding("holes", "warn", text, "harmless, but the store does not shrink; ext4, xfs, btrfs and APFS can")
    return Finding("holes", "ok", "punched; the space of deleted blocks comes back")


def measure_disk(directory: Path, record_bytes: int) -> DiskSpeed | None:
    """Write 64 MiB in records, make them durable, read them back; None if there is no room for that."""
    fs, where = OsFileSystem(), nearest(directory)
    count = SPEED_BYTES // record_bytes
    record = np.random.default_rng(0).integers(0, 256, record_bytes, dtype=np.uint8)  # nothing to compress
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=where) as scratch:
            fd = fs.open_file(Path(scratch) / "speed", "create")
            try:
                began = time.perf_counter()
                for number in range(count):
                    fs.write(fd, number * record_bytes, record)
                fs.sync_data(fd)
                written = time.perf_counter()
                dropped = hasattr(os, "posix_fadvise")
                if dropped:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                started = time.perf_counter()
                for number in range(count):
                    fs.read(fd, number * record_bytes, record)
                ended = time.perf_counter()
            finally:
                fs.close_file(fd)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            return None
        raise
    num_bytes = count * record_bytes
    return DiskSpeed(num_bytes / (written - began), num_bytes / (ended - started), cached=not dropped)


def record_bytes(layout: KVLayout) -> int:
    """Bytes on disk of a block over all its parts."""
    return sum(RecordFormat.of(layout, part.index).record_bytes for part in layout.parts)


def judge_speed(speed: DiskSpeed | None, layout: KVLayout, prefill_rate: float | None) -> Finding:
    """Compare loading 1,000 tokens of this model with computing them at `prefill_rate` tokens a second."""
    if speed is None:
        return Finding("disk speed", "warn", "there is no room to measure it", "free 64 MiB in the store's directory")
    per_1000 = 1000 / layout.block_tokens * record_bytes(layout)
    save, load = per_1000 / speed.written, per_1000 / speed.read
    cached = " (cached)" if speed.cached else ""
    text = (
        f"writes {speed.written / 1e6:,.0f} MB/s durably, reads {speed.read / 1e6:,.0f} MB/s{cached}: "
        f"1,000 tokens are saved in {save:.3f} s and loaded in {load:.3f} s"
    )
    if prefill_rate is None:
        return Finding("disk speed", "ok", text)
    compute = 1000 / prefill_rate
    text += f", computing them takes {compute:.2f} s"
    if load > compute:
        return Finding("disk speed", "warn", text, "loading is slower than computing: use a faster disk for --store")
    return Finding("disk speed", "ok", f"{text}, {compute / load:,.0f} times as long as loading")
