"""What is measured of every peer, on the ids of our arm's texts: no tokenising, no matching of texts, no store.

A peer computes the prompt's first token from whatever it reuses of the prompts before. Before anything is timed, its
greedy tokens must be those of `transformers`: one that computes something else fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rekindle.errors import RekindleError
from rekindle_lab.bench.engine.job import Job
from rekindle_lab.bench.engine.peers import Peer
from rekindle_lab.bench.engine.requests import WARM_UP_TOKENS, workload_of
from rekindle_lab.bench.memory import measured_peak
from rekindle_lab.bench.workload import Workload
from rekindle_lab.record import Measurement

NUM_CHECKED = 16  # prompts whose first tokens are compared with those of transformers
CHECKED_TOKENS = 64
FEWEST_SAME = 12
CHECKED_TEXTS = 1_000  # numbers of these texts begin here: none is measured


class PeerModel(Protocol):
    """One engine with its model loaded; it reuses the longest beginning that it still holds of a prompt."""

    @property
    def about(self) -> Mapping[str, Any]:
        """Its version and the settings that matter."""
        ...

    def first_token(self, ids: np.ndarray) -> int:
        """Compute the rest of the prompt [rows]; return the greedy next token."""
        ...

    def decode(self, prompts: Sequence[np.ndarray], count: int, repeats: int) -> list[float]:
        """Return tokens per second of each run of streams that decode `count` tokens; prompts are not timed."""
        ...

    def release(self) -> None:
        """Drop all KV, and its memory where the engine can give it back."""
        ...


Loader = Callable[[Job], PeerModel]


def arm_of(job: Job) -> str:
    """The name of the column: the job's arm is a peer, or a peer and what of it is measured."""
    return Peer(job.arm.removesuffix(" memory"), job.weights).arm


def speed(job: Job, load: Loader) -> Iterator[Measurement]:
    """Measure cold, extension, the same prompt again, and decoding, as the rows say."""
    peer, arm, workload = load(job), arm_of(job), workload_of(job)
    yield agreement(job, peer, arm, workload)
    warm_up(peer, workload)
    base = workload.ids(workload.base(0))
    about = {**peer.about, "prompt_tokens": len(base)}
    times = [seconds(peer, workload.ids(workload.base(number))) for number in range(job.num_cold)]
    yield Measurement("cold", arm, "s", tuple(times), {**about, "did": "new prompts, the cache on"})
    if "hot" in job.rows:
        yield from hot(job, peer, arm, workload, base)
    texts = [workload.ids(workload.base(number)) for number in range(max(job.streams) if "decode" in job.rows else 0)]
    for count in job.streams if texts else ():
        rates = peer.decode(texts[:count], job.decode_tokens, job.repeats)
        yield Measurement(f"decode, {count} streams", arm, "tok/s", tuple(rates), {**about, "context": job.context})


def hot(job: Job, peer: PeerModel, arm: str, workload: Workload, base: np.ndarray) -> Iterator[Measurement]:
    """Measure prompts that continue `base` (ids [rows]), and that one again."""
    numbers, about = range(job.repeats), {**peer.about, "prompt_tokens": len(base)}
    peer.first_token(base)
    longer = [workload.ids(workload.extended(workload.base(0), job.extension, number)) for number in numbers]
    times = [seconds(peer, ids) for ids in longer]
    did = f"prompts of {len(longer[-1]) - len(base)} more tokens than one in its cache"
    yield Measurement("hot EXTEND", arm, "s", tuple(times), {**about, "did": did})
    peer.first_token(base)
    times = [seconds(peer, base) for _ in numbers]
    yield Measurement("hot EXACT", arm, "s", tuple(times), {**about, "did": "a prompt in its cache"})


def memory(job: Job, load: Loader) -> Iterator[Measurement]:
    """Measure a cold prompt's peak memory above the loaded model's; the KV of the prompt counts."""
    peer, arm, workload = load(job), arm_of(job), workload_of(job)
    warm_up(peer, workload)
    peer.release()
    before, peak = measured_peak(lambda: peer.first_token(workload.ids(workload.base(0))))
    detail = {**peer.about, "resident_before_bytes": before, "peak_bytes": peak}
    yield Measurement("peak memory of a cold prompt, in chunks", arm, "MiB", ((peak - before) / 2**20,), detail)


def checked_prompts(workload: Workload) -> list[np.ndarray]:
    """Return the ids of the prompts whose first tokens are compared."""
    return [workload.ids(workload.base(CHECKED_TEXTS + number))[:CHECKED_TOKENS] for number in range(NUM_CHECKED)]


def agreement(job: Job, peer: PeerModel, arm: str, workload: Workload) -> Measurement:
    """Count the first tokens that are among those of transformers; RekindleError if the peer computes another model."""
    tokens = [peer.first_token(ids) for ids in checked_prompts(workload)]
    same = sum(token in fits for token, fits in zip(tokens, job.expected, strict=True))
    if same < FEWEST_SAME:
        raise RekindleError(
            f"{arm} computes another model: {same} of {NUM_CHECKED} first tokens are those of transformers"
        )
    return Measurement(f"first tokens as of transformers, of {NUM_CHECKED}", arm, "tokens", (same,), dict(peer.about))


def warm_up(peer: PeerModel, workload: Workload) -> None:
    """Compute a short prompt, so that first uses of kernels and allocators are not measured."""
    peer.first_token(workload.ids(workload.extended("warm up", WARM_UP_TOKENS, -1)))


def seconds(peer: PeerModel, ids: np.ndarray) -> float:
    """Return how long the first token of a prompt took."""
    began = time.perf_counter()
    peer.first_token(ids)
    return time.perf_counter() - began
