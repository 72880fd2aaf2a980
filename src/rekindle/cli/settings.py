"""Turns settings into flags.

Owns the form of a setting of `config` as a flag, and which flags a command refuses because it cannot honour them.
Variables and files are written for all commands: settings that a command does not use are ignored there.
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
from rekindle.config import SETTINGS, KnownSetting, Settings
from rekindle.errors import ConfigError

FLAGS = {known.name: known for known in SETTINGS.values() if known.flag and known.name not in ("model", "open")}
FLAG_GROUPS = tuple(dict.fromkeys(known.group for known in SETTINGS.values()))
SEVERAL = frozenset(name for name, known in FLAGS.items() if known.unit == "name")  # flags that may be given again
SERVER_FLAGS = frozenset(
    name for name, known in SETTINGS.items() if known.section in ("server", "models") and known.flag
)
BACKEND_FLAGS = frozenset(name for name, known in SETTINGS.items() if known.section == "backend" and known.flag)
# Benchmarks measure what computes here, and create empty stores in the temporary directory.
BENCH_UNUSED = SERVER_FLAGS | BACKEND_FLAGS | {"store", "slot"}
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
                sections.setdefault(group, []).append(record)
        for group, records in sections.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)


def _flag(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def _setting_flags() -> list[inspect.Parameter]:
    """The model, every other setting that has a flag, and --config."""
    bare = typer.Argument(metavar="[MODEL]", help=help_of(SETTINGS["model"]))
    model = typer.Option("--model", metavar="<text>", help="the same as the bare MODEL", rich_help_panel="Model")
    opened = typer.Option("--open", help=SETTINGS["open"].about.help, rich_help_panel="Server")
    return [
        _flag("bare_model", Annotated[str | None, bare]),
        _flag("model", Annotated[str | None, model]),
        *(_table_flag(name) for name in FLAGS),
        _flag("open", Annotated[bool, opened], False),
        _config_flag(),
    ]


def help_of(known: KnownSetting) -> str:
    """One line: meaning, bounds, default."""
    bounds = known.about.bounds
    between = f" ({bounds})" if bounds.most is not None else ""
    return f"{known.about.help}{between} [{known.default_text}]"


def _table_flag(name: str) -> inspect.Parameter:
    known = FLAGS[name]
    metavar = "|".join(known.choices) or f"<{known.unit}>"
    option = typer.Option(known.flag, metavar=metavar, help=help_of(known), rich_help_panel=known.group)
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
    """Give a command every setting as a flag. It is called with `Settings` and its own keyword parameters; one named
    `flags` gets the names of the settings that were given as flags.

    `only`: the flags it has (None: all), for commands that load no model. `unused`: flags that it has no use for and
    refuses. `defaults` override those of `config`.
    """

    def decorate(command: Command) -> Callable[..., None]:
        parameters = inspect.signature(command, eval_str=True).parameters
        own = [item for item in parameters.values() if item.name not in ("settings", "flags")]
        flags = _setting_flags() if only is None else [*(_table_flag(name) for name in only), _config_flag()]

        def run(**given: Any) -> None:
            extra = {item.name: given.pop(item.name) for item in own}
            if "flags" in parameters:
                named = {"bare_model": "model"}
                extra["flags"] = frozenset(named.get(name, name) for name, value in given.items() if value)
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
