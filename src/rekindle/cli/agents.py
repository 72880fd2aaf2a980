"""agents: show and change what agents remember, over a running server, else in the store of a stopped one."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rekindle.cli import stopped
from rekindle.cli.agent_files import export_agent, import_agent
from rekindle.cli.console import show_ago, show_duration, show_id, show_table
from rekindle.cli.remote import Remote, Unreachable
from rekindle.cli.settings import GroupedCommand, with_settings
from rekindle.cli.why import AgentArgument, JsonOption, UrlOption, ask_of_agent
from rekindle.config import Settings, parse_duration, show_bytes

HEAD = ("AGENT", "TOKENS", "SAVED", "HOT", "WARM", "BRANCHES", "PINNED", "LAST USED")


class _ListByDefault(TyperGroup):
    """`rekindle agents` alone, or with options only, is `rekindle agents list`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the missing command."""
        if not args or (args[0].startswith("-") and args[0] != "--help"):
            args = ["list", *args]
        return super().parse_args(ctx, args)


agents = typer.Typer(cls=_ListByDefault)


@agents.callback()
def group() -> None:
    """See and change what agents remember; without a command: list them."""


@agents.command("list", cls=GroupedCommand)
@with_settings(only=("store", "store_key_file"))
def list_agents(settings: Settings, url: UrlOption = None, as_json: JsonOption = False) -> int:
    """All agents, most recently used first; read from the store if no server runs."""
    remote = Remote.of(settings.server, url)
    try:
        answer, where = remote.ask("GET", "/v1/agents"), remote.url
        found, written = answer["data"], answer.get("written")
    except Unreachable as error:
        if url is not None:
            raise
        found, where = stopped.agents_in(settings.store, error), f"the store {settings.store.directory()} (no server)"
        written = stopped.written_in(settings.store, time.time())
    if as_json:
        typer.echo(json.dumps(found))
    elif found:
        typer.echo(show_table(HEAD, [_row(info, time.time()) for info in found]))
        typer.echo(f"{len(found):,} in {where}{_written(written)}", err=True)
    else:
        typer.echo(f"no agents in {where}", err=True)
    return 0


def _written(written: Mapping[str, Any] | None) -> str:
    if written is None:
        return ""
    most = "" if written["a_day"] is None else f" of {show_bytes(written['a_day'])}"
    turn = "" if written["a_turn"] is None else f", {show_bytes(written['a_turn'])} a turn"
    return f"; {show_bytes(written['today'])}{most} written to disk today{turn}"


def _row(info: Mapping[str, Any], now: float) -> Sequence[str]:
    tokens = (f"{info[f'{name}_tokens']:,}" for name in ("num", "saved", "hot", "warm"))
    return (show_id(info["id"]), *tokens, str(info["branches"]), _pinned(info), show_ago(info["last_use"], now))


def _pinned(info: Mapping[str, Any]) -> str:
    if "pinned" not in info:  # read from the store of a stopped server
        return "?"
    if not info["pinned"]:
        return "-"
    until = info["pinned_until"]
    return "forever" if until is None else time.strftime("until %Y-%m-%d %H:%M", time.localtime(until))


@agents.command(cls=GroupedCommand)
@with_settings(only=("store", "store_key_file"))
def show(settings: Settings, agent: AgentArgument, url: UrlOption = None, as_json: JsonOption = False) -> int:
    """One agent, with its branches if a server runs, else read from the store."""
    remote = Remote.of(settings.server, url)
    try:
        info = ask_of_agent(remote, "GET", agent)
    except Unreachable as error:
        if url is not None:
            raise
        info = stopped.agent_in(settings.store, agent, error)
    if as_json:
        typer.echo(json.dumps(info))
    else:
        typer.echo(
            "\n".join(f"{name.lower():<10} {text}" for name, text in zip(HEAD, _row(info, time.time()), strict=True))
        )
        for branch in info.get("branch_infos", ()):  # only from a server
            typer.echo(_branch(branch))
    return 0


def _branch(branch: Mapping[str, Any]) -> str:
    tokens = ", ".join(f"{branch[f'{name}_tokens']:,} {name}" for name in ("saved", "hot", "warm"))
    others = ", ".join(map(show_id, branch["shared_with"]))
    shared = f", {branch['shared_tokens']:,} shared with {others}" if others else ""
    return f"branch {branch['number']:<3} {branch['num_tokens']:,} tokens: {tokens}{shared}"


@agents.command(cls=GroupedCommand)
@with_settings(only=())
def pin(
    settings: Settings,
    agent: AgentArgument,
    ttl: Annotated[str | None, typer.Option("--ttl", help="how long: 90s, 8h, 30d [forever]")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> int:
    """Keep an agent's memory on disk, whatever else is evicted."""
    ttl_s = None if ttl is None else parse_duration(ttl)
    answer = ask_of_agent(Remote.of(settings.server, url), "POST", agent, "pin", body={"ttl_s": ttl_s})
    return _say(
        answer, as_json, f"{show_id(agent)} is pinned {'forever' if ttl_s is None else f'for {show_duration(ttl_s)}'}"
    )


@agents.command(cls=GroupedCommand)
@with_settings(only=())
def unpin(settings: Settings, agent: AgentArgument, url: UrlOption = None, as_json: JsonOption = False) -> int:
    """Let an agent's memory be evicted again when room is needed."""
    answer = ask_of_agent(Remote.of(settings.server, url), "DELETE", agent, "pin")
    return _say(answer, as_json, f"{show_id(agent)} is not pinned")


@agents.command(cls=GroupedCommand)
@with_settings(only=())
def offload(settings: Settings, agent: AgentArgument, url: UrlOption = None, as_json: JsonOption = False) -> int:
    """Move an agent from memory to disk now."""
    answer = ask_of_agent(Remote.of(settings.server, url), "POST", agent, "offload")
    num_saved, num_tokens = answer["saved_tokens"], answer["num_tokens"]
    text = f"{answer['evicted_blocks']:,} blocks offloaded; {num_saved:,} of {num_tokens:,} tokens are on disk"
    return _say(answer, as_json, f"{show_id(agent)}: {text}")


@agents.command(cls=GroupedCommand)
@with_settings(only=())
def fork(
    settings: Settings,
    agent: AgentArgument,
    target: Annotated[str, typer.Argument(metavar="NEW", help="id of the new agent")],
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> int:
    """Give a new agent everything this one remembers, without copying KV."""
    answer = ask_of_agent(Remote.of(settings.server, url), "POST", agent, "fork", body={"target": target})
    return _say(answer, as_json, f"{show_id(target)} remembers what {show_id(agent)} does")


@agents.command(cls=GroupedCommand)
@with_settings(only=())
def rewind(
    settings: Settings,
    agent: AgentArgument,
    turns: Annotated[int, typer.Option("--turns", min=1, help="how many to take back")] = 1,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> int:
    """Take back an agent's last turns."""
    answer = ask_of_agent(Remote.of(settings.server, url), "POST", agent, "rewind", body={"turns": turns})
    return _say(
        answer, as_json, f"{show_id(agent)} is back where it was {turns:,} {'turn' if turns == 1 else 'turns'} ago"
    )


@agents.command(cls=GroupedCommand)
@with_settings(only=())
def delete(settings: Settings, agent: AgentArgument, url: UrlOption = None, as_json: JsonOption = False) -> int:
    """Forget an agent on every tier; `purge` also proves that its bytes are gone."""
    answer = ask_of_agent(Remote.of(settings.server, url), "DELETE", agent)
    return _say(answer, as_json, f"{show_id(agent)} is forgotten")


@agents.command(cls=GroupedCommand)
@with_settings(only=("store", "store_key_file"))
def purge(
    settings: Settings,
    agent: AgentArgument,
    namespace: Annotated[str, typer.Option("--namespace", help="whose agent, if no server runs")] = "default",
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> int:
    """Forget an agent, overwrite its bytes, read them back as zeros; in the store itself if no server runs."""
    remote = Remote.of(settings.server, url)
    try:
        answer = ask_of_agent(remote, "POST", agent, "purge")
    except Unreachable as error:
        if url is not None:
            raise
        answer = stopped.purge_in(settings.store, namespace, agent, error)
    return _say(answer, as_json, _proof(agent, answer))


def _proof(agent: str, answer: Mapping[str, Any]) -> str:
    num_bytes = show_bytes(answer["bytes_zeroed"])
    lines = [f"{show_id(agent)} is purged: {answer['slots_freed']:,} slots on disk ({num_bytes}) read back as zeros"]
    if answer["hot_blocks_zeroed"]:
        lines.append(f"{answer['hot_blocks_zeroed']:,} blocks in memory were overwritten")
    if answer["blocks_shared"]:
        lines.append(f"{answer['blocks_shared']:,} blocks stay: other agents share them")
    if answer.get("sessions"):
        lines.append(f"its messages stay in {len(answer['sessions']):,} sessions that it takes part in")
    return "; ".join(lines)


for name, command in (("export", export_agent), ("import", import_agent)):
    agents.command(name, cls=GroupedCommand)(command)


def _say(answer: Any, as_json: bool, text: str) -> int:
    typer.echo(json.dumps(answer) if as_json else text)
    return 0
