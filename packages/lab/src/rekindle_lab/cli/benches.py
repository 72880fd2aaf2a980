"""bench: measurements of this machine, or of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rekindle.cli.console import console
from rekindle.cli.settings import BENCH_UNUSED, GroupedCommand, exit_with, with_settings
from rekindle.config import Settings
from rekindle.errors import ConfigError

bench = typer.Typer(no_args_is_help=True)


@bench.callback()
def group() -> None:
    """Measure on this machine."""


@bench.command("engine", cls=GroupedCommand)
@with_settings(unused=BENCH_UNUSED)
def bench_engine(
    settings: Settings,
    context: Annotated[int, typer.Option(help="tokens of the measured prompt")] = 4096,
    repeats: Annotated[int, typer.Option(help="how often each measure is taken; the median counts")] = 3,
    seed: Annotated[int, typer.Option(help="of the prompts")] = 0,
    baseline: Annotated[Literal["transformers", "none"], typer.Option(help="the other arm")] = "transformers",
    against: Annotated[str, typer.Option(metavar="PEERS", help="further arms: openvino,llama.cpp[:q8_0]")] = "",
    streams: Annotated[str, typer.Option(help="how many prompts decode at once, one number after the other")] = "1,4,8",
    rows: Annotated[str, typer.Option(metavar="NAMES", help="what to measure, such as cold,hot,warm [all]")] = "",
    cold_repeats: Annotated[int | None, typer.Option(help="how many new prompts [--repeats]")] = None,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """First tokens cold, hot and warm, decoding, saving and memory, compared with plain transformers and peers."""
    from rekindle_lab.bench.engine.bench import EngineBench, run_engine_bench

    need_reuse(settings)
    options = EngineBench(context, repeats, seed, baseline, out, against, streams, rows, cold_repeats)
    return run_engine_bench(settings, options, console())


@bench.command("recall", cls=GroupedCommand)
@with_settings(unused=BENCH_UNUSED | {"kv"})
def bench_recall(
    settings: Settings,
    cases: Annotated[int, typer.Option(min=1, help="questions at each distance")] = 20,
    seed: Annotated[int, typer.Option(help="of the facts")] = 10_000,
    out: Annotated[Path | None, typer.Option(help="also append JSON lines here")] = None,
) -> int:
    """How well the bundled model recalls facts: with native KV, 4 bits in memory, 4 bits after a restart."""
    from rekindle_lab.bench.recall import RecallBench, run_recall

    need_reuse(settings)
    return run_recall(settings, RecallBench(cases=cases, seed=seed, out=out), console())


@bench.command("day")
def bench_day(
    path: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="the file to write")],
    seed: Annotated[int, typer.Option(help="of the texts and their times")] = 0,
    scale: Annotated[str, typer.Option(help="small (about 100 requests) or full (about 350)")] = "small",
    context: Annotated[int | None, typer.Option(help="most tokens of a prompt with its reply [by scale]")] = None,
) -> None:
    """Generate a day of agents, with a pause, a kill, midnight and a restart, for `bench replay`."""

    def run() -> int:
        from rekindle_lab.bench.replay.day import DayPlan, run_day

        return run_day(path, DayPlan(seed=seed, scale=scale, context=context), console())

    exit_with(run)


@bench.command("replay")
def bench_replay(
    path: Annotated[Path, typer.Argument(metavar="DAY.jsonl", help="what `bench day` or `serve --record` wrote")],
    against: Annotated[str, typer.Option(metavar="URL", help="any OpenAI-compatible server")],
    restart_cmd: Annotated[str | None, typer.Option(help="shell command: stop the server, start it again")] = None,
    kill_cmd: Annotated[str | None, typer.Option(help="the same with SIGKILL [--restart-cmd]")] = None,
    speed: Annotated[float, typer.Option(help="think-time speed-up; inf: at once")] = 100,
    mode: Annotated[Literal["live", "recorded"], typer.Option(help="replay with live or recorded replies")] = "live",
    model: Annotated[str | None, typer.Option(help="the name to ask for [the first the server lists]")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="variable that holds the API key")] = None,
    cold_check: Annotated[int, typer.Option(min=0, help="replies to compare with cold ones afterwards")] = 0,
    cold_url: Annotated[str | None, typer.Option(help="a fresh server for that [Rekindle: itself, reuse off]")] = None,
    arm: Annotated[str | None, typer.Option(help="name of the column [model and URL]")] = None,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here; arms in it are shown, too")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of the seconds waited over the day")] = None,
) -> None:
    """Replay a recorded day against any OpenAI-compatible server: the seconds waited, the tokens computed."""

    def run() -> int:
        from rekindle_lab.bench.replay.replay import Pace
        from rekindle_lab.bench.replay.run import ReplayOptions, run_replay

        pace = Pace(speed, mode, restart_cmd, kill_cmd)
        options = ReplayOptions(against, pace, arm, model, api_key_env, cold_check, cold_url, out, plot)
        return run_replay(path, options, console())

    exit_with(run)


@bench.command("server")
def bench_server(
    url: Annotated[str, typer.Argument(metavar="URL", help="any OpenAI-compatible server")],
    context: Annotated[int, typer.Option(help="tokens of the measured prompts, as the server counts them")] = 2048,
    extension: Annotated[int, typer.Option(help="tokens of the next turn")] = 64,
    repeats: Annotated[int, typer.Option(help="how often each measure is taken; the median counts")] = 3,
    seed: Annotated[int, typer.Option(help="of the texts")] = 0,
    restart_cmd: Annotated[str | None, typer.Option(help="shell command: stop the server, start it again")] = None,
    drop_cache: Annotated[Path | None, typer.Option(help="its store: forget these files' pages after that")] = None,
    end_token: Annotated[int | None, typer.Option(help="id that ends replies, banned in the decode measures")] = None,
    arm: Annotated[str | None, typer.Option(help="name of the column [model and URL]")] = None,
    model: Annotated[str | None, typer.Option(help="the name to ask for [the first the server lists]")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="variable that holds the API key")] = None,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here; arms in it are shown, too")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of the measures in seconds")] = None,
) -> None:
    """First tokens cold, hot and warm, streams side by side, arrivals and rounds of any server, from outside."""

    def run() -> int:
        from rekindle_lab.bench.server.bench import ServerBench, run_server_bench

        restart = (restart_cmd, drop_cache)
        whom = (arm, model, api_key_env)
        options = ServerBench(url, context, extension, repeats, seed, *restart, end_token, *whom, out, plot)
        return run_server_bench(options, console())

    exit_with(run)


@bench.command("noisy", cls=GroupedCommand)
@with_settings(unused=BENCH_UNUSED)
def bench_noisy(
    settings: Settings,
    seconds: Annotated[float, typer.Option(help="how long each arm lasts")] = 10.0,
    mebibytes: Annotated[float, typer.Option(help="size of the large bodies")] = 32.0,
    only: Annotated[list[str] | None, typer.Option(help="arms; may be repeated [all]")] = None,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """One tenant sends the worst possible bodies, another requests one token: its waits, and the server's memory."""
    from rekindle_lab.bench.server.noisy import NoisyBench, run_noisy

    return run_noisy(settings, NoisyBench(seconds, mebibytes, tuple(only) if only else None, out), console())


def need_reuse(settings: Settings) -> None:
    """Raise ConfigError if reuse, which is to be measured, is off."""
    if settings.cache.reuse == "off":
        raise ConfigError("what is measured here is reuse: --reuse off leaves nothing to measure")
