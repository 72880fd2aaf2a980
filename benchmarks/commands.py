"""The commands of `python -m benchmarks`, for developers; users have `rekindle bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.kernel_commands import bench_kernels, bench_loads
from benchmarks.memory_commands import (
    bench_encryption,
    bench_llama_cuts,
    bench_llama_faults,
    bench_llama_kills,
    bench_llama_slots,
    bench_llama_states,
    bench_wear,
)
from rekindle.cli.console import console
from rekindle.cli.settings import BENCH_UNUSED, FLAGS, exit_with, with_settings
from rekindle.config import Settings
from rekindle_lab.cli.benches import need_reuse

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def group() -> None:
    """Compare a change with the one before it, on this machine: for developers."""


@app.command("coding-day")
@with_settings(only=("kv", "threads", "hot_bytes", "block_tokens"))
def bench_coding_day(
    settings: Settings,
    behaviour: Annotated[
        list[str] | None, typer.Option(help="chat template, or habit of a client; may be repeated [all]")
    ] = None,
    arm: Annotated[
        list[str] | None, typer.Option(help="as served, attribution only, normalise off, anticipate off, both off; all")
    ] = None,
    turns: Annotated[int, typer.Option(help="requests of the main agent")] = 40,
    seed: Annotated[int, typer.Option(help="of everything except the model's replies, and of the model")] = 0,
    checks: Annotated[int, typer.Option(min=0, help="replies of each session to compare with reuse off")] = 8,
    by_turn: Annotated[bool, typer.Option(help="show every request")] = True,
    log: Annotated[Path | None, typer.Option(help="write the requests here, for `rekindle analyze`")] = None,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here")] = None,
) -> int:
    """A coding agent on six chat templates, and with four habits of clients: how much was reused, and why not more."""
    from benchmarks.coding_day.agent import SessionPlan
    from benchmarks.coding_day.bench import CodingDayBench, run_coding_day_bench

    chosen = tuple(behaviour or ()), tuple(arm or ())
    return run_coding_day_bench(
        settings, CodingDayBench(SessionPlan(turns, seed), *chosen, checks, by_turn, log, out), console()
    )


@app.command("coordination")
@with_settings(unused=BENCH_UNUSED)
def bench_coordination(
    settings: Settings,
    agents: Annotated[int, typer.Option(help="agents that talk with each other")] = 6,
    rounds: Annotated[int, typer.Option(help="rounds; each agent speaks once in each")] = 10,
    history: Annotated[int, typer.Option(help="tokens of shared history, computed once")] = 0,
    tokens: Annotated[int, typer.Option(help="of each reply")] = 40,
    arm: Annotated[
        list[str] | None, typer.Option(help="ours, not listening, trailing cue, reuse off; may be repeated [all]")
    ] = None,
    baseline_rounds: Annotated[int | None, typer.Option(help="of the other arms [--rounds]")] = None,
    seed: Annotated[int, typer.Option(help="of the history and the replies")] = 0,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of silence and reuse by round")] = None,
) -> int:
    """Agents that talk round after round: the silence between two speakers, and how much of each prompt was reused."""
    from benchmarks.coordination.bench import CoordinationBench, run_coordination_bench

    need_reuse(settings)
    options = CoordinationBench(agents, rounds, history, tokens, tuple(arm or ()), baseline_rounds, seed, out, plot)
    return run_coordination_bench(settings, options, console())


@app.command("coordination-restart")
@with_settings(unused=BENCH_UNUSED)
def bench_coordination_restart(
    settings: Settings,
    agents: Annotated[int, typer.Option(help="agents that talk with each other")] = 6,
    rounds: Annotated[int, typer.Option(help="complete rounds before each kill and after the last")] = 3,
    restarts: Annotated[int, typer.Option(help="how often the server is killed in one session")] = 3,
    history: Annotated[int, typer.Option(help="tokens of shared history, computed once")] = 0,
    tokens: Annotated[int, typer.Option(help="of each reply")] = 40,
    arm: Annotated[list[str] | None, typer.Option(help="ours, reuse off; may be repeated [all]")] = None,
    seed: Annotated[int, typer.Option(help="of the history and the replies")] = 0,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """kill -9 a server while an agent speaks, and restart it: what the session retains, what its next turns cost."""
    from benchmarks.coordination.restart import CoordinationRestartBench, run_coordination_restart

    need_reuse(settings)
    options = CoordinationRestartBench(agents, rounds, restarts, history, tokens, tuple(arm or ()), seed, out)
    return run_coordination_restart(settings, options, console())


@app.command("fidelity")
@with_settings(only=("kernels", "threads", "block_tokens"))
def bench_fidelity(
    settings: Settings,
    model: Annotated[list[str] | None, typer.Option(help="smollm2 or gemma; may be repeated [both]")] = None,
    text: Annotated[list[str] | None, typer.Option(help="prose or code; may be repeated [both]")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="formats (the default), candidates, llama.cpp; several")] = None,
    tokens: Annotated[int, typer.Option(help="of each text")] = 2048,
    context: Annotated[int, typer.Option(help="tokens of a window")] = 1024,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """Two models with real weights, on prose and code: KL, first choices, perplexity by formats of weights and KV."""
    from benchmarks.fidelity import FidelityBench, run_fidelity

    chosen = tuple(model or ()), tuple(text or ()), tuple(arm or ())
    return run_fidelity(settings, FidelityBench(*chosen, tokens, context, out), console())


@app.command("fleet")
@with_settings(unused=BENCH_UNUSED | {"hot_bytes", "disk_bytes"})
def bench_fleet(
    settings: Settings,
    agents: Annotated[int, typer.Option(help="agents in total")] = 1_000,
    tokens: Annotated[int, typer.Option(help="tokens of each agent's prompt")] = 1_000,
    hot_agents: Annotated[int, typer.Option(help="agents that memory holds")] = 10,
    disk_agents: Annotated[int, typer.Option(help="agents that the disk budget holds")] = 500,
    sample: Annotated[int, typer.Option(help="agents of each kind to query at the end")] = 10,
    seed: Annotated[int, typer.Option(help="of the conversations")] = 0,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """Many more agents than memory and disk hold: none refused, budgets respected, the right ones warm."""
    from benchmarks.fleet import FleetBench, run_fleet

    need_reuse(settings)
    return run_fleet(settings, FleetBench(agents, tokens, hot_agents, disk_agents, sample, seed, out), console())


@app.command("neighbours")
@with_settings(unused=BENCH_UNUSED)
def bench_neighbours(
    settings: Settings,
    neighbours: Annotated[int, typer.Option(help="busy processes")] = 2,
    repeats: Annotated[int, typer.Option(help="replies of each arm, alone and with neighbours; the median counts")] = 5,
    tokens: Annotated[int, typer.Option(help="of each reply")] = 40,
    peer: Annotated[str | None, typer.Option(help="base URL of another server, measured as it stands")] = None,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """Decode with one thread and with all, alone and while other processes keep the processors busy."""
    from benchmarks.neighbours import NeighbourBench, run_neighbours

    return run_neighbours(settings, NeighbourBench(neighbours, repeats, tokens, peer, out), console())


@app.command("restart")
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
    """kill -9 a server with many agents, and restart it: when it serves, and when the first agent answers."""
    from benchmarks.restart import RestartBench, run_restart

    need_reuse(settings)
    options = RestartBench(tuple(agents or (1_000, 10_000)), tokens, repeats, seed, keep, out)
    return run_restart(settings, options, console())


@app.command("vllm")
@with_settings(only=())
def bench_vllm(
    settings: Settings,
    python: Annotated[Path, typer.Option(help="of the environment with vLLM")] = Path(".venv-fleet/0.32.0/bin/python"),
    model: Annotated[Path | None, typer.Option(help="model directory [bundled]")] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="of each prompt; may be repeated, the shortest first [2048]")
    ] = None,
    repeats: Annotated[int, typer.Option(help="prompts of each arm; the median counts")] = 3,
    seed: Annotated[int, typer.Option(help="of the prompts")] = 0,
    disk: Annotated[str, typer.Option(help="of the connector's store")] = "20GB",
    staging: Annotated[str, typer.Option(help="of the connector's store")] = "512MiB",
    batched: Annotated[int, typer.Option(help="tokens of a step")] = 2048,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """vLLM alone and with our connector: cold prompts, hot ones that grew, and the same after a kill -9."""
    from benchmarks.vllm.bench import VllmBench, run_vllm

    lengths = tuple(tokens or (2048,))
    return run_vllm(VllmBench(python, model, lengths, repeats, seed, disk, staging, batched, out), console())


@app.command("vllm-decode")
@with_settings(only=())
def bench_vllm_decode(
    settings: Settings,
    python: Annotated[Path, typer.Option(help="of the environment with vLLM")] = Path(".venv-fleet/0.32.0/bin/python"),
    model: Annotated[Path | None, typer.Option(help="model directory [bundled]")] = None,
    kv: Annotated[
        list[str] | None, typer.Option(help="kv_cache_dtype, native or q4h; may be repeated [auto native q4h]")
    ] = None,
    streams: Annotated[list[int] | None, typer.Option(help="prompts at once; may be repeated [1 4]")] = None,
    context: Annotated[list[int] | None, typer.Option(help="tokens of each; may be repeated [512]")] = None,
    tokens: Annotated[int, typer.Option(min=4, help="of each reply")] = 64,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """Decoding in vLLM with its own kinds of KV and with our connector: steps, prefills, how many tokens fit."""
    from benchmarks.vllm.decode import DecodeBench, run_decode

    kinds, loads = tuple(kv or ("auto", "native", "q4h")), (tuple(streams or (1, 4)), tuple(context or (512,)))
    return run_decode(DecodeBench(python, model, kinds, *loads, tokens, out), console())


@app.command("start")
@with_settings(unused=BENCH_UNUSED)
def bench_start(
    settings: Settings,
    repeats: Annotated[int, typer.Option(help="how often a server starts first and again; the median counts")] = 7,
    real: Annotated[
        list[str] | None, typer.Option(help="instead of MODEL a real one: smollm2, gemma; may be repeated")
    ] = None,
    against: Annotated[str | None, typer.Option(help="llama.cpp: the real models in llama-cpp-python, too")] = None,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """Start a server with nothing stored, and again: when its code is imported, its weights loaded, and it serves."""
    from benchmarks.start import StartBench, run_start

    return run_start(settings, StartBench(repeats, tuple(real or ()), against, out), console())


@app.command("speculation")
@with_settings(unused=BENCH_UNUSED | {"speculate", "anticipate"})
def bench_speculation(
    settings: Settings,
    tokens: Annotated[int, typer.Option(help="of each reply")] = 128,
    streams: Annotated[list[int] | None, typer.Option(help="replies at once; may be repeated [1 4]")] = None,
    repeats: Annotated[int, typer.Option(help="how often each kind is measured; the median counts")] = 3,
    seed: Annotated[int, typer.Option(help="of sampled replies")] = 0,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """Decode with drafts from stored text, and without, on texts that repeat and texts that do not."""
    from benchmarks.speculation import SpeculationBench, run_speculation

    need_reuse(settings)
    options = SpeculationBench(tokens, tuple(streams or (1, 4)), repeats, seed, out)
    return run_speculation(settings, options, console())


@app.command("windows")
@with_settings(unused=BENCH_UNUSED | {"anticipate"})
def bench_windows(
    settings: Settings,
    context: Annotated[int, typer.Option(help="tokens of the conversation")] = 32768,
    seed: Annotated[int, typer.Option(help="of the tokens")] = 0,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """Bytes that models with sliding windows keep: of large shapes, or measured with --model."""
    from benchmarks.windows import WindowBench, run_windows

    return run_windows(settings, WindowBench(context, seed, out), console())


@app.command("cache")
def bench_cache(
    sequences: Annotated[int, typer.Option(help="sequences in the trie")] = 100_000,
    tokens: Annotated[int, typer.Option(help="tokens of each")] = 2_000,
    blocks: Annotated[int, typer.Option(help="blocks of the pool")] = 1_000_000,
    repeats: Annotated[int, typer.Option(help="how often each measure is taken; the median counts")] = 3,
    seed: Annotated[int, typer.Option(help="of the ids")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="trie, pool or hashing; may be repeated [all]")] = None,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> None:
    """Trie, block pool and hashes of the library alone: time and memory, compared with their targets."""

    def run() -> int:
        from benchmarks.cache.bench import PARTS, CacheBench, run_cache_bench

        parts = tuple(only) if only else PARTS
        return run_cache_bench(CacheBench(sequences, tokens, blocks, repeats, seed, parts, out), console())

    exit_with(run)


@app.command("match")
@with_settings(unused=set(FLAGS) - {"revision"} | {"open"})
def bench_match(
    settings: Settings,
    repeats: Annotated[int, typer.Option(help="how often each prompt is matched; the median counts")] = 200,
    short: Annotated[int, typer.Option(help="stored sequences of 2,000 tokens")] = 9_990,
    long: Annotated[int, typer.Option(help="stored sequences of 100,000 tokens")] = 10,
    seed: Annotated[int, typer.Option(help="of the texts")] = 0,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """Find the stored text that a prompt of 100,000 tokens continues, among ten thousand."""
    from benchmarks.match import MatchBench, run_match_bench

    options = MatchBench(num_short=short, num_long=long, repeats=repeats, seed=seed, out=out)
    return run_match_bench(settings, options, console())


@app.command("tier")
@with_settings(unused=BENCH_UNUSED | {"secret", "tier"})
def bench_tier(
    settings: Settings,
    tokens: Annotated[int, typer.Option(help="tokens of each prompt")] = 3000,
    repeats: Annotated[int, typer.Option(help="prompts that are measured")] = 15,
    seed: Annotated[int, typer.Option(help="of the prompts")] = 0,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """First tokens of prompts that another replica computed: no object tier, a healthy, a silent, a trickling one."""
    from benchmarks.tier.silence import SilenceBench, run_silence

    need_reuse(settings)
    return run_silence(settings, SilenceBench(tokens, repeats, seed, out), console())


@app.command("tier-agents")
@with_settings(unused=BENCH_UNUSED | {"secret", "tier", "tier_wait_s"})
def bench_tier_agents(
    settings: Settings,
    agents: Annotated[int, typer.Option(help="agents in total; half of them talk with both replicas")] = 1000,
    rounds: Annotated[int, typer.Option(help="turns of each agent with a replica")] = 2,
    tokens: Annotated[int, typer.Option(help="of each reply")] = 12,
    seed: Annotated[int, typer.Option(help="of the texts")] = 0,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """Many agents through one object tier, written by two replicas at once: none lost, each block there once."""
    from benchmarks.tier.agents import AgentsBench, run_agents

    need_reuse(settings)
    return run_agents(settings, AgentsBench(agents, rounds, tokens, seed, out), console())


@app.command("structured")
@with_settings(unused=BENCH_UNUSED)
def bench_structured(
    settings: Settings,
    schemas: Annotated[int, typer.Option(help="random schemas, each with a prompt of its own")] = 1000,
    seed: Annotated[int, typer.Option(help="of the schemas and the prompts")] = 0,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """Replies of random JSON schemas: whether each is valid, and what share of the time the masks take."""
    from benchmarks.structured import StructuredBench, run_structured_bench

    return run_structured_bench(settings, StructuredBench(schemas, seed, out), console())


@app.command("multiple-choice")
@with_settings(unused=BENCH_UNUSED)
def bench_multiple_choice(
    settings: Settings,
    lm_eval: Annotated[str, typer.Option(help="lm-eval's command, on the PATH or with its path")] = "lm_eval",
    questions: Annotated[int, typer.Option(help="of four choices each")] = 100,
    shots: Annotated[int, typer.Option(help="examples before each question")] = 5,
    seed: Annotated[int, typer.Option(help="of questions and examples")] = 0,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """lm-eval's multiple choice against a server and through transformers: equal results, and what scores cost."""
    from benchmarks.multiple_choice import ChoiceBench, run_choice_bench

    return run_choice_bench(settings, ChoiceBench(lm_eval, questions, shots, seed, out), console())


@app.command("front")
def bench_front(
    histories: Annotated[int, typer.Option(help="on each tokenizer")] = 200,
    tokens: Annotated[int, typer.Option(help="of each first reply")] = 96,
    tokenizer: Annotated[list[str] | None, typer.Option(help="one of seven; may be repeated [all]")] = None,
    seed: Annotated[int, typer.Option(help="of texts, replies and weights")] = 0,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> None:
    """Histories sent back as text, with and without a front: what the server that computes reuses of them."""

    def run() -> int:
        from benchmarks.front.bench import FrontBench, run_front
        from benchmarks.front.models import KINDS

        return run_front(FrontBench(histories, tokens, tuple(tokenizer or KINDS), seed, out), console())

    exit_with(run)


app.command("kernels")(bench_kernels)
app.command("loads")(bench_loads)
app.command("encryption")(bench_encryption)
app.command("llama-slots")(bench_llama_slots)
app.command("llama-cuts")(bench_llama_cuts)
app.command("llama-faults")(bench_llama_faults)
app.command("llama-kills")(bench_llama_kills)
app.command("llama-states")(bench_llama_states)
app.command("wear")(bench_wear)
