"""Those commands of `python -m benchmarks` that measure memories: in front of a llama-server, and what they write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from rekindle.cli.console import console
from rekindle.cli.settings import BENCH_UNUSED, exit_with, with_settings
from rekindle.config import Settings
from rekindle_lab.cli.benches import need_reuse


@with_settings(only=("threads",))
def bench_encryption(
    settings: Settings,
    model: Annotated[str | None, typer.Argument(help="the model [bundled]")] = None,
    context: Annotated[int, typer.Option(help="tokens of the conversation")] = 2048,
    extension: Annotated[int, typer.Option(help="new tokens of a turn")] = 16,
    repeats: Annotated[int, typer.Option(help="turns of each arm; the median counts")] = 15,
    seed: Annotated[int, typer.Option(help="of the texts")] = 0,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """First tokens from disk, and their CPU time, with an encrypted store and with a clear one, in turn."""
    from benchmarks.encryption import EncryptionBench, run_encryption

    chosen = replace(settings, model=replace(settings.model, model=model))
    return run_encryption(chosen, EncryptionBench(context, extension, repeats, seed, out), console())


def bench_llama_slots(
    model: Annotated[Path, typer.Argument(help="a GGUF file")],
    agents: Annotated[int, typer.Option(help="agents that take turns")] = 10,
    slots: Annotated[int, typer.Option(help="of llama-server")] = 4,
    context: Annotated[int, typer.Option(help="tokens of a slot")] = 2048,
    length: Annotated[
        list[int] | None, typer.Option(help="tokens of a history to time turns on; may be repeated")
    ] = None,
    flags: Annotated[str, typer.Option(help="more of llama-server's flags")] = "-t 1",
    reasoning: Annotated[int, typer.Option(help="tokens that begin a reply and that later prompts leave out")] = 0,
) -> None:
    """More agents than slots of a llama-server, with Rekindle in front and without, killed between rounds."""
    from benchmarks.llama_slots import SlotsBench, run_slots_bench

    bench = SlotsBench(model, agents, slots, context, flags=flags, lengths=tuple(length or ()), reasoning=reasoning)
    exit_with(lambda: run_slots_bench(bench, console()))


def bench_llama_states(
    model: Annotated[Path, typer.Argument(help="a GGUF file")],
    length: Annotated[list[int] | None, typer.Option(help="tokens of a state; may be repeated [1024 4096]")] = None,
    flags: Annotated[str, typer.Option(help="more of llama-server's flags")] = "-t 1",
) -> int:
    """What reading and restoring the state of a slot costs as it grows, and how long other slots stand still for it."""
    from benchmarks.llama_states import StatesBench, run_states_bench

    return run_states_bench(StatesBench(model, tuple(length or (1024, 4096)), flags), console())


def bench_llama_kills(
    model: Annotated[Path, typer.Argument(help="a GGUF file")],
    turns: Annotated[int, typer.Option(help="of all agents")] = 1000,
    agents: Annotated[int, typer.Option(min=6, help="agents that take turns")] = 10,
    slots: Annotated[int, typer.Option(help="of llama-server")] = 4,
    context: Annotated[int, typer.Option(help="tokens of a slot")] = 1024,
    seed: Annotated[int, typer.Option(help="of what happens")] = 0,
    flags: Annotated[str, typer.Option(help="more of llama-server's flags")] = "-t 1 -ub 1",
    hot_bytes: Annotated[str, typer.Option(help="of Rekindle's memory")] = "128MiB",
    minutes: Annotated[float, typer.Option(help="after which no more turns are taken")] = 600,
    at_once: Annotated[int, typer.Option(min=1, max=3, help="most agents that talk at once")] = 3,
) -> None:
    """Turns of mixed agents with random kills: every reply against that of a llama-server which nobody kills."""
    from benchmarks.llama_kills import KillsBench, run_kills_bench
    from benchmarks.llama_slots import SlotsBench

    bench = SlotsBench(model, agents, slots, context, flags=flags, hot_bytes=hot_bytes)
    exit_with(lambda: run_kills_bench(KillsBench(bench, turns, seed, minutes, at_once), console()))


def bench_llama_faults(
    model: Annotated[Path, typer.Argument(help="a GGUF file")],
    faults: Annotated[int, typer.Option(help="in files of records")] = 1000,
    a_turn: Annotated[int, typer.Option(min=1, help="faults before each turn: with fewer, more is restored")] = 4,
    agents: Annotated[int, typer.Option(help="agents that take turns at one slot")] = 4,
    context: Annotated[int, typer.Option(help="tokens of the slot")] = 640,
    seed: Annotated[int, typer.Option(help="of what happens")] = 0,
    flags: Annotated[str, typer.Option(help="more of llama-server's flags")] = "-t 1 -ub 1",
    minutes: Annotated[float, typer.Option(help="after which no more faults are done")] = 600,
) -> None:
    """Faults in what was written of llama-server's slots: computed, never wrong, and never a crash of llama-server."""
    from benchmarks.llama_faults import Faults, run_faults_bench
    from benchmarks.llama_slots import SlotsBench

    bench = SlotsBench(model, agents, 1, context, flags=flags, hot_bytes="64MiB")
    exit_with(lambda: run_faults_bench(bench, faults, Faults(Random(seed), a_turn), minutes, console()))


def bench_llama_cuts(
    model: Annotated[Path, typer.Argument(help="a GGUF file")],
    cut: Annotated[list[int] | None, typer.Option(help="tokens; may be repeated [50 300 450]")] = None,
    words: Annotated[int, typer.Option(help="with which a conversation begins")] = 500,
    context: Annotated[int, typer.Option(help="tokens of a slot")] = 2048,
    reply: Annotated[int, typer.Option(help="tokens that are compared")] = 24,
    seed: Annotated[int, typer.Option(help="of the words")] = 0,
    flags: Annotated[str, typer.Option(help="more of llama-server's flags")] = "-t 1",
) -> None:
    """Conversations that go on or are cut back after a restart, compared with slots that were never restarted."""
    from benchmarks.llama_cuts import CutsBench, run_cuts_bench
    from benchmarks.llama_slots import SlotsBench

    slots = SlotsBench(model, slots=2, context=context, reply=reply, flags=flags)
    bench = CutsBench(slots, tuple(cut or (50, 300, 450)), words, seed)
    exit_with(lambda: run_cuts_bench(bench, console()))


@with_settings(unused=BENCH_UNUSED | {"save_unnamed"})
def bench_wear(
    settings: Settings,
    prompts: Annotated[int, typer.Option(help="prompts that are asked once")] = 100,
    conversations: Annotated[int, typer.Option(help="conversations of several turns")] = 5,
    turns: Annotated[int, typer.Option(help="of a conversation")] = 4,
    words: Annotated[int, typer.Option(help="of a prompt, and of the system text")] = 150,
    seed: Annotated[int, typer.Option(help="of the words")] = 0,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """Bytes written to the disk for prompts that are asked once and for conversations, unnamed and as agents."""
    from benchmarks.wear import WearBench, run_wear

    need_reuse(settings)
    return run_wear(settings, WearBench(prompts, conversations, turns, words, seed, out), console())
