"""What llama.cpp says of the same ids with KV in its own formats: `llama_decode` of llama-cpp-python on a GGUF file."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rekindle.errors import ConfigError, RekindleError
from rekindle.spec import LayerSpec

KV = {"f16": 64, "q8_0": 34, "q4_0": 18}  # bytes of 32 values, of K and V each


class LlamaModel:
    """A GGUF file in llama.cpp."""

    def __init__(self, file: Path, threads: int) -> None:
        try:
            import llama_cpp as lib
        except ImportError as error:
            raise ConfigError("--arm llama.cpp needs llama-cpp-python: pip install llama-cpp-python") from error
        self._silence = lib.llama_log_callback(lambda *_: None)  # called as long as the library is there
        lib.llama_log_set(self._silence, None)
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        params.use_extra_bufts = False  # weights repacked for AMX crash in llama-cpp-python 0.3.36
        self.lib, self.threads = lib, threads
        self.model = lib.llama_model_load_from_file(str(file).encode(), params)
        if not self.model:
            raise RekindleError(f"llama.cpp does not load {file}")
        self.num_tokens = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model)))

    def arm(self, kv: str) -> LlamaArm:
        """The model with KV in a format."""
        return LlamaArm(self, kv)

    def bytes_per_token(self, kv: str, layers: Sequence[LayerSpec]) -> float:
        """Bytes of K and V of a token of these layers."""
        return sum(layer.num_kv_heads * (layer.k_dim + layer.v_dim) for layer in layers) * KV[kv] / 32


@dataclass(frozen=True, slots=True)
class LlamaArm:
    """A model with KV in one of its formats."""

    model: LlamaModel
    kv: str

    def run(self, num_tokens: int) -> LlamaRun:
        """Begin a window."""
        return LlamaRun(self.model, self.kv, num_tokens)


class LlamaRun:
    """One window, in a context just large enough for it."""

    def __init__(self, model: LlamaModel, kv: str, num_tokens: int) -> None:
        lib, params = model.lib, model.lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = -(-num_tokens // 256) * 256
        params.n_threads = params.n_threads_batch = model.threads
        params.type_k = params.type_v = getattr(lib, f"GGML_TYPE_{kv.upper()}")
        # Without flash attention V is never coded.
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._model, self._context = model, lib.llama_init_from_model(model.model, params)
        if not self._context:
            raise RekindleError(f"llama.cpp makes no context of {num_tokens} tokens with KV in {kv}")
        self._batch = lib.llama_batch_init(num_tokens, 0, 1)
        weakref.finalize(self, lib.llama_batch_free, self._batch)
        weakref.finalize(self, lib.llama_free, self._context)

    def logits(self, ids: np.ndarray, start: int, end: int) -> torch.Tensor:
        """Return logits [end - start, vocab] of these positions; all before them must have been computed."""
        lib, batch = self._model.lib, self._batch
        batch.n_tokens = end - start
        for row, at in enumerate(range(start, end)):
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = int(ids[at]), at, 1
            batch.seq_id[row][0], batch.logits[row] = 0, 1
        status = lib.llama_decode(self._context, batch)
        if status:
            raise RekindleError(f"llama_decode returned {status}")
        found: Any = np.ctypeslib.as_array(lib.llama_get_logits(self._context), (end - start, self._model.num_tokens))
        return torch.from_numpy(found.copy())
