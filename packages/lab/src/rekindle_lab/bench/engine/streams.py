"""Parallel decoding streams: tokens per second, and the engine's overhead on the model's forward pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rekindle.engine.api import Engine
from rekindle.engine.types import EngineStats
from rekindle_lab.bench.engine.job import Job
from rekindle_lab.bench.engine.requests import ARM, first_token, request
from rekindle_lab.bench.workload import Workload
from rekindle_lab.record import Measurement

MARGIN = 2  # tokens not counted at each end of a stream


def decoding(job: Job, engine: Engine, workload: Workload) -> Iterator[Measurement]:
    """Measure streams with separate contexts, and the engine's overhead per step with the most streams."""
    texts = [workload.base(number) for number in range(max(job.streams))]
    for number, text in enumerate(texts):
        if number >= job.num_cold:  # the first ones exist from the cold prompts
            first_token(engine, text, f"base-{number}")
    engine.flush()
    for count in job.streams:
        runs = [Streams(job, engine, texts[:count]).run() for _ in range(job.repeats)]
        rates = tuple(run.tokens_per_s for run in runs if run.tokens_per_s is not None)
        if rates:
            yield Measurement(f"decode, {count} streams", ARM, "tok/s", rates, {"context": job.context})
        if count == max(job.streams):
            overheads = tuple(run.overhead_ms for run in runs)
            yield Measurement("engine outside the forward, per step", ARM, "ms", overheads, {"streams": count})


@dataclass(frozen=True, slots=True)
class Decoded:
    """One run of streams while all of them decoded; no rate if the first ended before the last began."""

    tokens_per_s: float | None
    overhead_ms: float


class Streams:
    """Agents that resend a known prompt and decode in parallel; a thread reads each."""

    def __init__(self, job: Job, engine: Engine, texts: Sequence[str]) -> None:
        self._engine = engine
        self._texts = texts
        self._num_tokens = job.decode_tokens + 2 * MARGIN
        self._times: list[list[float]] = [[] for _ in texts]
        self._decodes = threading.Semaphore(0)
        self._ends = threading.Event()

    def run(self) -> Decoded:
        """Run to the end; count only what lies between the last stream's start and the first stream's end."""
        threads = [threading.Thread(target=self._read, args=(index,)) for index in range(len(self._texts))]
        for thread in threads:
            thread.start()
        for _ in threads:
            self._decodes.acquire()
        before = self._engine.stats()
        self._ends.wait()
        after = self._engine.stats()
        for thread in threads:
            thread.join()
        return Decoded(self._rate(), _overhead_ms(before, after))

    def _read(self, index: int) -> None:
        times = self._times[index]
        try:
            for _ in self._engine.submit(request(self._texts[index], f"base-{index}", self._num_tokens)):
                times.append(time.perf_counter())
                if len(times) == MARGIN:
                    self._decodes.release()
                if len(times) == self._num_tokens - MARGIN:
                    self._ends.set()
        finally:
            self._ends.set()
            self._decodes.release()  # one release too many if it had begun: nothing waits for it

    def _rate(self) -> float | None:
        inner = [times[MARGIN - 1 : len(times) - 1] for times in self._times]
        begin, end = max(times[0] for times in inner), min(times[-1] for times in inner)
        return sum(begin < at <= end for times in inner for at in times) / (end - begin) if begin < end else None

    def check(self) -> None:
        """Assert that every stream has a list of times, in order."""
        assert len(self._times) == len(self._texts), "a stream without times"
        assert all(times == sorted(times) for times in self._times), "a stream's times run backwards"


def _overhead_ms(before: EngineStats, after: EngineStats) -> float:
    steps = after.num_steps - before.num_steps
    total = after.step_overhead_ms * after.num_steps - before.step_overhead_ms * before.num_steps
    return total / max(1, steps)
