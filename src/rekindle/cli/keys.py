"""keys: make, list and revoke the keys of a file that a running server reads again when it changes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from rekindle.cli.console import show_table
from rekindle.cli.settings import GroupedCommand, with_settings
from rekindle.cli.why import JsonOption
from rekindle.config import Settings
from rekindle.config.key_file import HashedKey, KeyFile, add_key, revoke_key
from rekindle.errors import ConfigError

HEAD = ("ID", "NAMESPACE", "ADMIN", "CREATED", "REVOKED")

keys = typer.Typer(no_args_is_help=True)


@keys.callback()
def group() -> None:
    """Keys of tenants, of which a file has the hashes; a running server follows the file."""


@keys.command(cls=GroupedCommand)
@with_settings(only=("key_file",))
def new(
    settings: Settings,
    namespace: Annotated[str, typer.Argument(metavar="NAMESPACE", help="what the key opens")],
    admin: Annotated[bool, typer.Option("--admin", help="it opens all namespaces and the operator's figures")] = False,
) -> int:
    """Make a key and print it, once: the file has only its hash."""
    name, key = add_key(_file(settings), namespace, is_admin=admin, now=datetime.now(UTC))
    typer.echo(f"{name} opens {namespace!r}{' and is an admin' if admin else ''}; this is shown once:", err=True)
    typer.echo(key)
    return 0


@keys.command("list", cls=GroupedCommand)
@with_settings(only=("key_file",))
def list_keys(settings: Settings, as_json: JsonOption = False) -> int:
    """All keys of the file, those that were revoked too."""
    found = KeyFile.read(_file(settings)).keys
    if as_json:
        names = [name.lower() for name in HEAD]
        typer.echo(json.dumps([dict(zip(names, _row(key), strict=True)) for key in found]))
    else:
        typer.echo(show_table(HEAD, [_row(key) for key in found]) if found else "no keys")
    return 0


@keys.command(cls=GroupedCommand)
@with_settings(only=("key_file",))
def revoke(
    settings: Settings, key_id: Annotated[str, typer.Argument(metavar="ID", help="as `keys list` has it")]
) -> int:
    """Refuse a key from the next request on; requests that run end as they would have."""
    revoked = revoke_key(_file(settings), key_id, now=datetime.now(UTC))
    typer.echo(f"{revoked.id} opens {revoked.namespace!r} no longer")
    return 0


def _file(settings: Settings) -> Path:
    path = settings.server.key_file
    if path is None:
        raise ConfigError("key_file is not set: name the file (REKINDLE_KEY_FILE)")
    return path


def _row(key: HashedKey) -> tuple[str, ...]:
    times = ("-" if time is None else time.strftime("%Y-%m-%d %H:%M") for time in (key.created, key.revoked))
    return (key.id, key.namespace, "yes" if key.is_admin else "no", *times)
