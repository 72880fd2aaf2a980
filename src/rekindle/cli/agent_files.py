"""agents export and import: one agent to a file and from one, over a running server.

Owns how such files are written and opened. Encryption, where a passphrase is given, is done here: the server never gets
it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, BinaryIO, cast

import typer

from rekindle.cli.console import show_id
from rekindle.cli.remote import Remote, agent_path
from rekindle.cli.settings import with_settings
from rekindle.cli.why import AgentArgument, JsonOption, UrlOption
from rekindle.config import Settings, show_bytes
from rekindle.errors import BadRequest, ConfigError

TIMEOUT_S = 3600.0  # the disk of a server may write gigabytes before it answers
PIECE = 1 << 16  # a server bounds the chunks of a body by the size of other bodies
READABLE = ", not encrypted: who has the file can read it"
NewFileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="the file to write; there must be none yet")]
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="the file to read")]
PassphraseOption = Annotated[
    Path | None, typer.Option("--passphrase-file", help="encrypt or open it with the passphrase or key in this file")
]


@with_settings(only=())
def export_agent(
    settings: Settings,
    agent: AgentArgument,
    file: NewFileArgument,
    passphrase_file: PassphraseOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> int:
    """Write an agent to a file: its texts and their KV, to be imported on another machine."""
    passphrase = passphrase_in(passphrase_file)
    check_new_file(file)
    with Remote.of(settings.server, url, timeout_s=TIMEOUT_S).download(agent_path(agent, "export")) as pieces:
        num_bytes = write_file(file, pieces, passphrase)
    is_open = "" if passphrase else READABLE
    answer = {"id": agent, "file": str(file), "bytes": num_bytes, "encrypted": passphrase is not None}
    typer.echo(json.dumps(answer) if as_json else f"{show_id(agent)} is in {file}: {show_bytes(num_bytes)}{is_open}")
    return 0


@with_settings(only=())
def import_agent(
    settings: Settings,
    file: FileArgument,
    new: Annotated[
        str | None, typer.Option("--as", metavar="AGENT", help="id of the new agent [that of the file]")
    ] = None,
    texts_only: Annotated[
        bool, typer.Option("--texts-only", help="leave its KV out: all of it is computed here")
    ] = False,
    passphrase_file: PassphraseOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> int:
    """Make a new agent from a file, warm if the server's model is the one that computed it."""
    from rekindle.store.agent_file import AgentFileReader

    open_file = partial(opened_file, file, passphrase_in(passphrase_file))
    if new is None:
        with open_file() as source:
            new = AgentFileReader(source).head.agent
    path = agent_path(new, "import") + ("?kv=off" if texts_only else "")
    with open_file() as source:
        pieces = iter(partial(source.read, PIECE), b"")
        answer = Remote.of(settings.server, url, timeout_s=TIMEOUT_S).ask("POST", path, pieces)
    num, kv = answer["num_tokens"], answer["kv_tokens"]
    warm = "all" if kv == num else f"{kv:,}"
    why = "" if answer["without_kv"] is None else f": {answer['without_kv']}"
    rest = "" if kv == num else "; its next turn computes the rest"
    text = f"{show_id(new)} is imported: {num:,} tokens, {warm} of them with their KV{why}{rest}"
    typer.echo(json.dumps(answer) if as_json else text)
    return 0


def passphrase_in(path: Path | None) -> bytes | None:
    """Return the passphrase in a file, None if none is named; ConfigError if it cannot be read, or is empty."""
    if path is None:
        return None
    try:
        found = path.read_bytes().removesuffix(b"\n")
    except OSError as error:
        raise ConfigError(f"the passphrase cannot be read: {error}") from error
    if not found:
        raise ConfigError(f"{path} is empty: write the passphrase in it")
    return found


def check_new_file(file: Path) -> None:
    """Raise ConfigError if there is a file of this name."""
    if file.exists():
        raise ConfigError(f"{file} is there already: remove it, or name another file")


def write_file(file: Path, pieces: Iterator[bytes], passphrase: bytes | None) -> int:
    """Write a file whole or not at all, readable by its owner only; return its size."""
    from rekindle.store.sealed_file import sealed

    try:
        with tempfile.NamedTemporaryFile(dir=file.absolute().parent, prefix=f".{file.name}.", delete=False) as aside:
            try:
                for piece in pieces if passphrase is None else sealed(pieces, passphrase):
                    aside.write(piece)
                aside.flush()
                os.fsync(aside.fileno())
                os.replace(aside.name, file)
            finally:
                Path(aside.name).unlink(missing_ok=True)
        return file.stat().st_size
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error}") from error


@contextmanager
def opened_file(file: Path, passphrase: bytes | None) -> Iterator[BinaryIO]:
    """Open an agent's file, and decrypt what is read; BadRequest if that needs a passphrase."""
    from rekindle.store.sealed_file import Plain, is_sealed

    try:
        with file.open("rb") as source:
            if passphrase is not None:
                yield cast("BinaryIO", Plain(source, passphrase))
            elif is_sealed(source):
                raise BadRequest(f"{file} is encrypted: name the file with its passphrase (--passphrase-file)")
            else:
                yield source
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
