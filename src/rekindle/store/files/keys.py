"""The keys of a store's directory: the file `secret`, what is in it, and the key that opens it.

    DIR/secret    of a clear store:       the secret [32]
                  of an encrypted store:  | "RKKEYS1\\n" | u8 count | count × entry |
                  entry                   nonce [12] | sealed under a master key: secret [32], data key [32] | tag [16]

The secret is the key of all hashes: of blocks, agents and rows. The data key is what everything that says something is
encrypted with; the master key is the operator's, comes from outside (setting `store_key`) and encrypts these two alone,
so it is changed without touching anything else, and without the processes that have the store open: a new one is
added, and the old one dropped once everybody who opens the store has the new one.

Owns that file: it is made once, random or from the setting `secret`, and written aside and renamed under a lock, so
that processes that make or change it agree. A slot's is a copy of its directory's.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rekindle.config import StoreSettings, is_slot, slot_directory, slot_numbers
from rekindle.errors import StoreError
from rekindle.store.files.ciphers import KEY_BYTES, OVERHEAD, Changed, Sealing, derived_key
from rekindle.store.files.damage import refusal
from rekindle.store.files.sync import FileSystem, OsFileSystem, is_at

SECRET_BYTES = 32
SECRET_FILE = "secret"
MOST_KEYS = 8  # that open one store at once: two while the key is changed
_MAGIC = b"RKKEYS1\n"
_ENTRY_BYTES = SECRET_BYTES + KEY_BYTES + OVERHEAD
_NOT_ENCRYPTED = (
    "{} was made without encryption, and a key is given (store_key or store_key_file); nothing was changed: choose "
    "another directory as store, which is encrypted from the start, and bring agents over with `rekindle agents "
    "export` and `import`; or leave the key out"
)
_NO_KEY = (
    "{} is encrypted and no key is given; nothing was changed: give its key as `store_key` (REKINDLE_STORE_KEY), or "
    "name the file that has it by `store_key_file`"
)
_WRONG_KEY = (
    "{} is encrypted with another key than the one that is given; nothing was changed: give the key it was made with, "
    "or last changed to; without it nothing of it can be read, and only a new directory helps"
)


@dataclass(frozen=True, slots=True)
class StoreKeys:
    """What the file `secret` holds; `data` None: the store is clear."""

    secret: bytes = field(repr=False)
    data: bytes | None = field(repr=False)

    @classmethod
    def new(cls, secret: bytes | None, master: bytes | None) -> StoreKeys:
        """New keys: with this secret, or a random one, and a data key if there is a master key."""
        secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
        return cls(secret, None if master is None else secrets.token_bytes(KEY_BYTES))


@dataclass(frozen=True, slots=True)
class Given:
    """What an operator gives: the text that a new secret is made from, the master key [32] of an encrypted store."""

    secret: str | None = field(default=None, repr=False)
    master: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(cls, settings: StoreSettings) -> Given:
        """That of these settings; ConfigError if the file of the key cannot be read."""
        return cls(settings.secret, settings.master_key())

    @property
    def new_secret(self) -> bytes | None:
        """The secret of a directory that has none yet; None: a random one."""
        return None if self.secret is None else derived_secret(self.secret)


NOTHING_GIVEN = Given()


def store_keys(directory: Path, fs: FileSystem, master: bytes | None, new: bytes | None = None) -> StoreKeys:
    """Return the keys of a directory, which exists; makes them on first use, with the secret `new` or a random one.

    Raises OSError, or StoreError if the file is damaged, or is not one for this master key (None: of a clear store).
    """
    path = directory / SECRET_FILE
    if not path.exists():
        _make(directory, fs, master, new)
    return _opened(directory, _content(path, fs), master)


def directory_keys(directory: Path, fs: FileSystem, master: bytes | None, new: bytes | None = None) -> StoreKeys:
    """Return the keys of a directory as `store_keys` does, and make the directory, too.

    StoreError if they cannot be used, StoreRefused if the disk refuses.
    """
    try:
        directory = make_directory(directory, fs)
        return store_keys(directory, fs, master, new)
    except OSError as error:
        raise refusal(error, unusable(directory, error)) from error


def given_keys(directory: Path, given: Given, fs: FileSystem) -> StoreKeys:
    """Return the keys of a directory, as `directory_keys` does; a new secret is made from the given text, if any.

    StoreError, with nothing changed, if the directory has another secret than that text makes.
    """
    wanted = given.new_secret
    keys = directory_keys(directory, fs, given.master, wanted)
    if wanted is not None and not hmac.compare_digest(keys.secret, wanted):
        raise StoreError(
            f"{directory} was made with another secret, by which what is stored there is found; nothing was changed: "
            "give the secret it was made with, leave `secret` (REKINDLE_SECRET) out to use the directory's own, or "
            "choose another directory as store"
        )
    return keys


def derived_secret(text: str) -> bytes:
    """Return the secret [32] that a text stands for: the same on every machine, and nothing else's hash."""
    content = text.encode("utf-8", "surrogateescape")  # an environment variable may hold any bytes
    return hashlib.blake2b(content, digest_size=SECRET_BYTES, person=b"rekindle-secret").digest()


def make_directory(directory: Path, fs: FileSystem) -> Path:
    """Create the directory if missing and return it resolved; StoreError on failure."""
    try:
        directory = directory.resolve()
        fs.make_directory(directory)
    except OSError as error:
        raise StoreError(unusable(directory, error)) from error
    return directory


def unusable(directory: Path, error: OSError) -> str:
    """What an error says of a directory that cannot be used."""
    why = "it is a file" if os.path.isfile(directory) else error.strerror or str(error)
    return f"the store's directory {directory} cannot be used: {why}; check its permissions, or choose another as store"


def add_key(directories: Sequence[Path], current: bytes, new: bytes, fs: FileSystem | None = None) -> int:
    """Have a new master key open these directories and their slots, next to the current one; return their number.

    Processes that have them open go on. Whenever it ends early, the current key opens all of them, and the same call
    finishes it. StoreError, with nothing changed, if one is clear or the current key does not open it.
    """

    def added(entries: list[bytes], keys: StoreKeys) -> list[bytes]:
        if any(_held(entry, new) is not None for entry in entries):
            return entries
        if len(entries) == MOST_KEYS:
            raise StoreError(
                f"{MOST_KEYS} keys open the store already: end the last change first, with the key to keep"
            )
        return [*entries, _entry(keys, new)]

    return _change(directories, current, added, fs or OsFileSystem())


def keep_key(directories: Sequence[Path], current: bytes, fs: FileSystem | None = None) -> int:
    """Have the current master key alone open these directories and their slots; as `add_key`."""

    def kept(entries: list[bytes], keys: StoreKeys) -> list[bytes]:
        return [entry for entry in entries if _held(entry, current) is not None][:1]

    return _change(directories, current, kept, fs or OsFileSystem())


def _change(
    directories: Sequence[Path], current: bytes, change: Callable[[list[bytes], StoreKeys], list[bytes]], fs: FileSystem
) -> int:
    """Change the entries of all files of keys; return how many there are."""
    there = [directory for directory in directories if (directory / SECRET_FILE).exists()]
    places = [path for directory in there for path in (directory, *_slots(directory))]
    for path in places:  # all can be changed, before the first is
        content = _content(path / SECRET_FILE, fs)
        change(_entries(content), _opened(path, content, current))
    for directory in there:
        with _locked(directory, fs):  # no slot is made meanwhile
            for path in (directory, *_slots(directory)):
                _rewrite(path, current, change, fs)
    return len(places)


def _slots(directory: Path) -> list[Path]:
    found = (slot_directory(directory, number) for number in slot_numbers(directory))
    return [path for path in found if (path / SECRET_FILE).exists()]


def _rewrite(
    directory: Path, current: bytes, change: Callable[[list[bytes], StoreKeys], list[bytes]], fs: FileSystem
) -> None:
    """Write a file of keys anew, aside, and overwrite what it held before."""
    path, aside = directory / SECRET_FILE, directory / f"{SECRET_FILE}.changed"
    content = _content(path, fs)
    entries = change(_entries(content), _opened(directory, content, current))
    if entries == _entries(content):
        return
    before = fs.open_file(path, "existing")
    try:
        fd = fs.open_file(aside, "create")
        try:
            _fill(fd, _packed(entries), fs)
            fs.rename(aside, path)
        finally:
            fs.close_file(fd)
        fs.write(before, 0, bytes(len(content)))
        fs.sync_data(before)
    finally:
        fs.close_file(before)


def _make(directory: Path, fs: FileSystem, master: bytes | None, new: bytes | None) -> None:
    """Make the file of a directory, or of a slot as a copy of its directory's, unless another process just did."""
    if is_slot(directory):
        store_keys(directory.parent, fs, master, new)
        with _locked(directory.parent, fs):  # its key is not changed meanwhile
            content = _content(directory.parent / SECRET_FILE, fs)
            with _locked(directory, fs) as aside:
                _put(directory, aside, content, fs)
        return
    with _locked(directory, fs) as aside:
        keys = StoreKeys.new(new, master)
        _put(directory, aside, keys.secret if master is None else _packed([_entry(keys, master)]), fs)


def _put(directory: Path, aside: int, content: bytes, fs: FileSystem) -> None:
    if not (directory / SECRET_FILE).exists():
        _fill(aside, content, fs)
        fs.rename(directory / f"{SECRET_FILE}.new", directory / SECRET_FILE)


def _fill(fd: int, content: bytes, fs: FileSystem) -> None:
    fs.resize(fd, 0)
    fs.write(fd, 0, content)
    fs.sync_data(fd)


@contextlib.contextmanager
def _locked(directory: Path, fs: FileSystem) -> Iterator[int]:
    """Keep other processes from making or changing the file; yields the file that is written aside."""
    aside = directory / f"{SECRET_FILE}.new"
    while True:
        fd = fs.open_file(aside, "create")
        try:
            fs.lock(fd, "wait")
            if not is_at(fd, aside):
                continue  # another process renamed or removed it while this one waited
            yield fd
            if is_at(fd, aside):
                fs.remove(aside)
            return
        finally:
            fs.close_file(fd)


def _packed(entries: Sequence[bytes]) -> bytes:
    return _MAGIC + bytes([len(entries)]) + b"".join(entries)


def _entry(keys: StoreKeys, master: bytes) -> bytes:
    """The keys of an encrypted directory, encrypted with a master key."""
    assert keys.data is not None, "a clear store has no data key"
    return _wrapping(master).seal(keys.secret + keys.data, _MAGIC)


def _held(entry: bytes, master: bytes) -> StoreKeys | None:
    """What an entry holds; None if it is of another master key."""
    try:
        held = _wrapping(master).open(entry, _MAGIC)
    except Changed:
        return None
    return StoreKeys(held[:SECRET_BYTES], held[SECRET_BYTES:])


def _entries(content: bytes) -> list[bytes]:
    """The entries of a file; none if it is of a clear store, or damaged."""
    rest = content[len(_MAGIC) + 1 :]
    is_whole = content[: len(_MAGIC)] == _MAGIC and len(rest) == content[len(_MAGIC)] * _ENTRY_BYTES
    return [rest[start : start + _ENTRY_BYTES] for start in range(0, len(rest), _ENTRY_BYTES)] if is_whole else []


def _opened(directory: Path, content: bytes, master: bytes | None) -> StoreKeys:
    """What a file's content holds; StoreError unless the master key opens it, None a clear one."""
    if len(content) == SECRET_BYTES:
        if master is not None:
            raise StoreError(_NOT_ENCRYPTED.format(directory))
        return StoreKeys(content, None)
    entries = _entries(content)
    if not entries:
        raise StoreError(
            f"{directory / SECRET_FILE} is damaged, so nothing stored in {directory} can be found; restore it or "
            "remove the directory"
        )
    if master is None:
        raise StoreError(_NO_KEY.format(directory))
    found = next((held for entry in entries if (held := _held(entry, master)) is not None), None)
    if found is None:
        raise StoreError(_WRONG_KEY.format(directory))
    return found


def _wrapping(master: bytes) -> Sealing:
    return Sealing(derived_key(master, b"rekindle.wrap"))


def _content(path: Path, fs: FileSystem) -> bytes:
    fd = fs.open_file(path, "existing")
    try:
        content = np.zeros(min(fs.size(fd), 1 << 16), dtype=np.uint8)
        return content[: fs.read(fd, 0, content)].tobytes()
    finally:
        fs.close_file(fd)
