"""Our arms of `rekindle bench engine`: each measures one engine in this process and yields its measurements.

Every measured request runs as an agent forked for it, so each repeat finds the same state as the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rekindle.engine.api import Engine
from rekindle.errors import RekindleError
from rekindle_lab.bench.engine.job import Job
from rekindle_lab.bench.engine.requests import ARM, Sample, clamped, first_token, measurement, warm_up, workload_of
from rekindle_lab.bench.engine.streams import decoding
from rekindle_lab.bench.memory import drop_file_cache, measured_peak
from rekindle_lab.bench.workload import Workload
from rekindle_lab.record import Measurement

SHARES = (0.25, 0.5, 0.75)
WARM_NUMBERS = {"cached": 1_000, "evicted": 2_000}  # of the first extension after a restart


def hot(job: Job) -> Iterator[Measurement]:
    """Measure what fits in one process: cold with and without the store, hot, decoding, the arena, as its rows say."""
    with ExitStack() as stack:
        # Repeated requests would be continued from the replies before: `benchmarks speculation` measures that.
        engine = stack.enter_context(Engine(job.settings(speculate="off")))
        unsaved = None
        if "saving" in job.rows:
            unsaved = stack.enter_context(Engine(job.settings(store="off", speculate="off")))
        job = clamped(job, engine.max_context)
        workload = workload_of(job)
        for each in filter(None, (engine, unsaved)):
            warm_up(each, workload)
        yield from cold(job, engine, unsaved, workload)
        yield arena_bytes(engine)
        fork_for_restarts(job, engine)
        if "hot" in job.rows:
            yield from hot_again(job, engine, workload)
        if "diverge" in job.rows:
            yield from diverged(job, engine, workload)
        if "decode" in job.rows:
            yield from decoding(job, engine, workload)
        if not engine.flush():
            raise RekindleError("the store did not save the turns in time: the warm arms would be cold")


def fork_for_restarts(job: Job, engine: Engine) -> None:
    """Fork the base agent for every warm request, before it learns more."""
    for kind in WARM_NUMBERS if "warm" in job.rows else ():
        for number in range(job.repeats):
            engine.agent("base-0").fork(f"warm-{kind}-{number}")


def hot_again(job: Job, engine: Engine, workload: Workload) -> Iterator[Measurement]:
    """Measure prompts that continue the base text, what they write, and the base text again."""
    base, numbers = workload.base(0), range(job.repeats)
    texts = [workload.extended(base, job.extension, number) for number in numbers]
    before = written(engine)
    extended = on_forks(engine, "extend", texts)
    yield measurement("hot EXTEND", extended)
    yield from bytes_of_turns(engine, before, extended)
    yield measurement("hot EXACT", [first_token(engine, base, "base-0") for _ in numbers])


def diverged(job: Job, engine: Engine, workload: Workload) -> Iterator[Measurement]:
    """Measure prompts that leave the base text on the way."""
    base = workload.base(0)
    for share in SHARES:
        texts = [workload.diverged(base, share, number) for number in range(job.repeats)]
        yield measurement(f"DIVERGE at {share:.0%}", on_forks(engine, f"diverge-{share:.0%}", texts))


def cold(job: Job, engine: Engine, unsaved: Engine | None, workload: Workload) -> Iterator[Measurement]:
    """Measure new prompts, alternately with a store and, if given, without: the difference is the cost of saving."""
    saved: list[Sample] = []
    plain: list[Sample] = []
    for number in range(job.num_cold):
        text = workload.base(number)
        pairs = [(engine, saved)] if unsaved is None else [(engine, saved), (unsaved, plain)]
        for each, samples in pairs if number % 2 == 0 else reversed(pairs):
            samples.append(first_token(each, text, f"base-{number}"))
        engine.flush()
    found = measurement("cold", saved)
    yield replace(found, detail={**found.detail, "context": job.context})
    if not plain:
        return
    yield measurement("cold, nothing saved", plain)
    overhead = [100 * (a.seconds / b.seconds - 1) for a, b in zip(saved, plain, strict=True)]
    yield Measurement("save overhead on cold", ARM, "%", tuple(overhead))


def on_forks(engine: Engine, name: str, texts: Sequence[str]) -> list[Sample]:
    """Measure first tokens of texts, each requested by its own fork of the base agent."""
    samples = []
    for number, text in enumerate(texts):
        engine.agent("base-0").fork(f"{name}-{number}")
        samples.append(first_token(engine, text, f"{name}-{number}"))
        engine.flush()  # writes after one prompt must not slow down the next
    return samples


def written(engine: Engine) -> dict[str, int]:
    """Return the bytes of records and of the index that the store has written, once nothing waits to be."""
    engine.flush()
    store = engine.stats().store
    assert store is not None, "these arms have a store"
    return {"records": store["bytes_written"], "index": store["index_bytes_written"]}


def bytes_of_turns(engine: Engine, before: dict[str, int], turns: Sequence[Sample]) -> Iterator[Measurement]:
    """Return bytes written for each turn, and those of the KV that it computed."""
    layout = engine.spec.layout
    for kind, num_bytes in written(engine).items():
        values = ((num_bytes - before[kind]) / len(turns),)
        yield Measurement(f"a turn of hot EXTEND writes, {kind}", ARM, "bytes", values)
    token_bytes = layout.kv_block_bytes / layout.block_tokens
    new = tuple(turn.report.computed_tokens * token_bytes for turn in turns)
    yield Measurement("KV of its new tokens", ARM, "bytes", new, {"block_bytes": layout.kv_block_bytes})


def arena_bytes(engine: Engine) -> Measurement:
    """Measure bytes of hot memory per token of its capacity."""
    stats = engine.stats()
    num_tokens = stats.num_blocks * engine.spec.layout.block_tokens
    detail = {"num_blocks": stats.num_blocks, "formats": engine.spec.layout.formats()}
    return Measurement("KV bytes per token", ARM, "bytes", (stats.hot_bytes / num_tokens,), detail)


def warm(job: Job) -> Iterator[Measurement]:
    """Measure the first EXTEND after a restart: the store has just been opened; `variant` "evicted" reads the disk."""
    with Engine(job.settings()) as engine:
        workload = workload_of(job)
        # Words that no earlier process used: their blocks must not be on disk already.
        text = workload.extended(workload.base(0), job.extension, WARM_NUMBERS[job.variant] + job.number)
        warm_up(engine, workload)
        if job.variant == "evicted":
            drop_file_cache(Path(job.flags["store"]))
        sample = first_token(engine, text, f"warm-{job.variant}-{job.number}")
        yield measurement(f"warm EXTEND, files {job.variant}", [sample])


def memory(job: Job) -> Iterator[Measurement]:
    """Measure a cold prompt's peak memory above the loaded engine's, in chunks or (`variant` "one piece") at once."""
    one_piece = {"max_chunk_tokens": job.context, "max_stall_s": 1e6}
    changes = one_piece if job.variant == "one piece" else {}
    with Engine(job.settings(store="off", **changes)) as engine:
        workload = workload_of(job)
        text = workload.base(0)
        warm_up(engine, workload)
        before, peak = measured_peak(lambda: first_token(engine, text, "base-0"))
    detail = {"resident_before_bytes": before, "peak_bytes": peak}
    yield Measurement(f"peak memory of a cold prompt, {job.variant}", ARM, "MiB", ((peak - before) / 2**20,), detail)
