"""How settings become flags.

Owns one table of flags (the same names as REKINDLE_* variables and keys of the TOML file) and which of them a command
cannot honour and refuses; variables and files are written for all commands: there they are passed over.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from rekindle.cli.border import code_of
from rekindle.config import Settings
from rekindle.errors import ConfigError

FLAG_GROUPS = {
    "Model": {
        "revision": "branch, tag or commit of a hub model",
        "device": "cpu or cuda [cpu]",
        "dtype": "auto, bf16 or fp32 [auto: what the checkpoint has]",
        "kv": "auto, q4h, bf16 or fp32 [auto: 4 bits where it is safe]",
        "threads": "threads of the model [all cores]",
        "max_context": "longest prompt with its answer, in tokens [the model's]",
    },
    "Memory": {
        "hot_bytes": "memory for hot KV, as 512MB or 4GiB [by the memory at hand]",
        "block_tokens": "tokens in a block: 16, 32, 64, 128 or 256 [64]",
        "reuse": "on or off [on]",
        "min_reuse_tokens": "fewer tokens than these are not worth reusing [16]",
        "min_reuse_ratio": "nor is a smaller share of the prompt, 0 to 1 [0]",
        "max_branches": "conversations kept of one agent [8]",
        "eviction": "who leaves hot memory first: lru, fifo, lfu, aged-lfu or adaptive [lru]",
        "text_index_bytes": "memory for finding prompts by their text [256MiB]",
    },
    "Prompts": {
        "normalise": "take out what clients change on every call: attribution, dates, tools, or off [attribution]",
        "anticipate": "compute in idle time what the template renders next, on or off [on]",
    },
    "Store": {
        "store": "directory of the warm tier, or off [the user's cache directory]",
        "disk_bytes": "disk for warm KV [by the free space]",
        "agent_ttl_s": "forget agents unused for so many seconds [never]",
        "anonymous_ttl_s": "the same for conversations without a name [3600]",
        "stale_ttl_s": "the same for other models' stores in this directory [30 days]",
        "namespace_share": "of disk and hot memory; a tenant with more gives way before others [1]",
        "session_bytes": "of disk_bytes, for coordination sessions; each tenant has an equal part [an eighth]",
        "response_bytes": "of disk_bytes, for kept responses; each tenant has an equal part [an eighth]",
        "staging_bytes": "memory for blocks on their way to the disk [64MiB]",
        "readers": "threads that read the store [2]",
    },
    "Scheduling": {
        "max_stall_s": "longest pause of a running stream for another's prompt, in seconds [0.25]",
        "max_step_s": "longest step when nobody else waits, in seconds [1]",
        "max_running": "requests computed together [32]",
        "max_waiting": "requests that may wait; more are refused with 503 [1024]",
        "max_chunk_tokens": "prompt tokens in one step [by time alone]",
        "request_timeout_s": "stop a request that is not done by then, in seconds [never]",
    },
    "Server": {
        "host": "address to listen on; off loopback a key (REKINDLE_API_KEY) or --open is required [127.0.0.1]",
        "port": "port to listen on; 0 takes any free one [7354]",
        "public_host": "name that a proxy in front is reached by, for Host and Origin; may be given again [none]",
        "served_model_name": "name in /v1/models and in answers [the model's]",
        "requests_per_minute": "of each key; more are refused with 429 [no limit]",
        "max_body_bytes": "largest request body [32MiB]",
        "max_connections": "open at a time; never more than the limit of open files allows [1024]",
        "max_connections_per_address": "of them, from one address [half; no limit from this machine]",
        "read_timeout_s": "a request's head and body must keep coming, in seconds [30]",
        "stop_s": "a stop waits so long for running answers, in seconds [5]",
        "ping_s": "sign of life of a stream that has nothing to say yet, in seconds [5]",
        "record": "write every request to this file or directory, to replay the day [off]",
        "record_bytes": "a record of this size is put aside for a new one [1GiB]",
        "log_format": "text for people, or json: one object a line [text]",
        "log_level": "debug, info, warning or error; requests are info, failures of the server warning [info]",
    },
}
# Secrets are never flags: every user of the machine can read those. The last is for finding defects.
WITHOUT_FLAG = frozenset({"api_key", "api_keys", "admin_key", "check_when_idle"})
FLAGS = {name: described for group in FLAG_GROUPS.values() for name, described in group.items()}
SEVERAL = frozenset({"public_host"})  # flags that may be given again
SERVER_FLAGS = frozenset(FLAG_GROUPS["Server"]) | {"open"}
BENCH_UNUSED = SERVER_FLAGS | {"store"}  # benchmarks start with empty stores of their own, in the temporary directory
Command = Callable[..., int]


class GroupedCommand(TyperCommand):
    """A command whose help shows its options by group, its own ones first."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the help of all parameters."""
        sections: dict[str, list[tuple[str, str]]] = {group: [] for group in ("Arguments", "Options", *FLAG_GROUPS)}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_argument = parameter.param_type_name == "argument"
                group = getattr(parameter, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
                sections[group].append(record)
        for group, records in sections.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)


def _flag(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def _setting_flags() -> list[inspect.Parameter]:
    """The model, every flag of the table, --open and --config."""
    text = str | None
    flags = [
        _flag("bare_model", Annotated[text, typer.Argument(metavar="[MODEL]", help="directory or hub name [bundled]")]),
        _flag(
            "model",
            Annotated[text, typer.Option("--model", help="the same as the bare MODEL", rich_help_panel="Model")],
        ),
        *(_table_flag(name) for name in FLAGS),
    ]
    opened = typer.Option("--open", help="serve other machines without a key", rich_help_panel="Server")
    return [*flags, _flag("open", Annotated[bool, opened], False), _config_flag()]


def _table_flag(name: str) -> inspect.Parameter:
    group = next(group for group, names in FLAG_GROUPS.items() if name in names)
    option = typer.Option(f"--{name.replace('_', '-')}", help=FLAGS[name], rich_help_panel=group)
    return _flag(name, Annotated[list[str] | None if name in SEVERAL else str | None, option])


def _config_flag() -> inspect.Parameter:
    where = typer.Option("--config", help="TOML file with the same names, e.g. hot_bytes = '4GiB'")
    return _flag("config", Annotated[Path | None, where])


def with_settings(
    *,
    only: Collection[str] | None = None,
    unused: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> Callable[[Command], Callable[..., None]]:
    """Give a command every setting as a flag. It is called with `Settings` and its own keyword parameters.

    `only` these flags exist (None: all), for commands that load no model. `unused` are flags that mean nothing to it:
    given, they are refused. `defaults` differ from those of `config`.
    """

    def decorate(command: Command) -> Callable[..., None]:
        parameters = inspect.signature(command, eval_str=True).parameters.values()
        own = [item for item in parameters if item.name != "settings"]
        flags = _setting_flags() if only is None else [*(_table_flag(name) for name in only), _config_flag()]

        def run(**given: Any) -> None:
            extra = {item.name: given.pop(item.name) for item in own}
            exit_with(lambda: command(_load(given, unused, defaults), **extra))

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {item.name: item.annotation for item in (*flags, *own)}
        vars(run)["__signature__"] = inspect.Signature([*flags, *own] if only is None else [*own, *flags])
        return run

    return decorate


def _load(given: dict[str, Any], unused: Collection[str], defaults: Mapping[str, Any] | None) -> Settings:
    refused = [f"--{name.replace('_', '-')}" for name in given if name in unused and given[name]]
    if refused:
        raise ConfigError(f"{', '.join(refused)}: this command has no use for it")
    path = given.pop("config")
    if "model" in given:
        bare, named = given.pop("bare_model"), given["model"]
        if bare is not None and named is not None and bare != named:
            raise ConfigError(f"two models are named: {bare} and {named}")
        given["model"] = bare if named is None else named
        given["open"] = given["open"] or None
    for name in SEVERAL & given.keys():
        given[name] = given[name] or None
    return Settings.load(given, os.environ, path, defaults=defaults)


def exit_with(run: Callable[[], int]) -> None:
    """Run a command and end with its exit code."""
    raise typer.Exit(code_of(run))
