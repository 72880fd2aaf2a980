"""Whether a file of stored responses has one, or a receipt, for a server that passes requests on: changes nothing."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from rekindle.errors import StoreError
from rekindle.server.responses.receipt_rows import RECEIPT
from rekindle.server.responses.records import BUSY_S
from rekindle.server.responses.tables import RESPONSE
from rekindle.store.files.sqlite_file import version_of


def holds(path: Path, namespace: str, id: str) -> bool:
    """Whether a namespace has a response, or a receipt, in the file, which another process may have open; False without
    a file.

    StoreError if it cannot be read. What is found may still be refused as damaged by the process that reads it.
    """
    if not path.is_file():
        return False
    query = "SELECT 1 FROM {} WHERE namespace = ? AND id = ?"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)) as connection:
            _, names = version_of(connection)
            tables = [table.name for table in (RESPONSE, RECEIPT) if table.name in names]  # old files have one
            return any(connection.execute(query.format(name), (namespace, id)).fetchone() for name in tables)
    except sqlite3.Error as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
