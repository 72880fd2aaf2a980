"""The command line: serve, chat, demo, bench.

Owns how settings become flags (one table; the same names as REKINDLE_* variables and keys of the TOML file), which
flags a command cannot honour and refuses (variables and files are written for all commands: there they are passed
over), and how errors become exit codes: 2 for what the caller has to change, 1 for what failed.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from rekindle import __version__
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
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


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
            _exit_with(lambda: command(_load(given, unused, defaults), **extra))

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


def _exit_with(run: Callable[[], int]) -> None:
    try:
        code = run()
    except (ConfigError, ModelRefused) as error:
        typer.echo(f"rekindle: {error}", err=True)
        code = 2
    except RekindleError as error:
        typer.echo(f"rekindle: {error}", err=True)
        code = 1
    raise typer.Exit(code)


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    logging.getLogger("rekindle").setLevel(logging.INFO)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def rekindle(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")] = False,
) -> None:
    """An inference server whose agents' KV memory lasts."""


@app.command()
@with_settings()
def serve(settings: Settings) -> int:
    """Serve a model over HTTP until a signal; what was said is on disk when it stops."""
    from rekindle.engine.api import Engine
    from rekindle.server.serve import open_listeners, run_server

    _log_to_stderr()
    listeners = open_listeners(settings.server)
    with Engine(settings) as engine:
        run_server(engine, settings, typer.echo, listeners=listeners)
    return 0


@app.command()
@with_settings(unused=SERVER_FLAGS)
def chat(
    settings: Settings,
    agent: Annotated[str, typer.Option("--agent", help="whose memory to go on with")] = "me",
) -> int:
    """Talk to the model here, without a server; /quit or the end of input ends it."""
    from rekindle.bench.chat import chat_loop
    from rekindle.engine.api import Engine

    with Engine(settings) as engine:
        chat_loop(engine, agent, Console())
    return 0


@app.command()
@with_settings(defaults={"port": 0})
def demo(
    settings: Settings,
    seed: Annotated[int, typer.Option("--seed", help="of the facts the agents are told")] = 7,
) -> int:
    """Four agents, a kill -9 between their turns, and a verdict: 0 if every reply and 90 % of the memory survived."""
    from rekindle.bench.demo import run_demo

    return run_demo(settings, seed=seed, console=Console())


bench = typer.Typer(no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.callback()
def group() -> None:
    """Measure on this machine."""


@bench.command("engine")
@with_settings(unused=BENCH_UNUSED)
def bench_engine(
    settings: Settings,
    context: Annotated[int, typer.Option(help="tokens of the measured prompt")] = 4096,
    repeats: Annotated[int, typer.Option(help="how often each measure is taken; the median counts")] = 3,
    seed: Annotated[int, typer.Option(help="of the prompts")] = 0,
    baseline: Annotated[Literal["transformers", "none"], typer.Option(help="the other arm")] = "transformers",
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """First tokens cold, hot and warm, decoding, saving and memory, beside plain transformers."""
    from rekindle.bench.engine_bench import EngineBench, run_engine_bench

    _need_reuse(settings)
    options = EngineBench(context=context, repeats=repeats, seed=seed, baseline=baseline, out=out)
    return run_engine_bench(settings, options, Console())


@bench.command("match")
@with_settings(unused=set(FLAGS) - {"revision"} | {"open"})
def bench_match(
    settings: Settings,
    repeats: Annotated[int, typer.Option(help="how often each prompt is looked for; the median counts")] = 200,
    short: Annotated[int, typer.Option(help="stored sequences of 2,000 tokens")] = 9_990,
    long: Annotated[int, typer.Option(help="stored sequences of 100,000 tokens")] = 10,
    seed: Annotated[int, typer.Option(help="of the texts")] = 0,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """Find the stored text that a prompt of 100,000 tokens continues, among ten thousand."""
    from rekindle.bench.match_bench import MatchBench, run_match_bench

    options = MatchBench(num_short=short, num_long=long, repeats=repeats, seed=seed, out=out)
    return run_match_bench(settings, options, Console())


@bench.command("recall")
@with_settings(unused=BENCH_UNUSED | {"kv"})
def bench_recall(
    settings: Settings,
    cases: Annotated[int, typer.Option(min=1, help="questions at each distance")] = 20,
    seed: Annotated[int, typer.Option(help="of the facts")] = 10_000,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here, too")] = None,
) -> int:
    """What the bundled model knows of facts it was told: with native KV, 4 bits in memory, 4 bits after a restart."""
    from rekindle.bench.recall import RecallBench, run_recall

    _need_reuse(settings)
    return run_recall(settings, RecallBench(cases=cases, seed=seed, out=out), Console())


def _need_reuse(settings: Settings) -> None:
    if settings.cache.reuse == "off":
        raise ConfigError("what is measured here is reuse: --reuse off leaves nothing to measure")


def main() -> None:
    """Entry point of the `rekindle` command."""
    app()


if __name__ == "__main__":
    main()
