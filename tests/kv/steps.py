"""A made-up layer's rows, run through arena, plan and attention in whatever steps a test asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rekindle.kv.arena import KVArena
from rekindle.kv.attention import PagedAttention
from rekindle.kv.plan import AttentionPlan
from rekindle.kv.reference import attention_reference, relative_error
from rekindle.kv.step_layout import SequenceSpan, StepLayout
from rekindle.spec import Format, KVLayout, LayerSpec

BLOCK_TOKENS = 32


@dataclass(frozen=True)
class Layer:
    """Shape, formats and scoring of the one layer that a test runs; `beside`: windows of others that blocks hold."""

    dtype: torch.dtype
    k_format: Format = "q4h"
    v_format: Format = "q4h"
    k_dim: int = 64
    v_dim: int = 64
    kv_heads: int = 2
    heads: int = 6
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    block_tokens: int = BLOCK_TOKENS
    beside: tuple[int | None, ...] = ()
    latent: bool = False

    @property
    def spec(self) -> LayerSpec:
        sizes = (self.kv_heads, self.k_dim, self.v_dim)
        return LayerSpec(5, *sizes, self.window, self.k_format, self.v_format, self.latent)

    @property
    def layout(self) -> KVLayout:
        others = [LayerSpec(index, 3, 48, 80, window, "q4h", "bf16") for index, window in enumerate(self.beside)]
        return KVLayout(self.block_tokens, (*others, self.spec))

    @property
    def scoring(self) -> dict[str, Any]:
        sinks = torch.linspace(-2, 2, self.heads).to(self.dtype) if self.sinks else None
        return {"scaling": 1.5 * self.spec.q_dim**-0.5, "window": self.window, "softcap": self.softcap, "sinks": sinks}


@dataclass(frozen=True)
class Rows:
    """Queries, keys and values of the positions 0 .. n of one sequence."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def random(cls, layer: Layer, num_tokens: int, seed: int = 0) -> Rows:
        generator = torch.Generator().manual_seed(seed)

        def draw(heads: int, dim: int) -> Tensor:
            return torch.randn(num_tokens, heads, dim, generator=generator).to(layer.dtype)

        q = draw(layer.heads, layer.spec.q_dim)
        return cls(q, draw(layer.kv_heads, layer.k_dim), draw(layer.kv_heads, layer.v_dim))


def scattered_blocks(num_tokens: int, num_blocks: int, seed: int = 0, *, block_tokens: int = BLOCK_TOKENS) -> list[int]:
    needed = -(-num_tokens // block_tokens)
    return torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))[:needed].tolist()


def step(
    attention: PagedAttention, layer: Layer, spans: Sequence[SequenceSpan], rows: Sequence[Rows], spare: int = 0
) -> tuple[list[Tensor], AttentionPlan]:
    """One step of all spans with `spare` times 4 extra dummy rows; outputs per span, and the plan."""
    used, device = sum(span.num_rows for span in spans), attention.arena.device
    num_rows = -(-used // 4) * 4 + 4 * spare
    packed = []
    for name in ("q", "k", "v"):
        parts = [getattr(r, name)[s.start : s.start + s.num_rows] for s, r in zip(spans, rows, strict=True)]
        dummy = torch.full((num_rows - used, *parts[0].shape[1:]), 3.0, dtype=layer.dtype)
        packed.append(torch.cat([*parts, dummy]).to(device))
    plan = AttentionPlan(StepLayout(spans, attention.arena.layout.block_tokens, num_rows), device)
    attention.write(5, packed[1], packed[2], plan)
    scoring = layer.scoring
    if scoring["sinks"] is not None:
        scoring["sinks"] = scoring["sinks"].to(device)
    out = attention.attend(5, packed[0], plan, **scoring).cpu()
    assert not out[used:].any()
    return list(out[:used].split([span.num_rows for span in spans])), plan


def in_chunks(
    attention: PagedAttention, layer: Layer, rows: Rows, blocks: Sequence[int], cuts: Sequence[int]
) -> Tensor:
    """Compute a sequence in steps that end at `cuts`; outputs of all rows."""
    outputs, start = [], 0
    for end in cuts:
        outputs += step(attention, layer, [SequenceSpan(blocks, start, end - start, start)], [rows])[0]
        start = end
    return torch.cat(outputs)


def agrees_where_rows_see_each_other(attention: PagedAttention, layer: Layer, bound: float) -> None:
    """Of two stretches, one across the end of a tile: as the definitions say, and with the bits that a row has in other
    company and where the first rows of a stretch are stored already."""
    rows, blocks = Rows.random(layer, 640), scattered_blocks(640, attention.arena.num_blocks)
    first, second = (486, 560), (571, 620)
    in_chunks(attention, layer, rows, blocks, [440])
    whole = SequenceSpan(blocks, 440, 200, 440, (first, second))
    (got,), _ = step(attention, layer, [whole], [rows])
    stored = block_bytes(attention.arena, blocks).clone()
    wanted = attention_reference(attention.arena, 5, rows.q[440:640], [whole], **layer.scoring)
    assert relative_error(got, wanted) < bound
    parts = ((470, 560, (first,)), (486, 571, (first,)), (531, 640, ((531, 560), second)), (560, 571, ()))
    for start, end, mutual in parts:
        (again,), _ = step(attention, layer, [SequenceSpan(blocks, start, end - start, 640, mutual)], [rows])
        assert torch.equal(again, got[start - 440 : end - 440])
    assert torch.equal(block_bytes(attention.arena, blocks), stored)


def block_bytes(arena: KVArena, blocks: Sequence[int]) -> Tensor:
    return torch.cat([part[list(blocks)] for part in arena.parts], 1).cpu()
