"""What a server that passes requests on reads of its models' stores.

Owns whether a file of stored responses has one, or a receipt, and the key by which an answer's request is compared with
one to another model. Changes nothing, but makes the keys of a store that has none.
"""

from __future__ import annotations

import logging
import secrets
import sqlite3
from collections.abc import Sequence
from contextlib import closing

from rekindle.config import StoreSettings
from rekindle.errors import ConfigError, StoreError
from rekindle.server.responses.receipt_rows import RECEIPT
from rekindle.server.responses.records import BUSY_S
from rekindle.server.responses.tables import RESPONSE, ResponseTables
from rekindle.store.files.ciphers import derived_key
from rekindle.store.files.keys import SECRET_BYTES, SECRET_FILE, Given, directory_keys, given_keys
from rekindle.store.files.sqlite_file import version_of
from rekindle.store.files.sync import OsFileSystem

logger = logging.getLogger("rekindle.server")


def answers_key(stores: Sequence[StoreSettings]) -> str | None:
    """Return the key of the ids of all models' answers, in hex: it lasts as long as the first store, or without one as
    long as this server. None, with a warning, if that store cannot be used."""
    store = next((each for each in stores if each.enabled), stores[0])
    try:
        given = Given.of(store)
        own = given_keys(store.directory(), given, OsFileSystem()).secret if store.enabled else given.new_secret
    except (ConfigError, StoreError) as error:
        logger.warning("requests are compared with those to the same model alone: %s", error)
        return None
    return derived_key(own or secrets.token_bytes(SECRET_BYTES), b"rekindle.answers").hex()


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
