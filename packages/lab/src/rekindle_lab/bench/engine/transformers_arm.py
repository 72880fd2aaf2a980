"""The baseline of `rekindle bench engine`: `transformers` alone with a DynamicCache, on the ids of the same texts.

It gets ids, not text, and holds its cache in memory: no matching, no tokenising, no scheduling, no store.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from rekindle.compute.devices import choose_device
from rekindle.model.checkpoint import Source
from rekindle.model.checkpoint_form import DTYPES
from rekindle.model.gguf import gguf_in
from rekindle_lab.bench.engine.job import Job
from rekindle_lab.bench.engine.peer_arm import checked_prompts
from rekindle_lab.bench.engine.requests import WARM_UP_TOKENS, workload_of
from rekindle_lab.bench.memory import measured_peak
from rekindle_lab.record import Measurement

ARM = "transformers"
MOST_STREAMS = 4  # on a CPU: every stream of a batch has its own copy of the context in 16 bits
TIE = 2**-6  # of the largest logit: two steps of bf16


def load(job: Job) -> Any:
    """Load the model with `from_pretrained`, in the requested dtype."""
    settings = job.settings().model
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    directory = Source.find(settings.model, settings.revision).fetch()
    own = gguf_in(directory)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=DTYPES.get(settings.dtype, "auto"), gguf_file=None if own is None else own.name
    )
    return model.to(choose_device(settings).device).eval()


class Baseline:
    """One model; every method is one piece of work to measure."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        device: torch.device = self._model.device
        return device

    def run(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """Compute ids [batch, rows] on top of the cache; return the greedy next tokens [batch]."""
        output = self._model(input_ids=ids.to(self.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens: torch.Tensor = output.logits[:, -1].argmax(dim=-1)
        return tokens.cpu()  # which a card has computed then

    def cold(self, ids: torch.Tensor) -> Any:
        """Return a cache that holds the ids."""
        cache = DynamicCache(config=self._model.config)
        self.run(ids, cache)
        return cache

    def decode(self, token: torch.Tensor, cache: Any, count: int) -> None:
        """Run `count` greedy steps from tokens [batch]."""
        for _ in range(count):
            token = self.run(token[:, None], cache)

    def check(self) -> None:
        """Assert that the model is in eval mode."""
        assert not self._model.training


def as_row(ids: np.ndarray) -> torch.Tensor:
    """Ids [rows] as a batch of one, int64 [1, rows]."""
    return torch.from_numpy(ids.astype(np.int64))[None]


def seconds(work: Callable[[], object]) -> float:
    """Return how long the work took."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def speed(job: Job) -> Iterator[Measurement]:
    """Measure cold, extension, the same prompt again, and decoding, on the ids of our arm's texts."""
    baseline, workload = Baseline(load(job)), workload_of(job)
    base = as_row(workload.ids(workload.base(0)))
    longer = workload.ids(workload.extended(workload.base(0), job.extension, 0))
    extension = as_row(longer[base.shape[1] :])
    with torch.inference_mode():
        baseline.cold(base[:, :WARM_UP_TOKENS])
        times = [seconds(lambda: baseline.cold(base)) for _ in range(job.num_cold)]
        yield Measurement("cold", ARM, "s", tuple(times), {"prompt_tokens": base.shape[1]})
        full = baseline.cold(base) if {"hot", "decode"} & set(job.rows) else None
        if "hot" in job.rows:
            yield from hot(job, baseline, base, extension, full)
        for count in job.streams if "decode" in job.rows else ():
            if baseline.device.type != "cpu" or count <= MOST_STREAMS:
                yield decode(job, baseline, full, base[0, -1:].expand(count))


def hot(job: Job, baseline: Baseline, base: torch.Tensor, extension: torch.Tensor, full: Any) -> Iterator[Measurement]:
    """Measure ids [1, rows] that follow the cache of `base`, and its last id again."""
    without_last = baseline.cold(base[:, :-1])
    times = [on_copy(full, lambda cache: baseline.run(extension, cache)) for _ in range(job.repeats)]
    yield Measurement("hot EXTEND", ARM, "s", tuple(times), {"computed_tokens": extension.shape[1]})
    times = [on_copy(without_last, lambda cache: baseline.run(base[:, -1:], cache)) for _ in range(job.repeats)]
    yield Measurement("hot EXACT", ARM, "s", tuple(times), {"computed_tokens": 1})


def on_copy(cache: Any, work: Callable[[Any], object]) -> float:
    """Return how long work on a copy of the cache took, without the copying."""
    copied = copy.deepcopy(cache)
    return seconds(lambda: work(copied))


def decode(job: Job, baseline: Baseline, full: Any, tokens: torch.Tensor) -> Measurement:
    """Measure tokens per second of a batch in which every sequence has its own copy of the context."""
    count = len(tokens)
    rates = []
    for _ in range(job.repeats):
        cache = copy.deepcopy(full)
        cache.batch_repeat_interleave(count)
        baseline.decode(tokens, cache, 1)  # the first step grows the cache's tensors
        began = time.perf_counter()
        baseline.decode(tokens, cache, job.decode_tokens)
        rates.append(count * job.decode_tokens / (time.perf_counter() - began))
    return Measurement(f"decode, {count} streams", ARM, "tok/s", tuple(rates), {"context": job.context})


def first_tokens(job: Job) -> Iterator[Measurement]:
    """Find the greedy first tokens of the prompts that peers are checked with; where bf16 has ties, all of them."""
    model = load(job)
    found = []
    with torch.inference_mode():
        for ids in checked_prompts(workload_of(job)):
            logits = model(input_ids=as_row(ids).to(model.device), logits_to_keep=1).logits[0, -1].float()
            most = logits.max()
            found.append(torch.nonzero(logits >= most - most.abs() * TIE).flatten().tolist())
    yield Measurement("first tokens", ARM, "tokens", (len(found),), {"tokens": found})


def memory(job: Job) -> Iterator[Measurement]:
    """Measure peak memory of a cold prompt in one piece, above the loaded model's."""
    baseline, workload = Baseline(load(job)), workload_of(job)
    base = as_row(workload.ids(workload.base(0)))
    with torch.inference_mode():
        baseline.cold(base[:, :WARM_UP_TOKENS])
        before, peak = measured_peak(lambda: baseline.cold(base))
    detail = {"resident_before_bytes": before, "peak_bytes": peak}
    yield Measurement("peak memory of a cold prompt, one piece", ARM, "MiB", ((peak - before) / 2**20,), detail)
