"""The file of API keys that a running server reads again when it changes: hashes of keys, and the limits of namespaces.

    [keys.k3f9a1c20]
    namespace = "ada"
    sha256 = "9b74c9897bac770ffc029102a200c5de..."
    created = 2026-11-30T08:00:00Z
    admin = true                          # all namespaces: figures, `?namespace=`
    revoked = 2026-12-01T08:00:00Z        # opens nothing any more

    [namespaces.ada]
    requests_per_minute = 60

Owns its form, the form of a key, and changes that leave everything else in the file as it was written. A key has 256
random bits: nobody finds it from its hash by trying, so a slow hash would protect nothing, and cost every request 50
ms. Hashes are compared elsewhere (`server/gate/keys`). Knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rekindle.config.access import check_namespace
from rekindle.config.setting import MOST, need, shortened
from rekindle.errors import ConfigError, NotFound
from rekindle.keywords import did_you_mean

PREFIX = "rekindle_"  # by which tools that look for leaked secrets recognise a key
MOST_KEYS = 4096  # each request is compared with all of them: 0.4 ms
MOST_BYTES = 4 << 20
_HASH = re.compile(r"[0-9a-f]{64}")
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class NamespaceLimits:
    """What a namespace may ask for; None: what the settings say for all."""

    requests_per_minute: int | None = None
    computed_tokens_per_day: int | None = None
    generated_tokens_per_day: int | None = None


@dataclass(frozen=True, slots=True)
class HashedKey:
    """One key of the file: `digest` is the SHA-256 [32] of the key; `created` None: not said."""

    id: str
    namespace: str
    digest: bytes
    is_admin: bool = False
    created: datetime | None = None
    revoked: datetime | None = None


@dataclass(frozen=True, slots=True)
class KeyFile:
    """What a file of keys says."""

    keys: tuple[HashedKey, ...] = ()
    limits: Mapping[str, NamespaceLimits] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> KeyFile:
        """Read a file; ConfigError, which says where it is wrong and quotes no hash."""
        return cls.parse(read_text(path), path)

    @classmethod
    def parse(cls, text: str, path: Path) -> KeyFile:
        """Parse the text of the file at `path`; ConfigError as above."""
        try:
            content = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"key file {path}: {error}") from error
        try:
            return cls._of(content)
        except ConfigError as error:
            raise ConfigError(f"key file {path}: {error}") from error

    @classmethod
    def _of(cls, content: Mapping[str, Any]) -> KeyFile:
        _check_names(content, ("keys", "namespaces"), "")
        keys = [_key(name, table) for name, table in _tables(content, "keys").items()]
        need(len(keys) <= MOST_KEYS, f"{len(keys)} keys, at most {MOST_KEYS} are read: remove some that are revoked")
        digests: dict[bytes, str] = {}
        for key in keys:
            need(key.digest not in digests, f"keys.{digests.get(key.digest)} and keys.{key.id} are the same key")
            digests[key.digest] = key.id
        limits = {name: _limits(name, table) for name, table in _tables(content, "namespaces").items()}
        return cls(tuple(keys), limits)

    def namespaces(self) -> tuple[str, ...]:
        """Every namespace that a key opens or opened, or that has limits, in the file's order."""
        return tuple(dict.fromkeys([*(key.namespace for key in self.keys), *self.limits]))


def read_text(path: Path) -> str:
    """Return the text of a file of keys; ConfigError if it cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        need(len(content) <= MOST_BYTES, f"key file {path}: larger than {MOST_BYTES >> 20} MiB")
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"key file {path}: {reason}") from error


def digest_of(key: str) -> bytes:
    """Return the SHA-256 [32] by which a key is known."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def add_key(path: Path, namespace: str, *, is_admin: bool, now: datetime) -> tuple[str, str]:
    """Make a key of a namespace, append its hash to the file, which is made if it is missing, and return id and key.

    ConfigError, with nothing changed, if the file or the name is wrong.
    """
    check_namespace(namespace, "namespace")
    path = path.resolve()  # a link stays one
    text = read_text(path) if path.exists() else ""
    before = KeyFile.parse(text, path)
    key, name = PREFIX + secrets.token_urlsafe(32), f"k{secrets.token_hex(4)}"
    lines = [f"[keys.{name}]", f'namespace = "{namespace}"', f'sha256 = "{digest_of(key).hex()}"']
    lines += [f"created = {_written(now)}", *(["admin = true"] if is_admin else [])]
    gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
    changed = text + gap + "\n".join(lines) + "\n"
    added = HashedKey(name, namespace, digest_of(key), is_admin, created=now.replace(microsecond=0))
    need(KeyFile.parse(changed, path).keys == (*before.keys, added), f"key file {path}: a key cannot be appended to it")
    _replace(path, changed)
    return name, key


def revoke_key(path: Path, id: str, *, now: datetime) -> HashedKey:
    """Mark a key of the file as revoked and return it as it was.

    NotFound if there is none with this id that opens anything; ConfigError, with nothing changed, if the file is wrong
    or not written in the form above.
    """
    path = path.resolve()
    text = read_text(path)
    before = KeyFile.parse(text, path)
    found = next((key for key in before.keys if key.id == id), None)
    if found is None or found.revoked is not None:
        why = "it is revoked already" if found else f"there is none{did_you_mean(id, [key.id for key in before.keys])}"
        raise NotFound(f"key {shortened(id)} of {path}: {why}")
    heading = re.compile(rf"^[ \t]*\[[ \t]*keys[ \t]*\.[ \t]*{re.escape(id)}[ \t]*\][^\n]*\n", re.MULTILINE)
    changed = heading.sub(lambda line: f"{line.group()}revoked = {_written(now)}\n", text)
    try:
        keys = KeyFile.parse(changed, path).keys
    except ConfigError:
        keys = ()
    if [key for key in keys if key.revoked is None] != [
        key for key in before.keys if key.revoked is None and key != found
    ]:
        raise ConfigError(f"key file {path}: no line [keys.{id}] to add `revoked` under: remove the key by hand")
    _replace(path, changed)
    return found


def _written(now: datetime) -> str:
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _replace(path: Path, text: str) -> None:
    """Write the file aside and rename it, with the rights and the owner it had; a new one is its owner's alone."""
    aside = path.with_name(f"{path.name}.new")
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(f"another command changes {path}; if none does, remove {aside}") from None
    except OSError as error:
        raise ConfigError(f"key file {path}: {error.strerror or error}") from error
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
            if path.exists():
                before = path.stat()
                os.chmod(aside, before.st_mode & 0o777)
                if (before.st_uid, before.st_gid) != (os.fstat(descriptor).st_uid, os.fstat(descriptor).st_gid):
                    os.chown(aside, before.st_uid, before.st_gid)
        os.replace(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise ConfigError(f"key file {path}: {error.strerror or error}; nothing was changed") from error


def _tables(content: Mapping[str, Any], name: str) -> Mapping[str, Mapping[str, Any]]:
    found: Any = content.get(name, {})
    need(
        isinstance(found, dict) and all(isinstance(table, dict) for table in found.values()),
        f"{name} must be tables: [{name}.NAME]",
    )
    tables: Mapping[str, Mapping[str, Any]] = found
    return tables


def _check_names(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in table:
        need(name in known, f"{where}unknown name {shortened(name)}{did_you_mean(name, known)}")


def _key(id: str, table: Mapping[str, Any]) -> HashedKey:
    need(_ID.fullmatch(id) is not None, f"keys: {shortened(id)} is no id: 1 to 64 letters, digits, '_', '-'")
    where = f"keys.{id}: "
    _check_names(table, ("namespace", "sha256", "admin", "created", "revoked"), where)
    namespace, digest, is_admin = table.get("namespace"), table.get("sha256"), table.get("admin", False)
    need(isinstance(namespace, str), f"{where}namespace: must be a text")
    check_namespace(str(namespace), f"{where}namespace")
    need(
        isinstance(digest, str) and _HASH.fullmatch(digest) is not None,
        f"{where}sha256: must have 64 digits from 0-9a-f: printf %s KEY | sha256sum",
    )
    need(isinstance(is_admin, bool), f"{where}admin: must be true or false")
    times = [table.get(name) for name in ("created", "revoked")]
    for name, time in zip(("created", "revoked"), times, strict=True):
        need(time is None or isinstance(time, datetime), f"{where}{name}: must be a date with a time")
    return HashedKey(id, str(namespace), bytes.fromhex(str(digest)), is_admin, *times)


def _limits(name: str, table: Mapping[str, Any]) -> NamespaceLimits:
    check_namespace(name, "namespaces")
    where = f"namespaces.{name}: "
    _check_names(table, tuple(item.name for item in fields(NamespaceLimits)), where)
    for limit, value in table.items():
        is_count = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST
        need(is_count, f"{where}{limit}: must be a whole number of at least 1, not {shortened(value)}")
    return NamespaceLimits(**table)
