"""bench: what is measured on this machine, or of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rekindle.cli.console import console
from rekindle.cli.settings import BENCH_UNUSED, FLAGS, exit_with, with_settings
from rekindle.config import Settings
from rekindle.errors import ConfigError

bench = typer.Typer(no_args_is_help=True)


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
    return run_engine_bench(settings, options, console())


@bench.command("cache")
def bench_cache(
    sequences: Annotated[int, typer.Option(help="sequences in the trie")] = 100_000,
    tokens: Annotated[int, typer.Option(help="tokens of each")] = 2_000,
    blocks: Annotated[int, typer.Option(help="blocks of the pool")] = 1_000_000,
    repeats: Annotated[int, typer.Option(help="how often each measure is taken; the median counts")] = 3,
    seed: Annotated[int, typer.Option(help="of the ids")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="trie, pool or hashing; may be repeated [all]")] = None,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> None:
    """Trie, block pool and hashes of the library alone: time and memory, beside what they are held to."""

    def run() -> int:
        from rekindle.bench.cache_bench import PARTS, CacheBench, run_cache_bench

        parts = tuple(only) if only else PARTS
        return run_cache_bench(CacheBench(sequences, tokens, blocks, repeats, seed, parts, out), console())

    exit_with(run)


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
    return run_match_bench(settings, options, console())


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
    return run_recall(settings, RecallBench(cases=cases, seed=seed, out=out), console())


@bench.command("day")
def bench_day(
    path: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="the file to write")],
    seed: Annotated[int, typer.Option(help="of everything that is said and when")] = 0,
    scale: Annotated[str, typer.Option(help="small (about 100 requests) or full (about 350)")] = "small",
    context: Annotated[int | None, typer.Option(help="most tokens of a prompt with its reply [by scale]")] = None,
) -> None:
    """Make up a day of agents, with a pause, a kill, midnight and a restart, for `bench replay`."""

    def run() -> int:
        from rekindle.bench.day import DayPlan, run_day

        return run_day(path, DayPlan(seed=seed, scale=scale, context=context), console())

    exit_with(run)


@bench.command("replay")
def bench_replay(
    path: Annotated[Path, typer.Argument(metavar="DAY.jsonl", help="what `bench day` or `serve --record` wrote")],
    against: Annotated[str, typer.Option(metavar="URL", help="any OpenAI-compatible server")],
    restart_cmd: Annotated[str | None, typer.Option(help="shell command: stop the server, start it again")] = None,
    kill_cmd: Annotated[str | None, typer.Option(help="the same with SIGKILL [--restart-cmd]")] = None,
    speed: Annotated[float, typer.Option(help="how many times faster than recorded people think; inf: at once")] = 100,
    mode: Annotated[Literal["live", "recorded"], typer.Option(help="whose replies stand in the prompts")] = "live",
    model: Annotated[str | None, typer.Option(help="the name to ask for [the first the server lists]")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="variable that holds the API key")] = None,
    cold_check: Annotated[int, typer.Option(min=0, help="replies to compare with cold ones afterwards")] = 0,
    cold_url: Annotated[str | None, typer.Option(help="a fresh server for that [Rekindle: itself, reuse off]")] = None,
    arm: Annotated[str | None, typer.Option(help="name of the column [model and URL]")] = None,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here; arms in it are shown, too")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of the seconds waited over the day")] = None,
) -> None:
    """Ask a recorded day again, of any OpenAI-compatible server: the seconds waited, the tokens computed."""

    def run() -> int:
        from rekindle.bench.replay import Pace
        from rekindle.bench.replay_run import ReplayOptions, run_replay

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
        from rekindle.bench.server_bench import ServerBench, run_server_bench

        restart = (restart_cmd, drop_cache)
        whom = (arm, model, api_key_env)
        options = ServerBench(url, context, extension, repeats, seed, *restart, end_token, *whom, out, plot)
        return run_server_bench(options, console())

    exit_with(run)


@bench.command("noisy")
@with_settings(unused=BENCH_UNUSED)
def bench_noisy(
    settings: Settings,
    seconds: Annotated[float, typer.Option(help="how long each arm lasts")] = 10.0,
    mebibytes: Annotated[float, typer.Option(help="size of the large bodies")] = 32.0,
    only: Annotated[list[str] | None, typer.Option(help="arms; may be repeated [all]")] = None,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """One tenant sends the worst bodies there are, another asks for one token: its waits, and the server's memory."""
    from rekindle.bench.noisy import NoisyBench, run_noisy

    return run_noisy(settings, NoisyBench(seconds, mebibytes, tuple(only) if only else None, out), console())


@bench.command("fleet")
@with_settings(unused=BENCH_UNUSED | {"hot_bytes", "disk_bytes"})
def bench_fleet(
    settings: Settings,
    agents: Annotated[int, typer.Option(help="agents in all")] = 1_000,
    tokens: Annotated[int, typer.Option(help="tokens of each agent's prompt")] = 1_000,
    hot_agents: Annotated[int, typer.Option(help="agents that memory holds")] = 10,
    disk_agents: Annotated[int, typer.Option(help="agents that the disk budget holds")] = 500,
    sample: Annotated[int, typer.Option(help="agents of each kind that are asked at the end")] = 10,
    seed: Annotated[int, typer.Option(help="of the conversations")] = 0,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """Many more agents than memory and disk hold: nobody refused, budgets kept, the right ones warm."""
    from rekindle.bench.fleet import FleetBench, run_fleet

    _need_reuse(settings)
    return run_fleet(settings, FleetBench(agents, tokens, hot_agents, disk_agents, sample, seed, out), console())


@bench.command("restart")
@with_settings(unused=BENCH_UNUSED | {"disk_bytes"})
def bench_restart(
    settings: Settings,
    agents: Annotated[list[int] | None, typer.Option(help="agents in a store; may be repeated [1000 10000]")] = None,
    tokens: Annotated[int, typer.Option(help="tokens of each agent's prompt")] = 256,
    repeats: Annotated[int, typer.Option(help="how often each store is restarted; the median counts")] = 5,
    seed: Annotated[int, typer.Option(help="of the conversations")] = 0,
    keep: Annotated[Path | None, typer.Option(help="keep the filled stores here, and use those found here")] = None,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """kill -9 a server with many agents, start it again: when it serves, and when the first of them answers."""
    from rekindle.bench.restart import RestartBench, run_restart

    _need_reuse(settings)
    options = RestartBench(tuple(agents or (1_000, 10_000)), tokens, repeats, seed, keep, out)
    return run_restart(settings, options, console())


@bench.command("session")
@with_settings(only=("kv", "threads", "hot_bytes", "block_tokens"))
def bench_session(
    settings: Settings,
    behaviour: Annotated[list[str] | None, typer.Option(help="chat template; may be repeated [all]")] = None,
    arm: Annotated[
        list[str] | None, typer.Option(help="as served, normalise off, anticipate off, both off; all")
    ] = None,
    turns: Annotated[int, typer.Option(help="requests of the main agent")] = 40,
    seed: Annotated[int, typer.Option(help="of all that the model does not say, and of the model")] = 0,
    checks: Annotated[int, typer.Option(min=0, help="replies of each session to compare with reuse off")] = 8,
    by_turn: Annotated[bool, typer.Option(help="show every request")] = True,
    log: Annotated[Path | None, typer.Option(help="write the requests here, for `rekindle analyze`")] = None,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here")] = None,
) -> int:
    """A coding agent's session on six chat templates: what of each prompt was known, and why not more."""
    from rekindle.bench.session import SessionBench, run_session_bench
    from rekindle.bench.session_agent import SessionPlan

    chosen = tuple(behaviour or ()), tuple(arm or ())
    return run_session_bench(
        settings, SessionBench(SessionPlan(turns, seed), *chosen, checks, by_turn, log, out), console()
    )


@bench.command("coordination")
@with_settings(unused=BENCH_UNUSED)
def bench_coordination(
    settings: Settings,
    agents: Annotated[int, typer.Option(help="agents that talk with each other")] = 6,
    rounds: Annotated[int, typer.Option(help="in each of which everybody speaks once")] = 10,
    history: Annotated[int, typer.Option(help="tokens that all know before, computed once")] = 0,
    tokens: Annotated[int, typer.Option(help="of each reply")] = 40,
    arm: Annotated[
        list[str] | None, typer.Option(help="ours, not listening, trailing cue, reuse off; may be repeated [all]")
    ] = None,
    baseline_rounds: Annotated[int | None, typer.Option(help="of the other arms [--rounds]")] = None,
    seed: Annotated[int, typer.Option(help="of the history and the replies")] = 0,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of silence and reuse by round")] = None,
) -> int:
    """Agents that talk round after round: the silence between two of them, what of each prompt was known."""
    from rekindle.bench.coordination import CoordinationBench, run_coordination_bench

    _need_reuse(settings)
    options = CoordinationBench(agents, rounds, history, tokens, tuple(arm or ()), baseline_rounds, seed, out, plot)
    return run_coordination_bench(settings, options, console())


@bench.command("coordination-restart")
@with_settings(unused=BENCH_UNUSED)
def bench_coordination_restart(
    settings: Settings,
    agents: Annotated[int, typer.Option(help="agents that talk with each other")] = 6,
    rounds: Annotated[int, typer.Option(help="whole ones before each kill and after the last")] = 3,
    restarts: Annotated[int, typer.Option(help="how often the server is killed in one session")] = 3,
    history: Annotated[int, typer.Option(help="tokens that all know before, computed once")] = 0,
    tokens: Annotated[int, typer.Option(help="of each reply")] = 40,
    arm: Annotated[list[str] | None, typer.Option(help="ours, reuse off; may be repeated [all]")] = None,
    seed: Annotated[int, typer.Option(help="of the history and the replies")] = 0,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """kill -9 a server while an agent speaks, start it again: what the session keeps, what its next turns cost."""
    from rekindle.bench.coordination_restart import CoordinationRestartBench, run_coordination_restart

    _need_reuse(settings)
    options = CoordinationRestartBench(agents, rounds, restarts, history, tokens, tuple(arm or ()), seed, out)
    return run_coordination_restart(settings, options, console())


def _need_reuse(settings: Settings) -> None:
    if settings.cache.reuse == "off":
        raise ConfigError("what is measured here is reuse: --reuse off leaves nothing to measure")
