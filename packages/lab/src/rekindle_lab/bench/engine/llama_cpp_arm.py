"""llama.cpp as an arm: `llama_decode` of llama-cpp-python on a GGUF file, without its sampler and server.

Single prompts continue the one sequence that a context holds, as its server's slots do. Streams decode in a context of
as many sequences, one batch a step, each on its own copy of the first prompt's KV. KV is fp16, llama.cpp's default.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from rekindle.errors import RekindleError
from rekindle_lab.bench.engine.job import Job

CHUNK = 512  # tokens of a batch, llama.cpp's default
SPARE = 64


class Context:
    """KV of some sequences of equal room, and steps on it."""

    def __init__(self, lib: Any, model: Any, *, sequences: int, room: int, threads: int | None) -> None:
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch, params.n_ubatch = room * sequences, sequences, CHUNK, CHUNK
        params.kv_unified = False
        if threads is not None:
            params.n_threads = params.n_threads_batch = threads
        self._lib = lib
        self._context = lib.llama_init_from_model(model, params)
        if not self._context:
            raise RekindleError(f"llama.cpp has no memory for {sequences} sequences of {room} tokens")
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(CHUNK, 0, 1)
        self._num_tokens = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))

    def extend(self, ids: np.ndarray, begin: int) -> int:
        """Compute ids [rows] of sequence 0 at positions from `begin`, whose rest is dropped; return the next token."""
        self._lib.llama_memory_seq_rm(self._memory, 0, begin, -1)
        token = -1
        for first in range(0, len(ids), CHUNK):
            rows = [(int(token), begin + first + row, 0) for row, token in enumerate(ids[first : first + CHUNK])]
            (token,) = self._run(rows, [len(rows) - 1] if first + CHUNK >= len(ids) else []) or (-1,)
        return token

    def copy(self, count: int) -> None:
        """Give sequences 1 to `count` - 1 a copy of the KV of sequence 0."""
        for number in range(1, count):
            self._lib.llama_memory_seq_cp(self._memory, 0, number, -1, -1)

    def cut(self, count: int, position: int) -> None:
        """Drop what `count` sequences hold from a position on."""
        for number in range(count):
            self._lib.llama_memory_seq_rm(self._memory, number, position, -1)

    def step(self, tokens: Sequence[int], position: int) -> list[int]:
        """Compute one token of each sequence at a position; return the next ones."""
        rows = [(token, position, number) for number, token in enumerate(tokens)]
        return self._run(rows, range(len(rows)))

    def check(self) -> None:
        """Assert that the context is there."""
        assert self._context, "a context that was not made"

    def close(self) -> None:
        """Free the KV."""
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)

    def _run(self, rows: Sequence[tuple[int, int, int]], asked: Sequence[int]) -> list[int]:
        """Compute rows of token, position and sequence; return the greedy next tokens of the rows that are asked."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position, 1
            batch.seq_id[row][0], batch.logits[row] = sequence, row in asked
        status = self._lib.llama_decode(self._context, batch)
        if status:
            raise RekindleError(f"llama_decode returned {status}")
        pointers = [self._lib.llama_get_logits_ith(self._context, row) for row in asked]
        return [int(np.ctypeslib.as_array(pointer, (self._num_tokens,)).argmax()) for pointer in pointers]


class LlamaCpp:
    """One model, and the context of its single prompts once one was computed."""

    def __init__(self, file: str, threads: int | None, room: int) -> None:
        import llama_cpp as lib

        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        params.use_mmap = False  # so that weights are resident before memory is measured
        params.use_extra_bufts = False  # q8_0 repacked for AMX crashes in llama-cpp-python 0.3.36
        self._lib = lib
        self._model = lib.llama_model_load_from_file(file.encode(), params)
        if not self._model:
            raise RekindleError(f"llama.cpp does not load {file}")
        self._threads = threads
        self._room = -(-room // 256) * 256  # llama.cpp rounds up to this
        self._single: Context | None = None
        self._held = np.empty(0, dtype=np.uint32)

    @property
    def about(self) -> Mapping[str, Any]:
        """Its version and the settings that matter."""
        version = metadata.version("llama-cpp-python")
        how = f"llama_decode, KV fp16, weights not repacked, chunks of {CHUNK} tokens"
        built = self._lib.llama_print_system_info().decode()
        return {"engine": f"llama-cpp-python {version}, {how}", "built": built}

    def first_token(self, ids: np.ndarray) -> int:
        """Compute the rest of the prompt [rows] after what it shares with the last one; return the next token."""
        shared = min(len(ids), len(self._held))
        differing = np.flatnonzero(ids[:shared] != self._held[:shared])
        begin = min(int(differing[0]) if len(differing) else shared, len(ids) - 1)
        if self._single is None:
            self._single = self._context(1)
        self._held = ids
        return self._single.extend(ids[begin:], begin)

    def decode(self, prompts: Sequence[np.ndarray], count: int, repeats: int) -> list[float]:
        """Return tokens per second of one sequence per prompt, all on copies of the first prompt's KV."""
        context = self._context(len(prompts))
        try:
            begun = [context.extend(prompts[0], 0)] * len(prompts)
            context.copy(len(prompts))
            return [self._rate(context, begun, len(prompts[0]), count) for _ in range(repeats)]
        finally:
            context.close()

    def release(self) -> None:
        """Free the context of single prompts with its KV."""
        if self._single is not None:
            self._single.close()
        self._single, self._held = None, self._held[:0]

    def check(self) -> None:
        """Assert that ids are held only in a context."""
        assert self._single is not None or not len(self._held), "ids without KV"

    def _rate(self, context: Context, begun: Sequence[int], position: int, count: int) -> float:
        context.cut(len(begun), position)
        tokens = context.step(begun, position)  # not timed: copies of KV are made here
        began = time.perf_counter()
        for done in range(count):
            tokens = context.step(tokens, position + 1 + done)
        return count * len(begun) / (time.perf_counter() - began)

    def _context(self, sequences: int) -> Context:
        return Context(self._lib, self._model, sequences=sequences, room=self._room, threads=self._threads)


def load(job: Job) -> LlamaCpp:
    """Load the job's file, with room for the longest prompt of its measures and what is decoded."""
    return LlamaCpp(job.file, job.settings().model.threads, job.context + job.extension + job.decode_tokens + SPARE)
