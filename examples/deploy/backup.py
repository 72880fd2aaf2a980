"""Copy a store while its server runs: `python backup.py STORE COPY`. COPY is a new directory, and a store afterwards.

Every index is copied first, as one snapshot, then the records. A record whose place was given to another one in between
fails its check in the copy, which counts it as missing; everything else that was saved when the copy began is in it.
Sessions are copied only while no server has them open. Packed weights are left out: a start makes them anew.

Needs Python's own library alone. Run it as root or as the user of the server: a store is readable by its owner alone.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from pathlib import Path

PIECE_BYTES = 1 << 20
ZEROS = bytes(PIECE_BYTES)
BUSY_S = 60


def snapshot(database: Path, target: Path) -> bool:
    """Copy a database in one step, so that nothing changes meanwhile; False if a server has it for itself."""
    # "rw" creates no database, but may create the shared memory that reading one needs.
    source = sqlite3.connect(f"{database.absolute().as_uri()}?mode=rw", uri=True, timeout=BUSY_S)
    copy = sqlite3.connect(target)
    try:
        if database.name == "sessions.db":
            source.execute("PRAGMA busy_timeout = 0")
        source.execute("SELECT 1 FROM sqlite_master")
        source.backup(copy)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise
        target.unlink()
        return False
    finally:
        copy.close()
        source.close()
    return True


def copy_sparse(file: Path, target: Path) -> None:
    """Copy a file without writing its zeros, which is most of one that holds few records."""
    with file.open("rb") as source, target.open("wb") as copy:
        while piece := source.read(PIECE_BYTES):
            if piece == ZEROS[: len(piece)]:
                copy.seek(len(piece), os.SEEK_CUR)
            else:
                copy.write(piece)
        copy.truncate()
        copy.flush()
        os.fsync(copy.fileno())


def is_left_out(file: Path) -> bool:
    """Whether a file is a database or part of one, a lock, half made, or made anew by a start."""
    return ".db" in file.name or file.name == "lock" or file.name.startswith((".", "packed-"))


def paths(arguments: list[str]) -> tuple[Path, Path]:
    """Return the store and the directory of its copy; ends with 2 and the reason if they cannot be those."""
    if len(arguments) != 2:
        print("usage: python backup.py STORE COPY", file=sys.stderr)
        sys.exit(2)
    store, copy = (Path(each) for each in arguments)
    problem = ""
    if not any(store.rglob("secret")):  # in folders below it, if it is one of several models
        problem = f"{store} is no store of a server: there is no file `secret` in it"
    elif copy.exists():
        problem = f"{copy} exists: a copy is made in a new directory"
    if problem:
        print(f"nothing was copied: {problem}", file=sys.stderr)
        sys.exit(2)
    return store, copy


def main() -> int:
    """Copy; 3 if all is copied but sessions, which only a stopped server gives."""
    os.umask(0o077)
    store, copy = paths(sys.argv[1:])
    copy.mkdir(parents=True)
    for folder in (store, *(path for path in store.rglob("*") if path.is_dir() and not path.is_symlink())):
        (copy / folder.relative_to(store)).mkdir(exist_ok=True)
    busy = [path for path in sorted(store.rglob("*.db")) if not snapshot(path, copy / path.relative_to(store))]
    for file in sorted(store.rglob("*")):
        if file.is_file() and not file.is_symlink() and not is_left_out(file):
            copy_sparse(file, copy / file.relative_to(store))
    for path in busy:
        print(f"{path} is not in the copy: a server has it open. Stop it, and copy again.", file=sys.stderr)
    return 3 if busy else 0


if __name__ == "__main__":
    sys.exit(main())
