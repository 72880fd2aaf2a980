"""How settings become flags, and errors exit codes: 2 for what the caller has to change, 1 for what failed.

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

from rekindle.config import Settings
from rekindle.errors import ConfigError, ModelRefused, RekindleError

FLAGS = {
    "revision": "branch, tag or commit of a hub model",
    "host": "address to listen on; off loopback a key (REKINDLE_API_KEY) or --open is required [127.0.0.1]",
    "port": "port to listen on; 0 takes any free one [7354]",
    "store": "directory of the warm tier, or off [the user's cache directory]",
    "kv": "auto, q4h, bf16 or fp32 [auto: 4 bits where it is safe]",
    "dtype": "auto, bf16 or fp32 [auto: what the checkpoint has]",
    "device": "cpu or cuda [cpu]",
    "block_tokens": "tokens in a block: 16, 32, 64, 128 or 256 [64]",
    "hot_bytes": "memory for hot KV, as 512MB or 4GiB [by the memory at hand]",
    "disk_bytes": "disk for warm KV [by the free space]",
    "max_context": "longest prompt with its answer, in tokens [the model's]",
    "threads": "threads of the model [all cores]",
    "served_model_name": "name in /v1/models and in answers [the model's]",
    "reuse": "on or off [on]",
    "max_stall_s": "longest pause of a running stream for another's prompt, in seconds [0.25]",
}
SERVER_FLAGS = frozenset({"host", "port", "served_model_name", "open"})
BENCH_UNUSED = SERVER_FLAGS | {"store"}  # benchmarks start with empty stores of their own, in the temporary directory
Command = Callable[..., int]


def _flag(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def _setting_flags() -> list[inspect.Parameter]:
    text = str | None
    flags = [
        _flag("bare_model", Annotated[text, typer.Argument(metavar="[MODEL]", help="directory or hub name [bundled]")]),
        _flag("model", Annotated[text, typer.Option("--model", help="the same as the bare MODEL")]),
    ]
    for name, described in FLAGS.items():
        option = f"--{name.replace('_', '-')}"
        flags.append(_flag(name, Annotated[text, typer.Option(option, help=described)]))
    flags.append(
        _flag("open", Annotated[bool, typer.Option("--open", help="serve other machines without a key")], False)
    )
    where = typer.Option("--config", help="TOML file with the same names, e.g. hot_bytes = '4GiB'")
    flags.append(_flag("config", Annotated[Path | None, where]))
    return flags


def with_settings(
    *, unused: Collection[str] = (), defaults: Mapping[str, Any] | None = None
) -> Callable[[Command], Callable[..., None]]:
    """Give a command every setting as a flag. It is called with `Settings` and its own keyword parameters.

    `unused` are flags that mean nothing to it: given, they are refused. `defaults` differ from those of `config`.
    """

    def decorate(command: Command) -> Callable[..., None]:
        parameters = inspect.signature(command, eval_str=True).parameters.values()
        own = [item for item in parameters if item.name != "settings"]
        flags = _setting_flags()

        def run(**given: Any) -> None:
            extra = {item.name: given.pop(item.name) for item in own}
            exit_with(lambda: command(_load(given, unused, defaults), **extra))

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {item.name: item.annotation for item in (*flags, *own)}
        vars(run)["__signature__"] = inspect.Signature([*flags, *own])
        return run

    return decorate


def _load(given: dict[str, Any], unused: Collection[str], defaults: Mapping[str, Any] | None) -> Settings:
    refused = [f"--{name.replace('_', '-')}" for name in given if name in unused and given[name]]
    if refused:
        raise ConfigError(f"{', '.join(refused)}: this command has no use for it")
    bare, named, path = given.pop("bare_model"), given["model"], given.pop("config")
    if bare is not None and named is not None and bare != named:
        raise ConfigError(f"two models are named: {bare} and {named}")
    given["model"] = bare if named is None else named
    given["open"] = given["open"] or None
    return Settings.load(given, os.environ, path, defaults=defaults)


def exit_with(run: Callable[[], int]) -> None:
    try:
        code = run()
    except (ConfigError, ModelRefused) as error:
        typer.echo(f"rekindle: {error}", err=True)
        code = 2
    except RekindleError as error:
        typer.echo(f"rekindle: {error}", err=True)
        code = 1
    raise typer.Exit(code)
