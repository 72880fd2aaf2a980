"""Requests of the arms of `rekindle bench engine`, and their measurements.

First tokens are timed by the caller, from `submit` to the result: they include matching, tokenising, loading and the
queue.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rekindle.engine.api import Engine
from rekindle.engine.types import GenerationRequest, Report
from rekindle.errors import RekindleError
from rekindle.model.checkpoint import Source
from rekindle.model.params import SamplingParams
from rekindle.text.prompt import PromptEncoder
from rekindle_lab.bench.engine.job import Job
from rekindle_lab.bench.workload import Workload
from rekindle_lab.record import Measurement

ARM = "rekindle"
WARM_UP_TOKENS = 150
SPARE_TOKENS = 8  # texts are cut between words, not at exact token counts


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: seconds until its first token, and the engine's report of reuse."""

    seconds: float
    report: Report


def clamped(job: Job, max_context: int) -> Job:
    """Return the job with a context that leaves room for extension and reply."""
    most = max_context - job.extension - job.decode_tokens - SPARE_TOKENS
    if most < 4 * job.extension:
        raise RekindleError(f"a context of {max_context} tokens is too short to measure in")
    return replace(job, context=min(job.context, most))


def workload_of(job: Job) -> Workload:
    """Return the texts for this job's model; the same in every process."""
    settings = job.settings().model
    directory = Source.find(settings.model, settings.revision).fetch()
    return Workload(PromptEncoder.from_dir(directory), context=job.context, seed=job.seed)


def request(text: str, agent: str | None, max_tokens: int) -> GenerationRequest:
    """Build a greedy request; without an agent it neither reads nor writes the cache."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerationRequest(text=text, agent=agent, params=params, reuse=None if agent else "off")


def first_token(engine: Engine, text: str, agent: str | None) -> Sample:
    """Request one token and wait for it."""
    began = time.perf_counter()
    result = engine.submit(request(text, agent, 1)).result()
    return Sample(time.perf_counter() - began, result.report)


def warm_up(engine: Engine, workload: Workload) -> None:
    """Send one short request that stores nothing, so that first uses of kernels and allocators are not measured."""
    text = workload.extended("warm up", WARM_UP_TOKENS, -1)
    engine.submit(request(text, None, 4)).result()


def measurement(measure: str, samples: Sequence[Sample]) -> Measurement:
    """Build the measurement of first tokens of one kind, with token counts of the last request and all outcomes."""
    report = samples[-1].report
    detail = {
        "outcomes": sorted({sample.report.outcome for sample in samples}),
        "prompt_tokens": report.prompt_tokens,
        "hot_tokens": report.hot_tokens,
        "warm_tokens": report.warm_tokens,
        "computed_tokens": report.computed_tokens,
        "timings": report.as_dict()["timings"],
    }
    return Measurement(measure, ARM, "s", tuple(sample.seconds for sample in samples), detail)
