"""What the tests of model/ share: a runner over its own arena, and attention in the model's dtype to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from rekindle.compute.cpu.compute import KernelCompute
from rekindle.kv.arena import KVArena
from rekindle.model import formats, geometry, recurrent
from rekindle.model.adapter import register_attention
from rekindle.model.batch import SequenceStep
from rekindle.model.fingerprint import fingerprint
from rekindle.model.formats import native_format
from rekindle.model.latent import absorb_latents
from rekindle.model.loaded import LoadedModel
from rekindle.model.padded_experts import use_padded_experts
from rekindle.model.runner import ModelRunner
from rekindle.spec import ModelFacts, ModelSpec

Loader = Callable[..., LoadedModel]
FACTS = ModelFacts("tiny", 1000, "safetensors", 4000, 4000, "float32")


def reference_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Dense attention with the mask transformers builds; no cast to fp32 in the softmax, unlike eager attention."""
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    scores = query @ key.transpose(2, 3) * kwargs["scaling"]
    if kwargs.get("softcap"):
        scores = torch.tanh(scores / kwargs["softcap"]) * kwargs["softcap"]
    if attention_mask is not None:
        scores = scores + attention_mask
    sinks = kwargs.get("s_aux")
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("reference", reference_attention)
AttentionMaskInterface.register("reference", eager_mask)


def reference_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits [len(ids), vocab] of one sequence by the model's own code over `reference_attention`."""
    before = model.config._attn_implementation
    model.set_attn_implementation("reference")
    try:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(before)


def in_memory(
    model: Any, *, kv: formats.Format | None = None, block_tokens: int = 16, padded: bool = True
) -> LoadedModel:
    """A model in memory as a LoadedModel, with native KV unless `kv` says otherwise; nothing was proven.

    `padded`: its experts are, as on a CPU.
    """
    register_attention()
    model.set_attn_implementation("rekindle")
    if padded:
        use_padded_experts(model)
    absorb_latents(model, "rekindle")
    found = geometry.probe(model)
    chosen = formats.forced_formats(found, kv or native_format(found.dtype))
    recurrent.split_sequences(found.recurrent, block_tokens)
    layout = formats.layout_of(found, chosen, block_tokens)
    name = type(model).__name__
    spec = ModelSpec("tiny", name, found.vocab_size, 1024, frozenset(), fingerprint(b"", layout), layout, FACTS)
    return LoadedModel(model, spec, Path(), "cpu", found.dtype, "close", chosen, KernelCompute(None), ())


class Bench:
    """A runner over its own arena that hands out blocks and remembers where each sequence stands."""

    def __init__(self, loaded: LoadedModel, num_blocks: int = 64) -> None:
        self.layout = loaded.spec.layout
        self.arena = KVArena(self.layout, num_blocks, loaded.device)
        self.runner = ModelRunner(loaded, self.arena)
        self.free = list(range(num_blocks))[::-1]
        self.tables: dict[str, list[int]] = {}
        self.stored: dict[str, int] = {}
        self.failed: frozenset[int] = frozenset()  # of the last `forward`

    def step(self, name: str, ids: Sequence[int], logits: Literal["none", "last", "all"] = "all") -> SequenceStep:
        """The next rows of sequence `name`."""
        start = self.stored.get(name, 0)
        table = self.tables.setdefault(name, [])
        end = start + len(ids)
        while len(table) * self.layout.block_tokens < end:
            table.append(self.free.pop(len(self.free) // 2))
        self.stored[name] = end
        return SequenceStep(np.array(ids, dtype=np.uint32), start, tuple(table), start, logits)

    def forward(self, *named: tuple[str, Sequence[int]]) -> list[torch.Tensor]:
        """Run the next rows of several sequences together; all their logits."""
        launched = self.runner.launch([self.step(name, ids) for name, ids in named])
        self.failed, logits = launched.wait(), launched.logits
        return list(logits.split([len(ids) for _, ids in named]))

    def stored_bytes(self, name: str) -> list[bytes]:
        """The bytes of every block and part of a sequence."""
        out = []
        for index, block in enumerate(self.tables[name]):
            num_tokens = min(self.layout.block_tokens, self.stored[name] - index * self.layout.block_tokens)
            for part in self.layout.parts:
                data = np.empty(part.payload_bytes, dtype=np.uint8)
                self.arena.read(block, part.index, num_tokens, data)
                out.append(data.tobytes())
        return out


def randomise_norms(model: Any) -> None:
    """Give every norm weights that differ: those of a new model are all 1, or 0, and show no mistake."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "norm" in name:
            with torch.no_grad():
                parameter += 0.4 * torch.rand(parameter.shape, generator=generator).to(parameter.dtype) - 0.2


def random_ids(count: int, *, seed: int = 1, low: int = 4, high: int = 384) -> list[int]:
    """Token ids without control tokens."""
    return np.random.default_rng(seed).integers(low, high, count).tolist()
