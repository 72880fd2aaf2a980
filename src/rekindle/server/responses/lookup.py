"""Whether a file of stored responses has one, for a server that passes requests on: reads, and changes nothing."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from rekindle.errors import StoreError
from rekindle.server.responses.records import BUSY_S
from rekindle.server.responses.tables import RESPONSE


def holds(path: Path, namespace: str, id: str) -> bool:
    """Whether a namespace has a response in the file, which another process may have open; False without a file.

    StoreError if it cannot be read. What is found may still be refused as damaged by the process that reads it.
    """
    if not path.is_file():
        return False
    query = f"SELECT 1 FROM {RESPONSE.name} WHERE namespace = ? AND id = ?"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)) as connection:
            return connection.execute(query, (namespace, id)).fetchone() is not None
    except sqlite3.Error as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
