"""A process that is killed right before it runs a statement of SQLite, as by `kill -9`."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forks import forking


def killed_in(work: Callable[..., None], *given: Any) -> None:
    """Run `work` in a process of its own, which calls `die_before` and is killed."""
    process = forking().Process(target=work, args=given)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL, process.exitcode


def die_before(connection: sqlite3.Connection, statement: str) -> None:
    """Kill this process before the connection runs a statement that begins with this."""

    def look(said: str) -> None:
        if said.strip().startswith(statement):
            os.kill(os.getpid(), signal.SIGKILL)

    connection.set_trace_callback(look)


def files_with(directory: Path, text: bytes) -> list[str]:
    """Files below a directory in which these bytes are."""
    return sorted(path.name for path in directory.rglob("*") if path.is_file() and text in path.read_bytes())
