"""Sealed objects by name, in any object store: get, put if absent, and swap, each with a time limit.

Owns the thread that waits for the object store. A failure or a missing answer is a TierUnavailable, a damaged or
foreign object a BadObject, as is one that is larger than it may be, which is not read; a lock that another process
keeps is a HeadsLocked; what is not there is None. An object that is written twice under one name is the same both
times, except for those that are swapped.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import LocalStore, ObjectStore

from rekindle_tier.location import first_line
from rekindle_tier.sealing import OVERHEAD, BadObject, Sealer, Version

T = TypeVar("T")
ANSWER_S = 60.0  # the longest wait for one answer, where nobody waits for it
CLOSED = "it is closed"
AT_ONCE = 16  # objects on their way at a time
MOST_BYTES = 64 << 20  # of an object that is read alone: a head with 64 texts of 100,000 tokens has less
LOCK_S, LOOK_AGAIN_S = 5.0, 0.01  # the longest wait for the lock of a directory's heads, and how often it is tried
AHEAD = 32  # objects that are asked for before the first of them was used


class TierUnavailable(Exception):
    """The object store has failed, or not answered in time; the message says which."""


class NoAnswer(TierUnavailable):
    """The object store has not answered in the time that its caller had: `waited_s` seconds."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(f"no answer within {waited_s:.3g} s")
        self.waited_s = waited_s


class HeadsLocked(Exception):
    """Another process holds the lock of a directory's heads and does not release it: nothing was written."""


@dataclass(frozen=True, slots=True)
class Listed:
    """An object in a listing: its name, its bytes, and when it was last written (wall clock of the object store)."""

    name: str
    num_bytes: int
    modified: float


@dataclass(frozen=True, slots=True)
class _Got:
    """An object as it is in the object store; `sealed` None: it is too large to be read."""

    sealed: bytes | None
    num_bytes: int
    version: Version


class Objects:
    """The objects below one prefix. Any thread; each call blocks its caller for at most `timeout_s` seconds."""

    def __init__(self, store: ObjectStore, sealer: Sealer, prefix: str, *, directory: Path | None) -> None:
        self.sealer = sealer
        self._store = store
        self._prefix = prefix
        self.suspects: set[str] = set()  # names of objects that are missing or damaged, though a head names them
        self._lock_path = directory / ".lock" if directory is not None else None
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._lock = threading.Lock()
        self._is_closed = False
        self._awaited: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rekindle-tier-objects", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; those who still wait for an answer get a TierUnavailable, like all later callers."""

        async def ended() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*tasks, return_exceptions=True)
            self._loop.stop()

        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            return
        for each in list(self._awaited):
            each.cancel()
        asyncio.run_coroutine_threadsafe(ended(), self._loop)
        self._thread.join()
        self._loop.close()

    def get(self, name: str, *, timeout_s: float = ANSWER_S) -> tuple[bytes, Version] | None:
        """Return an object's data and version."""
        return self.get_together(name, timeout_s=timeout_s)[0]

    def get_together(self, *names: str, timeout_s: float = ANSWER_S) -> list[tuple[bytes, Version] | None]:
        """Return the data and versions of objects, which are asked for at once; one may be of `MOST_BYTES`.

        If any of them is damaged, BadObject with the version of the first.
        """

        async def fetched() -> list[_Got | None]:
            return list(await asyncio.gather(*(self._fetch(name, MOST_BYTES) for name in names)))

        got = self._wait(fetched(), timeout_s)
        try:
            return [self._read(name, each) for name, each in zip(names, got, strict=True)]
        except BadObject as error:
            error.version = None if got[0] is None else got[0].version
            raise

    def _read(self, name: str, got: _Got | None) -> tuple[bytes, Version] | None:
        return None if got is None else (self._open(name, got), got.version)

    def _open(self, name: str, got: _Got) -> bytes:
        if got.sealed is None:
            raise BadObject(f"{got.num_bytes} bytes, more than it may have")
        return self.sealer.open(self._path(name), got.sealed)

    def get_many(
        self, names: Sequence[str], *, seconds_left: Callable[[], float], most_bytes: int, num_certain: int = 0
    ) -> Generator[bytes | None]:
        """Yield the objects' data in order, several on their way at a time, each of `most_bytes`; the first failure
        ends it.

        `seconds_left` is asked before each wait. The first `num_certain` are expected to be there; of others, the more
        have been found, the more are asked for ahead, as a request for what is not there costs as much as any.
        """
        ahead: list[Future[_Got | None]] = []
        try:
            for at, name in enumerate(names):
                most = min(AHEAD, max(num_certain - at, 1 + 2 * max(0, at - num_certain)), len(names) - at)
                while len(ahead) < most:
                    ahead.append(self._start(self._fetch(names[at + len(ahead)], most_bytes)))
                got = _answer(ahead.pop(0), seconds_left())
                yield None if got is None else self._open(name, got)
        finally:
            for each in ahead:
                each.cancel()

    def put(self, name: str, data: bytes, *, timeout_s: float = ANSWER_S) -> None:
        """Write an object whose content its name determines; one that is there is written again."""
        path = self._path(name)
        self._wait(self._send(path, self.sealer.seal(path, data), "overwrite"), timeout_s)

    def put_many(self, items: Sequence[tuple[str, bytes]], *, timeout_s: float = ANSWER_S) -> None:
        """Write such objects, several on their way at a time."""
        sending = [
            self._start(self._send(path, self.sealer.seal(path, data), "overwrite"))
            for path, data in ((self._path(name), data) for name, data in items)
        ]
        for each in sending:
            _answer(each, timeout_s)

    def swap(self, name: str, data: bytes, expected: Version | None, *, timeout_s: float = ANSWER_S) -> Version | None:
        """Write an object if it is still in this version (None: absent); return its new version, None if it is not.

        HeadsLocked, of a directory, if another process holds its lock for more than `LOCK_S` seconds.
        """
        path = self._path(name)
        sealed = self.sealer.seal(path, data)
        if expected is None:
            return self._wait(self._send(path, sealed, "create"), timeout_s)
        if isinstance(self._store, LocalStore):
            return self._swap_file(path, sealed, expected, timeout_s)
        mode: dict[str, str] = {"e_tag": expected.e_tag}
        if expected.version is not None:
            mode["version"] = expected.version
        return self._wait(self._send(path, sealed, mode), timeout_s)

    def modified(self, name: str, *, timeout_s: float = ANSWER_S) -> float | None:
        """Return when an object was last written (wall clock of the object store)."""
        found = self._wait(self._look(self._path(name)), timeout_s)
        return None if found is None else float(found["last_modified"].timestamp())

    def list(self, folder: str, *, timeout_s: float = ANSWER_S) -> list[Listed]:
        """Return the objects in a folder, in any order."""
        start = len(self._prefix) + 1

        async def listed() -> list[Listed]:
            return [
                Listed(each["path"][start:], each["size"], each["last_modified"].timestamp())
                async for batch in obstore.list(self._store, self._path(folder))
                for each in batch
            ]

        return self._wait(listed(), timeout_s)

    def delete(self, names: Sequence[str], *, timeout_s: float = ANSWER_S) -> None:
        """Delete objects; those that are gone already do not matter."""

        async def gone(path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                await obstore.delete_async(self._store, path)

        for each in [self._start(gone(self._path(name))) for name in names]:
            _answer(each, timeout_s)

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    async def _fetch(self, name: str, most_bytes: int) -> _Got | None:
        async with self._slots:
            try:
                got = await obstore.get_async(self._store, self._path(name))
                version, num_bytes = Version(got.meta["e_tag"] or "", got.meta["version"]), got.meta["size"]
                is_small = num_bytes <= most_bytes + OVERHEAD
                data = bytes(await got.bytes_async()) if is_small else None
            except FileNotFoundError:
                return None
            return _Got(data, num_bytes, version)

    async def _look(self, path: str) -> Any | None:
        try:
            return await obstore.head_async(self._store, path)
        except FileNotFoundError:
            return None

    async def _send(self, path: str, sealed: bytes, mode: Any) -> Version | None:
        """Write; None if the object is not as `mode` expects it, which is gone where a version is expected."""
        async with self._slots:
            try:
                put = await obstore.put_async(self._store, path, sealed, mode=mode, use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return None
            except FileNotFoundError as error:
                if isinstance(mode, str):
                    raise TierUnavailable(f"its bucket is not there: {first_line(error)}") from error
                return None
            return Version(put["e_tag"] or "", put["version"])

    def _swap_file(self, path: str, sealed: bytes, expected: Version, timeout_s: float) -> Version | None:
        """Swap in a directory, whose files have no conditional write: under a lock that all replicas take."""
        assert self._lock_path is not None, "a directory has a lock"
        with _opened(self._lock_path) as lock:
            self._take(lock)
            found = self._wait(self._look(path), timeout_s)
            if found is None or found["e_tag"] != expected.e_tag:
                return None
            return self._wait(self._send(path, sealed, "overwrite"), timeout_s)

    def _take(self, lock: IO[str]) -> None:
        """Take the lock of a directory's heads, which is released when its file is closed."""
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if self._is_closed:
                    raise TierUnavailable(CLOSED) from None
                if time.monotonic() > deadline:
                    raise HeadsLocked(
                        f"{self._lock_path} has been locked by another process for {LOCK_S:g} s"
                    ) from None
            time.sleep(LOOK_AGAIN_S)

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._is_closed:
                work.close()
                raise TierUnavailable(CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._awaited.add(future)
        future.add_done_callback(self._awaited.discard)
        return future

    def _wait(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        return _answer(self._start(work), timeout_s)


def _opened(path: Path) -> IO[str]:
    """Open a lock's file, made if it is not there: no link, whose target may be anything, and nothing that waits."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise TierUnavailable(f"its lock {path} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise TierUnavailable(f"its lock {path} is no file: remove it")
    return os.fdopen(file, "r+")


def _answer(future: Future[T], timeout_s: float) -> T:
    timeout_s = max(0.0, timeout_s)
    try:
        return future.result(timeout_s)
    except FutureTimeout:
        future.cancel()
        raise NoAnswer(timeout_s) from None
    except CancelledError:
        raise TierUnavailable(CLOSED) from None
    except (BaseError, OSError, NotImplementedError) as error:  # the last one: of stores without conditional writes
        raise TierUnavailable(first_line(error)) from error
