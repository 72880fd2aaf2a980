"""Arms of `rekindle bench engine` on reuse: what it costs a new prompt, and what it saves of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

from rekindle.engine.api import Engine
from rekindle.errors import RekindleError
from rekindle_lab.bench.engine.job import Job
from rekindle_lab.bench.engine.requests import ARM, Sample, clamped, first_token, measurement, warm_up, workload_of
from rekindle_lab.bench.workload import Workload
from rekindle_lab.record import Measurement

OFF = "reuse off"
NATIVE = "16-bit KV"


def cost(job: Job) -> Iterator[Measurement]:
    """Measure new prompts, alternately with reuse and without, and the memory of two prompts that share their half."""
    with ExitStack() as stack:
        on = stack.enter_context(Engine(job.settings(store="off", speculate="off")))
        off = stack.enter_context(Engine(job.settings(store="off", speculate="off", reuse="off")))
        job = clamped(job, on.max_context)
        workload = workload_of(job)
        for each in (on, off):
            warm_up(each, workload)
        yield from _cold(job, on, off, workload)
        yield _shared_half(job, on, workload)


def _cold(job: Job, on: Engine, off: Engine, workload: Workload) -> Iterator[Measurement]:
    found: dict[str, list[Sample]] = {ARM: [], OFF: []}
    for number in range(job.num_cold):
        text = workload.base(number)
        pairs = [(on, ARM), (off, OFF)]
        for engine, arm in pairs if number % 2 == 0 else reversed(pairs):
            found[arm].append(first_token(engine, text, f"cold-{number}"))
    for arm, samples in found.items():
        yield replace(measurement("cold, reuse on or off", samples), arm=arm)
    overhead = [100 * (a.seconds / b.seconds - 1) for a, b in zip(found[ARM], found[OFF], strict=True)]
    yield Measurement("reuse overhead on cold", ARM, "%", tuple(overhead))


def _shared_half(job: Job, engine: Engine, workload: Workload) -> Measurement:
    """Compare the memory of two prompts with that of the first one twice: at best, a quarter less."""
    saved = []
    for number in range(job.num_cold):
        first = workload.base(100 + number)
        texts = [first, workload.diverged(first, 0.5, number)]
        evicted, used = engine.stats().num_evictions, [engine.stats().used_hot_bytes]
        for place, text in enumerate(texts):
            first_token(engine, text, f"half-{number}-{place}")
            used.append(engine.stats().used_hot_bytes)
        if engine.stats().num_evictions != evicted:
            raise RekindleError("hot memory has no room for the prompts that are measured: give it more")
        saved.append(100 * (1 - (used[2] - used[0]) / (2 * (used[1] - used[0]))))
    return Measurement("memory saved, two prompts that share half", ARM, "%", tuple(saved))


def capacity(job: Job) -> Iterator[Measurement]:
    """Measure how many tokens the same bytes of memory hold in our format and in 16 bits, of blocks of one size."""
    with Engine(job.settings(store="off")) as engine:
        most = engine.stats().hot_bytes
        yield _held(engine, ARM)
    with Engine(job.settings(store="off", kv="bf16", hot_bytes=most)) as engine:
        yield _held(engine, NATIVE)


def _held(engine: Engine, arm: str) -> Measurement:
    stats = engine.stats()
    detail = {"hot_bytes": stats.hot_bytes, "formats": engine.spec.layout.formats()}
    held = stats.num_blocks * engine.spec.layout.block_tokens
    return Measurement("tokens in the same memory", arm, "tokens", (held,), detail)
