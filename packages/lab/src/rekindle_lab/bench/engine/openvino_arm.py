"""OpenVINO GenAI as an arm: `ContinuousBatchingPipeline` on a GGUF file, with its prefix cache.

KV and arithmetic are as OpenVINO chooses for the processor (KV in 8 bits, bf16 where there are instructions for it).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from itertools import count
from typing import Any

import numpy as np

from rekindle.errors import RekindleError
from rekindle_lab.bench.engine.job import Job

CHUNK = 256  # its default
SETTLED = 2  # tokens of each stream before a rate is taken
SPARE = 1024  # tokens that streams may be ahead of the last one, whose prompt may have left the prefix cache


class OpenVino:
    """One pipeline; requests are numbered."""

    def __init__(self, file: str, threads: int | None) -> None:
        import openvino
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = CHUNK
        properties = {} if threads is None else {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = genai.ContinuousBatchingPipeline(file, scheduler, "CPU", properties)
        self._genai = genai
        self._tensor = openvino.Tensor
        self._numbers = count()

    @property
    def about(self) -> Mapping[str, Any]:
        """Its version and the settings that matter."""
        version = metadata.version("openvino-genai")
        return {"engine": f"openvino-genai {version}, continuous batching, prefix cache, chunks of {CHUNK} tokens"}

    def first_token(self, ids: np.ndarray) -> int:
        """Compute the rest of the prompt [rows]; return the greedy next token."""
        stream = Stream(self._add(ids, 1))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            stream.read()
        return stream.tokens[0]

    def decode(self, prompts: Sequence[np.ndarray], count: int, repeats: int) -> list[float]:
        """Return tokens per second of requests at once: from all having begun until each has `count` more."""
        for ids in prompts:
            self.first_token(ids)  # computed here unless it is in the prefix cache
        return [self._rate(prompts, count) for _ in range(repeats)]

    def _rate(self, prompts: Sequence[np.ndarray], count: int) -> float:
        streams = [Stream(self._add(ids, count + SETTLED + SPARE)) for ids in prompts]
        self._step_to(streams, [SETTLED] * len(streams))
        before = [len(stream.tokens) for stream in streams]
        began = time.perf_counter()
        self._step_to(streams, [tokens + count for tokens in before])
        elapsed = time.perf_counter() - began
        after = sum(len(stream.tokens) for stream in streams)
        for stream in streams:
            stream.handle.cancel()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return (after - sum(before)) / elapsed

    def release(self) -> None:
        """Keep what the prefix cache holds: it grows with what is computed and cannot be emptied."""

    def check(self) -> None:
        """Assert that no request is left."""
        assert not self._pipeline.has_non_finished_requests(), "a request of a measure before still runs"

    def _add(self, ids: np.ndarray, tokens: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        return self._pipeline.add_request(next(self._numbers), self._tensor(ids[None].astype(np.int64)), config)

    def _step_to(self, streams: Sequence[Stream], wanted: Sequence[int]) -> None:
        while any(len(stream.tokens) < tokens for stream, tokens in zip(streams, wanted, strict=True)):
            if not self._pipeline.has_non_finished_requests():
                raise RekindleError("a stream of OpenVINO ended before the others had begun: take a smaller --context")
            self._pipeline.step()
            for stream in streams:
                stream.read()


class Stream:
    """A request's handle and the tokens that were read of it."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.tokens: list[int] = []

    def read(self) -> None:
        """Take the tokens that are there."""
        while self.handle.can_read():
            for output in self.handle.read().values():
                self.tokens.extend(output.generated_ids)

    def check(self) -> None:
        """Assert that all tokens are ids."""
        assert all(token >= 0 for token in self.tokens), "a token that is no id"


def load(job: Job) -> OpenVino:
    """Load the job's file."""
    return OpenVino(job.file, job.settings().model.threads)
