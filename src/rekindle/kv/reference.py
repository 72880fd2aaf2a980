"""Attention by loops, from the definitions: decodes every stored vector, rotates it back, attends row by row.

For tests and self-checks; slow. Shares with the vectorised path only the packing of codes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rekindle.kv.arena import KVArena
from rekindle.kv.coded import CODECS
from rekindle.kv.q4h import unrotate
from rekindle.kv.step_layout import SequenceSpan
from rekindle.spec import Format


def attention_reference(
    arena: KVArena,
    layer_index: int,
    q: Tensor,
    spans: Sequence[SequenceSpan],
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with q [rows, heads, q_dim] in fp64; fp64 [rows, heads, out_dim], zeros for rows that no span has."""
    layer = arena.layer(layer_index)
    group = q.shape[1] // layer.spec.num_kv_heads
    outputs = torch.zeros(*q.shape[:2], layer.spec.out_dim, dtype=torch.float64)
    row = 0
    for span in spans:
        keys, values = (
            stored_vectors(layer.k, layer.spec.k_format, span.blocks),
            stored_vectors(layer.v, layer.spec.v_format, span.blocks),
        )
        if layer.spec.latent:
            keys, values = torch.cat((keys, values), dim=-1), keys
        ends = span.seen()
        for position in range(span.start, span.end):
            end = position + 1 if ends is None else int(ends[position - span.start])
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(q.shape[1]):
                seen = slice(first, end)
                scores = keys[head // group, seen] @ q[row, head].double() * scaling
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                weights = torch.softmax(scores, 0)[: end - first]
                outputs[row, head] = weights @ values[head // group, seen]
            row += 1
    return outputs


def stored_vectors(sections: tuple[Tensor, ...], fmt: Format, blocks: Sequence[int]) -> Tensor:
    """What the blocks hold for one layer's K or V, as fp64 [heads, tokens, dim] in the model's own dimensions."""
    chosen = [section[list(blocks)].transpose(0, 1).flatten(1, 2).cpu() for section in sections]
    if len(chosen) == 1:
        return chosen[0].double()
    return unrotate(CODECS[fmt].decode(chosen[0], chosen[1], torch.float64))


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest magnitude wanted."""
    return float((got.double() - wanted.double()).abs().max()) / max(float(wanted.double().abs().max()), math.ulp(1.0))
