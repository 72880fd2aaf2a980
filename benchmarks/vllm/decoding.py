"""How fast vLLM decodes with one kind of KV: a process of its own, in an environment of its own, run by `measured`.

The process, `python -m benchmarks.vllm.decoding`, reads a job as JSON from its input, and writes a line of JSON first
with how many tokens of KV fit, then for each load. Only what both environments have is imported here.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.vllm.engine import MARK, engine_of, flush, run_job

OF_CONNECTOR = ("native", "q4h")  # kinds of KV that are records of ours; vLLM itself keeps its own precision
GPU: dict[str, Any] = {
    "enforce_eager": False,
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.9,
    # Without compilation, whose minutes would be most of a short run; with the graphs that decoding lives on.
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts at once, of so many tokens each."""

    streams: int
    context: int


@dataclass(frozen=True, slots=True)
class Speed:
    """One load: seconds until all prompts were computed, and of each step that decoded a token of every stream."""

    load: Load
    prefill_s: float
    step_s: list[float]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Tokens of KV that fit, and the loads that do; `failed` is what the process wrote when it ended early."""

    capacity: int
    speeds: list[Speed]
    failed: str | None


def measured(kind: str, loads: list[Load], *, tokens: int, directory: str, python: str, model: str) -> Decoded:
    """Serve all loads that fit in one new process whose KV is of this kind: a `kv_cache_dtype`, or one of records."""
    job = {
        "kind": kind,
        "dir": directory if kind in OF_CONNECTOR else None,
        "loads": [asdict(load) for load in loads],
        "tokens": tokens,
        "model": model,
    }
    done = run_job(python, "benchmarks.vllm.decoding", job)
    capacity = done.lines[0]["capacity"] if done.lines else 0
    speeds = [Speed(Load(**line["load"]), line["prefill_s"], line["step_s"]) for line in done.lines[1:]]
    return Decoded(capacity, speeds, done.log if done.status else None)


def main() -> None:
    """Serve the job on the standard input."""
    job = json.load(sys.stdin)
    loads, tokens = [Load(**load) for load in job["loads"]], int(job["tokens"])
    llm = _engine(job, loads, tokens)
    cache = llm.llm_engine.vllm_config.cache_config
    capacity = int(cache.num_gpu_blocks) * int(cache.block_size)
    print(MARK + json.dumps({"capacity": capacity}), flush=True)
    for number, load in enumerate(loads):
        if load.streams * (load.context + tokens + int(cache.block_size)) < capacity:
            print(MARK + json.dumps(asdict(_serve(llm, load, tokens, seed=number))), flush=True)
    flush()


def _engine(job: dict[str, Any], loads: list[Load], tokens: int) -> Any:
    import torch

    kind = job["kind"]
    given: dict[str, Any] = {
        "model": job["model"],
        "max_model_len": max(load.context for load in loads) + tokens + 1,
        "max_num_seqs": max(load.streams for load in loads),
        "max_num_batched_tokens": 2048,
    }
    if kind not in OF_CONNECTOR:
        given["kv_cache_dtype"] = kind
    if torch.cuda.is_available():
        sizes = sorted({load.streams for load in loads})
        graphs = GPU["compilation_config"] | {"cudagraph_capture_sizes": sizes}
        given |= GPU | {"compilation_config": graphs}
    return engine_of(job["dir"], kind, given)


def _serve(llm: Any, load: Load, tokens: int, *, seed: int) -> Speed:
    """Compute the prompts, then the same again, hot: all streams decode from its first steps on."""
    import numpy as np

    ids = np.random.default_rng(seed).integers(300, 4000, (load.streams, load.context)).tolist()
    begun = time.perf_counter()
    _replies(llm, ids, 1)
    prefill_s = time.perf_counter() - begun
    return Speed(load, prefill_s, _replies(llm, ids, tokens))


def _replies(llm: Any, prompts: list[list[int]], tokens: int) -> list[float]:
    """Reply to all prompts at once; return the seconds of each step in which every one of them got a token."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for number, ids in enumerate(prompts):
        engine.add_request(f"{time.monotonic_ns()}-{number}", {"prompt_token_ids": ids}, params)
    counts: dict[str, int] = {}
    steps: list[float] = []
    before = time.perf_counter()
    while engine.has_unfinished_requests():
        grown = 0
        for output in engine.step():
            count = len(output.outputs[0].token_ids)
            grown += count > counts.get(output.request_id, 0) > 0
            counts[output.request_id] = count
        now = time.perf_counter()
        if grown == len(prompts):
            steps.append(now - before)
        before = now
    return steps


if __name__ == "__main__":
    main()
