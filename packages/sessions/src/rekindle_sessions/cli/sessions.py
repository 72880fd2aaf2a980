"""sessions: list them, write one to a file, and continue one on another machine, over a running server."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, cast
from urllib.parse import quote

import typer

from rekindle.cli.agent_files import (
    READABLE,
    TIMEOUT_S,
    FileArgument,
    NewFileArgument,
    PassphraseOption,
    check_new_file,
    opened_file,
    passphrase_in,
    write_file,
)
from rekindle.cli.console import show_ago, show_id, show_table
from rekindle.cli.remote import Remote, agent_path
from rekindle.cli.settings import GroupedCommand, with_settings
from rekindle.cli.why import JsonOption, UrlOption
from rekindle.config import Settings, show_bytes
from rekindle.errors import ConfigError, NotFound, RekindleError

if TYPE_CHECKING:
    from rekindle_sessions.cli.session_file import Contents, Member

PATH = "/v1/coordination/sessions"
HEAD = ("SESSION", "TITLE", "AGENTS", "MESSAGES", "LAST USED")
sessions = typer.Typer(no_args_is_help=True)


@sessions.callback()
def group() -> None:
    """See conversations of several agents, and take one to another machine."""


@sessions.command("list", cls=GroupedCommand)
@with_settings(only=())
def list_sessions(settings: Settings, url: UrlOption = None, as_json: JsonOption = False) -> int:
    """All sessions, newest first."""
    found = Remote.of(settings.server, url).ask("GET", PATH)["data"]
    if as_json:
        typer.echo(json.dumps(found))
    elif found:
        rows = [(show_id(each["id"]), show_id(each["title"]), *_counts(each)) for each in found]
        typer.echo(show_table(HEAD, rows))
    else:
        typer.echo("there are no sessions", err=True)
    return 0


def _counts(each: dict[str, Any]) -> tuple[str, str, str]:
    return str(len(each["names"])), f"{each['num_messages']:,}", show_ago(each["last_use"], time.time())


@sessions.command("export", cls=GroupedCommand)
@with_settings(only=())
def export_session(
    settings: Settings,
    session: Annotated[str, typer.Argument(metavar="SESSION", help="id of the session")],
    file: NewFileArgument,
    passphrase_file: PassphraseOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> int:
    """Write a session to a file: what was said, and the memory of each of its agents."""
    from rekindle_sessions.cli.session_file import Contents, write

    passphrase = passphrase_in(passphrase_file)
    check_new_file(file)
    remote, path = Remote.of(settings.server, url, timeout_s=TIMEOUT_S), f"{PATH}/{quote(session, safe='')}"
    detail, document = remote.ask("GET", path), remote.ask("GET", f"{path}/export")
    with ExitStack() as opened:
        folder = file.absolute().parent
        found, sources = [], []
        for each in detail["agents"]:
            source = _fetched(remote, each["agent"], folder, opened)
            if source is not None:
                found.append(each["agent"])
                sources.append(source)
        aside = opened.enter_context(_aside(folder))
        write(aside, Contents(session, document, tuple(found)), sources)
        aside.seek(0)
        num_bytes = write_file(file, _pieces(aside), passphrase)
    is_open = "" if passphrase else READABLE
    counts = f"{len(found)} of its {len(detail['agents'])} agents have a memory"
    answer = {"id": session, "file": str(file), "bytes": num_bytes, "agents": len(found), "encrypted": bool(passphrase)}
    text = f"{show_id(session)} is in {file}: {show_bytes(num_bytes)}, {counts}{is_open}"
    typer.echo(json.dumps(answer) if as_json else text)
    return 0


def _fetched(remote: Remote, agent: str, folder: Path, opened: ExitStack) -> BinaryIO | None:
    """Return an agent's file, put aside; None if it has no memory yet."""
    aside = opened.enter_context(_aside(folder))
    try:
        with remote.download(agent_path(agent, "export")) as pieces:
            aside.writelines(pieces)
    except NotFound:
        return None
    except OSError as error:
        raise ConfigError(f"there is no room in {folder}: {error}") from error
    return aside


def _aside(folder: Path) -> BinaryIO:
    try:
        return cast("BinaryIO", tempfile.TemporaryFile(dir=folder))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to: {error}") from error


def _pieces(source: BinaryIO | Member) -> Iterator[bytes]:
    from rekindle_sessions.cli.session_file import PIECE

    return iter(partial(source.read, PIECE), b"")


@sessions.command("import", cls=GroupedCommand)
@with_settings(only=())
def import_session(
    settings: Settings,
    file: FileArgument,
    new: Annotated[str | None, typer.Option("--as", metavar="SESSION", help="id of the session here [made]")] = None,
    texts_only: Annotated[bool, typer.Option("--texts-only", help="leave all KV out: it is computed here")] = False,
    passphrase_file: PassphraseOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> int:
    """Continue a session from a file, its agents as warm as the server's model allows."""
    from rekindle_sessions.cli.session_file import check_kind, verified

    passphrase = passphrase_in(passphrase_file)
    with opened_file(file, passphrase) as source:
        check_kind(source)
    with opened_file(file, passphrase) as source:
        contents = verified(source)
    session = f"sess_{uuid.uuid4().hex}" if new is None else new
    remote = Remote.of(settings.server, url, timeout_s=TIMEOUT_S)
    with contextlib.suppress(NotFound):
        remote.ask("GET", f"{PATH}/{quote(session, safe='')}")
        raise ConfigError(f"there is a session {session!r} already: choose another id")
    with opened_file(file, passphrase) as source:
        coming = _Import(remote, contents, session, texts_only=texts_only)
        coming.run(source)
    answer = {"id": session, "agents": coming.imported, "kept": coming.kept}
    typer.echo(json.dumps(answer) if as_json else "\n".join(coming.lines()))
    return 0


class _Import:
    """One import under way: the agents first, as a session would begin to compute what they lack."""

    def __init__(self, remote: Remote, contents: Contents, session: str, *, texts_only: bool) -> None:
        self._remote, self._contents, self._session = remote, contents, session
        self._query = "?kv=off" if texts_only else ""
        self.imported: list[dict[str, Any]] = []
        self.kept: list[str] = []  # permanent agents that have a memory here, which is left alone

    def run(self, source: BinaryIO) -> None:
        """Import all; if the server refuses a part, delete what was imported."""
        from rekindle_sessions.cli.session_file import members

        try:
            agents = iter(self._contents.agents)
            for member in members(source):
                if member.name.endswith(".agent"):
                    self._agent(next(agents), member)
            body = {"id": self._session, "session": self._contents.session}
            self._remote.ask("POST", f"{PATH}/import", body)
        except RekindleError:
            for answer in self.imported:
                with contextlib.suppress(NotFound):
                    self._remote.ask("DELETE", agent_path(answer["id"]))
            raise

    def _agent(self, exported: str, member: Member) -> None:
        agent = self._contents.agent_in(self._session, exported)
        if self._contents.outlives(exported) and self._is_here(agent):
            self.kept.append(agent)
            return
        path = agent_path(agent, "import") + self._query
        self.imported.append(self._remote.ask("POST", path, _pieces(member)))

    def _is_here(self, agent: str) -> bool:
        try:
            self._remote.ask("GET", agent_path(agent))
        except NotFound:
            return False
        return True

    def lines(self) -> Iterator[str]:
        """What became of the session and of its agents."""
        yield f"session {show_id(self._session)} goes on here, with {len(self.imported)} agents of the file"
        for each in self.imported:
            why = "" if each["without_kv"] is None else f": {each['without_kv']}"
            yield f"  {show_id(each['id'])}: {each['num_tokens']:,} tokens, {each['kv_tokens']:,} with their KV{why}"
        for agent in self.kept:
            yield f"  {show_id(agent)} has a memory here already, which stays as it is"
