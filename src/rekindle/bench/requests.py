"""Requests as the arms of `rekindle bench engine` send them, and what they say about the answer.

First tokens are taken by the caller, from `submit` to the first delta: matching, tokenising, loading and the queue are
in them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rekindle.bench.job import Job
from rekindle.bench.workload import Workload
from rekindle.engine.api import Engine
from rekindle.engine.types import GenerationRequest, Report
from rekindle.errors import RekindleError
from rekindle.harness.record import Measurement
from rekindle.model.checkpoint import Source
from rekindle.model.params import SamplingParams
from rekindle.text.prompt import PromptEncoder

ARM = "rekindle"
WARM_UP_TOKENS = 150
SPARE_TOKENS = 8  # words do not end where tokens are wanted


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: seconds until its first token, and what the engine says it reused."""

    seconds: float
    report: Report


def clamped(job: Job, max_context: int) -> Job:
    """The job with a context that leaves room for extension and reply."""
    most = max_context - job.extension - job.decode_tokens - SPARE_TOKENS
    if most < 4 * job.extension:
        raise RekindleError(f"a context of {max_context} tokens is too short to measure in")
    return replace(job, context=min(job.context, most))


def workload_of(job: Job) -> Workload:
    """The texts of this job's model; the same in every process."""
    settings = job.settings().model
    directory = Source.find(settings.model, settings.revision).fetch()
    return Workload(PromptEncoder.from_dir(directory), context=job.context, seed=job.seed)


def request(text: str, agent: str | None, max_tokens: int) -> GenerationRequest:
    """A greedy request; without an agent one that neither reads nor leaves anything."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerationRequest(text=text, agent=agent, params=params, reuse=None if agent else "off")


def first_token(engine: Engine, text: str, agent: str | None) -> Sample:
    """Ask for one token and wait for it."""
    began = time.perf_counter()
    result = engine.submit(request(text, agent, 1)).result()
    return Sample(time.perf_counter() - began, result.report)


def warm_up(engine: Engine, workload: Workload) -> None:
    """One short request that leaves nothing behind: first uses of kernels and allocators are not what is measured."""
    text = workload.extended("warm up", WARM_UP_TOKENS, -1)
    engine.submit(request(text, None, 4)).result()


def measurement(measure: str, samples: Sequence[Sample]) -> Measurement:
    """First tokens of one kind, with the tokens and the outcome of the last request."""
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
