"""Proofs of models that many tests start: each is made once for all tests, and read as at a second start.

What an earlier start proved of a model, and which formats it chose for its KV, are files of a store, named by all that
they depend on: one of another model, format or kernel is not read. They are kept in a folder that all processes of a
run of tests share: its workers, and servers that are forked.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what forks a server needs no torch itself
    from rekindle.engine.api import Engine

FOLDER = "FOLDER_OF_PROOFS"  # the variable, which `share` sets
KINDS = ("proof-*.json", "formats-*.json")


def share() -> None:
    """Make the folder, which goes away with this process, unless the process that started this one made it."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="rekindle-proofs-")
        atexit.register(shutil.rmtree, os.environ[FOLDER], ignore_errors=True)


def proved(engine: Engine) -> Engine:
    """Start an engine whose model need not be proved again if it was for an earlier test."""
    store = engine.settings.store
    if not store.enabled:
        engine.start()
        return engine
    directory = store.directory()
    lend(directory)
    engine.start()
    keep(directory)
    return engine


def lend(store: Path) -> None:
    """Give a store, which need not exist, what is known."""
    store.mkdir(mode=0o700, parents=True, exist_ok=True)
    _copy(Path(os.environ[FOLDER]), store)


def keep(store: Path) -> None:
    """Note what is new in a store, for all tests to come."""
    _copy(store, Path(os.environ[FOLDER]))


def _copy(source: Path, target: Path) -> None:
    """Copy what the target has not; each file is whole from its first moment on.

    Some tests are about disks that are full or may not be written: their models are proved again.
    """
    for path in (path for kind in KINDS for path in source.glob(kind)):
        new = target / f".{path.name}.{os.getpid()}.{threading.get_ident()}"
        try:
            if not (target / path.name).exists():
                new.write_bytes(path.read_bytes())
                new.replace(target / path.name)
        except OSError:
            with contextlib.suppress(OSError):
                new.unlink()
            return
