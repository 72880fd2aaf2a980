"""Attention over blocks: encodes a step's K and V into the arena, then attends only to what is stored there.

Knows no sequences beyond the plan. The result for a row is the same, bit for bit, regardless of what else is in the
step and of how the context was split into steps. Four rules ensure that:

- the context is a whole number of tiles of 512 tokens from position 0, the rest of the last one masked with -inf;
- every matrix product has a multiple of 4 rows;
- the sum over the context runs inside a tile by one matrix product, over tiles in order, in fp32 (fp64 for fp64);
- masked positions hold finite values, so that they add exact zeros.

Keys and values of a range are decoded to the compute dtype [kv heads, tokens, dim] and stay in the CPU's cache. Those
in Q4H and Q8H stay rotated, of Q4H in the order in which codes unpack; queries and outputs are rotated instead. Of a
latent layer, keys are the latent followed by the rotary key, and values are the latent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rekindle.kv import q4h
from rekindle.kv.arena import KVArena, LayerView
from rekindle.kv.coded import CODECS
from rekindle.kv.decode import Decoder, Scratch
from rekindle.kv.plan import TILE, AttentionPlan, QueryPiece, ScoreShape
from rekindle.spec import CODED, Format

SINK_COLUMNS = 64  # a multiple of every vector length
COMPUTE_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class _Weighting:
    """How scores become weights; `sinks` has one logit per query head."""

    softcap: float | None
    sinks: Tensor | None


class PagedAttention:
    """Attention of one model over one arena, on the thread that owns both."""

    def __init__(self, arena: KVArena) -> None:
        self.arena = arena
        self._scratch = Scratch(arena.device)
        self._rotator = q4h.Rotator(arena.device)
        self._decoder = Decoder(arena.layout.block_tokens, self._scratch)

    def write(self, layer_index: int, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        """Store the step's K [rows, kv heads, dk] and V [rows, kv heads, dv] where the plan says.

        A row that is not finite is recorded in the plan (`failed_spans`); its request fails and its blocks must not be
        committed. ValueError for shapes that do not match the layer.
        """
        self._refuse_misshapen(layer_index, k, v, plan)
        layer = self.arena.layer(layer_index)
        spec = layer.spec
        if spec.k_format in CODED and spec.v_format in CODED and spec.k_dim == spec.v_dim:
            rotated = self._rotator.rotate(torch.stack((k, v)))  # half the small operations
            self._store_coded(layer, spec.k_format, rotated[0], plan, sections=layer.k)
            self._store_coded(layer, spec.v_format, rotated[1], plan, sections=layer.v)
            return
        for sections, values, fmt in ((layer.k, k, spec.k_format), (layer.v, v, spec.v_format)):
            if fmt in CODED:
                self._store_coded(layer, fmt, self._rotator.rotate(values), plan, sections=sections)
            else:
                self._store_native(layer, sections[0], values, plan)

    def _refuse_misshapen(self, layer_index: int, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        spec = self.arena.layer(layer_index).spec
        if k.shape != (plan.layout.num_rows, spec.num_kv_heads, spec.k_dim) or v.shape != (*k.shape[:2], spec.v_dim):
            raise ValueError(
                f"layer {layer_index}: K {tuple(k.shape)}, V {tuple(v.shape)} for {plan.layout.num_rows} rows"
            )

    def _store_coded(
        self, layer: LayerView, fmt: Format, rotated: Tensor, plan: AttentionPlan, *, sections: tuple[Tensor, ...]
    ) -> None:
        group = rotated.shape[-1] // sections[1].shape[-1]
        codes, scale_bytes, absmax = CODECS[fmt].encode(rotated, group)
        torch.maximum(plan.worst, absmax.flatten(1).amax(1), out=plan.worst)
        self._scatter(layer, sections[0], codes, plan)
        self._scatter(layer, sections[1], scale_bytes, plan)

    def _store_native(self, layer: LayerView, section: Tensor, values: Tensor, plan: AttentionPlan) -> None:
        stored = values.to(section.dtype)
        torch.maximum(plan.worst, stored.abs().flatten(1).amax(1), out=plan.worst)
        self._scatter(layer, section, torch.nan_to_num(stored, nan=0.0, posinf=0.0, neginf=0.0), plan)

    def _scatter(self, layer: LayerView, section: Tensor, values: Tensor, plan: AttentionPlan) -> None:
        if plan.layout.num_written:
            chosen = values if plan.written is None else values.index_select(0, plan.written)
            section.index_put_((plan.target_blocks(layer.spec.window), layer.heads, plan.target_offsets), chosen)

    def attend(
        self,
        layer_index: int,
        q: Tensor,
        plan: AttentionPlan,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend with q [rows, heads, q_dim] to what is stored; [rows, heads, out_dim] in q's dtype, spare rows zeros.

        ValueError for a dtype, window or number of heads that the layer does not have, for rows that are not the
        plan's, or sinks that are not one a head.
        """
        self._refuse_misfit(layer_index, q, plan, window=window, sinks=sinks)
        layer = self.arena.layer(layer_index)
        heads_per_kv = q.shape[1] // layer.spec.num_kv_heads
        shape = ScoreShape(heads_per_kv, layer.spec.num_kv_heads, window, q.dtype)
        weighting = _Weighting(softcap, sinks)
        queries = self._prepare_queries(layer, q, scaling if softcap is None else scaling / softcap)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        outputs = torch.zeros(*q.shape[:2], layer.spec.out_dim, dtype=wide, device=q.device)
        for query_range in plan.ranges(shape):
            keys, values = self._decoder.decode(layer, query_range, q.dtype)
            for piece in query_range.pieces:
                self._attend_piece(queries, piece, keys=keys, values=values, weighting=weighting, outputs=outputs)
        if layer.spec.out_format in CODED:
            outputs = outputs @ CODECS[layer.spec.out_format].output_rotation(layer.spec.out_dim, wide, q.device)
        return outputs.to(q.dtype)

    def _refuse_misfit(
        self, layer_index: int, q: Tensor, plan: AttentionPlan, *, window: int | None, sinks: Tensor | None
    ) -> None:
        spec = self.arena.layer(layer_index).spec
        if q.dtype not in COMPUTE_DTYPES:
            raise ValueError(f"attention computes in bf16, fp32 or fp64, not {q.dtype}")
        if q.shape[1] % spec.num_kv_heads or q.shape[2] != spec.q_dim:
            raise ValueError(
                f"layer {spec.index} has {spec.num_kv_heads} K/V heads of size {spec.q_dim}, queries {tuple(q.shape)}"
            )
        num_rows = plan.layout.num_rows
        if len(q) != num_rows or (sinks is not None and sinks.numel() != q.shape[1]):
            raise ValueError(
                f"layer {spec.index}: queries {tuple(q.shape)} for {num_rows} rows, or sinks for other heads"
            )
        if window != spec.window:
            raise ValueError(f"layer {spec.index} keeps a window of {spec.window}, attention asks for {window}")

    def _prepare_queries(self, layer: LayerView, q: Tensor, scaling: float) -> Tensor:
        """Scaled queries, rotated as the keys are."""
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        if layer.spec.k_format not in CODED:
            return (q.to(wide) * scaling).to(q.dtype)
        coded, native = q.split((layer.spec.k_dim, layer.spec.q_dim - layer.spec.k_dim), dim=-1)
        rotation = CODECS[layer.spec.k_format].query_rotation(layer.spec.k_dim, scaling, wide, q.device)
        rotated: Tensor = coded.to(wide) @ rotation
        if native.shape[-1]:
            rotated = torch.cat((rotated, native.to(wide) * scaling), dim=-1)
        return rotated.to(q.dtype)

    def _attend_piece(
        self,
        queries: Tensor,
        piece: QueryPiece,
        *,
        keys: Tensor,
        values: Tensor,
        weighting: _Weighting,
        outputs: Tensor,
    ) -> None:
        """Attend with the piece's rows of `queries` and put the sums into the same rows of `outputs`."""
        kv_heads, num_context, _ = keys.shape
        rows = slice(piece.row, piece.row + piece.num_rows)
        num_padded = piece.mask.shape[0]
        folded = self._fold(queries[rows], kv_heads, num_padded)
        scores = self._scratch.take("scores", keys.dtype, kv_heads, num_padded, num_context)
        torch.bmm(folded, keys.transpose(1, 2), out=scores)
        if weighting.softcap is not None:
            scores.tanh_().mul_(weighting.softcap)
        scores[:, :, piece.masked_from :].add_(piece.mask)
        weights = self._weights(scores, weighting.sinks)
        summed = self._weigh(weights, values)
        num_folded = outputs.shape[1] // kv_heads * piece.num_rows
        unfolded = summed[:, :num_folded].unflatten(1, (piece.num_rows, -1)).transpose(0, 1)
        outputs[rows].unflatten(1, (kv_heads, -1)).copy_(unfolded)

    def _fold(self, queries: Tensor, kv_heads: int, num_padded: int) -> Tensor:
        """Queries [rows, heads, d] of one piece as [kv heads, padded rows * heads per kv, d]."""
        num_rows, heads, dim = queries.shape
        folded = self._scratch.take("queries", queries.dtype, kv_heads, num_padded, dim)
        per_head = folded[:, : num_rows * (heads // kv_heads)].unflatten(1, (num_rows, -1))
        per_head.copy_(queries.unflatten(1, (kv_heads, -1)).transpose(0, 1))
        return folded

    def _weights(self, scores: Tensor, sinks: Tensor | None) -> Tensor:
        """Softmax over the context, and over the sink if there is one; [kv heads, rows, context]."""
        if sinks is None:
            return torch.softmax(scores, -1, out=self._scratch.take("weights", scores.dtype, *scores.shape))
        kv_heads, num_rows, num_context = scores.shape
        # The sink follows the context in separate columns, so lanes of the sum hold the same values as without it.
        wide = self._scratch.take("scores and sinks", scores.dtype, kv_heads, num_rows, num_context + SINK_COLUMNS)
        wide[:, :, :num_context].copy_(scores)
        wide[:, :, num_context:].fill_(-torch.inf)
        per_head = sinks.to(scores.dtype).view(kv_heads, -1)
        wide[:, :, num_context] = per_head.repeat(1, -(-num_rows // per_head.shape[1]))[:, :num_rows]
        weights = torch.softmax(wide, -1, out=self._scratch.take("weights", scores.dtype, *wide.shape))
        return weights[:, :, :num_context]

    def _weigh(self, weights: Tensor, values: Tensor) -> Tensor:
        """Weighted sum of values: one product per tile, tiles added in order, wide; [kv heads, rows, dv]."""
        kv_heads, num_rows, num_context = weights.shape
        tiles, dim = num_context // TILE, values.shape[-1]
        if not weights.is_contiguous() or tiles > 1:
            # The scores have become weights: their memory is free.
            by_tile = self._scratch.take("scores", weights.dtype, kv_heads, tiles, num_rows, TILE)
            by_tile.copy_(weights.unflatten(2, (tiles, TILE)).transpose(1, 2))
            weights = by_tile
        products = self._scratch.take("products", values.dtype, kv_heads * tiles, num_rows, dim)
        torch.bmm(weights.view(-1, num_rows, TILE), values.view(-1, TILE, dim), out=products)
        wide = torch.float64 if values.dtype == torch.float64 else torch.float32
        summed = self._scratch.take("sums", wide, kv_heads, num_rows, dim)
        per_tile = products.view(kv_heads, tiles, num_rows, dim)
        summed.copy_(per_tile[:, 0])
        for tile in range(1, tiles):
            summed.add_(per_tile[:, tile])
        return summed

    def check(self) -> None:
        """Assert that everything attention may read under a mask is finite: the arena, decoded keys and values."""
        self.arena.check()
        self._scratch.check("keys", "values", "latents and rotary keys")
