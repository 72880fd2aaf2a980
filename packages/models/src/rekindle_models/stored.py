"""Whether a file of stored responses has one, or a receipt, for a server that passes requests on: changes nothing."""

from __future__ import annotations

import sqlite3
from contextlib import closing

from rekindle.config import StoreSettings
from rekindle.errors import StoreError
from rekindle.server.responses.receipt_rows import RECEIPT
from rekindle.server.responses.records import BUSY_S
from rekindle.server.responses.tables import RESPONSE, ResponseTables
from rekindle.store.files.keys import SECRET_FILE, directory_keys
from rekindle.store.files.sqlite_file import version_of
from rekindle.store.files.sync import OsFileSystem


def holds(store: StoreSettings, namespace: str, id: str) -> bool:
    """Whether a namespace has a response, or a receipt, in a store's file, which another process may have open; False
    without a file.

    StoreError if it cannot be read. What is found may still be refused as damaged by the process that reads it.
    """
    path = store.responses_path()
    if path is None or not path.is_file() or not (path.parent / SECRET_FILE).is_file():
        return False
    found = ResponseTables(directory_keys(path.parent, OsFileSystem(), store.master_key())).response
    query, sought = "SELECT 1 FROM {} WHERE namespace = ? AND id = ?", (found.match(namespace), found.match(id))
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)) as connection:
            _, names = version_of(connection)
            tables = [table.name for table in (RESPONSE, RECEIPT) if table.name in names]  # old files have one
            return any(connection.execute(query.format(name), sought).fetchone() for name in tables)
    except sqlite3.Error as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
