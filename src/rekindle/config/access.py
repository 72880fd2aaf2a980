"""Who has access: API keys and the namespaces they open, the store's secret and key, names of hosts.

Keys are a table `[api_keys]` of the TOML file (`team = "key"`), or `team=key,other=key` in the environment: never a
flag, which every user of the machine could read.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rekindle.config.setting import need
from rekindle.errors import ConfigError

DEFAULT_NAMESPACE = "default"
LEAST_SECRET = 16  # characters: hashes leave the process, so one that can be guessed offline protects nothing
_HEX_KEY = re.compile(r"[0-9a-fA-F]{64}")
_MOST_KEY_BYTES = 1024  # of a file that holds one
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def parse_api_keys(value: Any) -> dict[str, str]:
    """Return namespace -> key, from a table or from `name=key,name=key`; a ConfigError quotes no key."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, str):
        pairs = [_pair(text) for text in value.split(",") if text.strip()]
    else:
        raise ConfigError('must be a table of names and keys: [api_keys] team = "key"')
    keys = dict(pairs)
    if len(keys) < len(pairs):
        raise ConfigError("a name is given twice")
    if not all(isinstance(key, str) for key in keys.values()):
        raise ConfigError("every key must be a string")
    return keys


def _pair(text: str) -> tuple[str, str]:
    name, equals, key = text.partition("=")
    if not equals:
        raise ConfigError("must be name=key,name=key")
    return name.strip(), key.strip()


def check_secret(secret: str) -> None:
    """Raise ConfigError, which does not quote it, if a secret is too short or is easily given in two ways."""
    need(len(secret) >= LEAST_SECRET, f"secret: must have at least {LEAST_SECRET} characters; `openssl rand -hex 32`")
    need(secret == secret.strip(), "secret: begins or ends with a blank or a line's end; remove it")
    need(secret.isprintable(), "secret: has characters that cannot be printed; write it in others")


def check_namespace(name: str, where: str) -> None:
    """Raise ConfigError, which begins with `where`, if a namespace may not have this name."""
    need(_NAME.fullmatch(name) is not None, f"{where}: {name!r} is no name: 1 to 64 letters, digits, '.', '_', '-'")


def master_key(key: str | None, file: Path | None) -> bytes | None:
    """Return the key [32] of an encrypted store, from a text or from a file that holds one; None if neither is given.

    ConfigError, which quotes no key, if both are given, the file cannot be read, or it is no key.
    """
    need(key is None or file is None, "store_key and store_key_file are both given: keep one of them")
    if file is not None:
        try:
            with file.expanduser().open("rb") as opened:
                content = opened.read(_MOST_KEY_BYTES).strip()
        except OSError as error:
            raise ConfigError(f"store_key_file: {file} cannot be read: {error.strerror or error}") from error
        return _key(content.decode("ascii", "replace"), f"store_key_file: {file} holds")
    return None if key is None else _key(key, "store_key: it is")


def _key(text: str, what: str) -> bytes:
    need(_HEX_KEY.fullmatch(text) is not None, f"{what} no key, which is 64 hexadecimal digits: `openssl rand -hex 32`")
    return bytes.fromhex(text)


def check_keys(api_key: str | None, api_keys: Mapping[str, str], admin_key: str | None) -> None:
    """Refuse invalid names, keys that no header can carry, and one key for two purposes."""
    for name in api_keys:
        check_namespace(name, "api_keys")
    if api_key is not None and DEFAULT_NAMESPACE in api_keys:
        raise ConfigError(f"api_key is the key of {DEFAULT_NAMESPACE!r}, and api_keys names another: keep one of them")
    named = {f"api_keys: {name}": key for name, key in api_keys.items()}
    named |= {name: key for name, key in (("api_key", api_key), ("admin_key", admin_key)) if key is not None}
    owners: dict[str, str] = {}
    for name, key in named.items():
        if not key:
            raise ConfigError(f"{name} is empty")
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ConfigError(f"{name}: a key has only visible ASCII characters, no blanks")
        if key in owners:
            raise ConfigError(f"{owners[key]} and {name} are the same key: each needs its own")
        owners[key] = name


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_host(text: str) -> bool:
    """Whether `text` is a valid Host header: a name or address, with or without a port; IPv6 in brackets."""
    try:
        parts = urlsplit(f"//{text}")
        has_port = parts.port is not None
    except ValueError:
        return False
    name = parts.hostname or ""
    whole = (f"[{name}]" if ":" in name else name) + (f":{parts.port}" if has_port else "")
    is_name = re.fullmatch(r"[a-z0-9_]([a-z0-9._-]*[a-z0-9_])?", name) is not None
    return (is_name or ":" in name) and whole == text.lower()
