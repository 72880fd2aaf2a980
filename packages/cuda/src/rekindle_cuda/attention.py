"""Attention over blocks on a card: `PagedAttention` by kernels in Triton.

Writes the bytes that `PagedAttention` writes, to the bit. Where `attend` computes, the sums of a row are the same
whatever else is in the step and however the context was split into steps; whether its bits are, the self-test finds out
on each card. Prompts of many rows are computed by `prompts`, layers with multi-head latent attention and fp64 by
`PagedAttention`.

    q ──rotate──▶ as keys are stored ──attend──▶ sums of each piece of a context ──join──▶ rotated back, in q's dtype
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from rekindle.kv import q4h
from rekindle.kv.arena import KVArena, LayerView
from rekindle.kv.attention import PagedAttention
from rekindle.kv.plan import AttentionPlan
from rekindle.kv.step_layout import StepLayout
from rekindle_cuda.attend import attend_kernel, join_kernel
from rekindle_cuda.formats import rotate_kernel, store_kernel
from rekindle_cuda.places import DTYPES, MOST_TILE, NATIVE, Q4H, Form, Places, Rows, Stored, Values
from rekindle_cuda.placing import Turned, place_kernel
from rekindle_cuda.prompts import MOST_ROWS, attend_prompt
from rekindle_cuda.tables import Items, Sheet, Tables, step_tables
from rekindle_cuda.work import LEAST_FOLDED, Partial, Shape, Use

EXACT: dict[str, Any] = {} if triton.knobs.runtime.interpret else {"enable_fp_fusion": False}  # see `formats`
STORED_ROWS = 4  # of a program
PROGRAMS = 4  # on every multiprocessor; each takes items in turn


Layer = tuple[Values, Values]


class Scoring(NamedTuple):
    """How scores are made; see `PagedAttention.attend`."""

    scaling: float
    softcap: float | None
    window: int | None
    sinks: Tensor | None


class TritonAttention(PagedAttention):
    """Attention of one model over one arena on a card, or in Triton's interpreter on a CPU."""

    def __init__(self, arena: KVArena) -> None:
        super().__init__(arena)
        self._plan: AttentionPlan | None = None
        self._sheet: Sheet | None = None
        self._is_given = False  # the sheet, whose step was seen before
        self._windows = {spec.window: None for spec in arena.layout.layers if not spec.latent}  # in their order
        self._uses: dict[Use, None] = {}  # that the layers made of it so far
        self._values = {spec.index: _values(arena.layer(spec.index)) for spec in arena.layout.layers if not spec.latent}
        forms = [each.form for both in self._values.values() for each in both]
        sizes = {form.size for form in forms if form.format != NATIVE}
        self._signs = {size: q4h.constant(q4h.sign_values(size), torch.float32, arena.device) for size in sizes}
        self._inverse_scales = q4h.constant(q4h.inverse_scales_by_byte(), torch.float32, arena.device)
        self._programs = PROGRAMS * _multiprocessors(arena.device)

    def write(self, layer_index: int, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        """As `PagedAttention.write`."""
        layer = self.arena.layer(layer_index)
        if layer.spec.latent or torch.float64 in (k.dtype, v.dtype):
            super().write(layer_index, k, v, plan)
            return
        self._refuse_misshapen(layer_index, k, v, plan)
        places = self._sheet_of(plan).places(layer.spec.window)
        for to, x in zip(self._values[layer_index], (k, v), strict=True):
            self._store(to, x, places, plan.worst)

    def tables(self, layout: StepLayout) -> Tables:
        """The tables of a step, as far as earlier steps showed how layers attend."""
        return step_tables(layout, self._windows, self._uses)

    def follow(self, plan: AttentionPlan, sheet: Sheet) -> None:
        """Take the tables of a step from this sheet, to which others like them can be sent later."""
        self._plan, self._sheet, self._is_given = plan, sheet, True

    def _sheet_of(self, plan: AttentionPlan, use: Use | None = None) -> Sheet:
        """The tables of a step, sent once for all layers; again if none attended so before."""
        is_new = use is not None and use not in self._uses
        if self._sheet is None or self._plan is not plan or is_new:
            if use is not None:
                self._uses[use] = None
            if self._is_given and self._plan is plan:
                raise RuntimeError(f"layers attend otherwise than in earlier steps: {use}")
            self._plan, self._sheet, self._is_given = plan, Sheet.of(self.tables(plan.layout), self.arena.device), False
        return self._sheet

    def place(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, turned: Turned) -> Tensor:
        """Write V, and K after norms of heads and rotary embedding; the queries after these, for `attend_placed`.

        q, k, v [rows, heads, dim] in the dtype of `turned`, of a layer without latents.
        """
        self._refuse_misshapen(layer_index, k, v, plan)
        keys, values = self._values[layer_index]
        queries = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        programs = (
            triton.cdiv(len(q), STORED_ROWS),
            q.shape[1] + 2 * k.shape[1],
            max(keys.form.parts, values.form.parts),
        )
        place_kernel[programs](
            *map(Rows.of, (q, k, v)),
            queries,
            _for_writing(keys),
            _for_writing(values),
            self._sheet_of(plan).places(self.arena.layer(layer_index).spec.window),
            plan.worst,
            self._signs_of(keys.form),
            self._signs_of(values.form),
            self._inverse_scales,
            *turned[:-1],
            len(q),
            TURN=turned.turn,
            K=keys.form,
            V=values.form,
            TOKENS=self.arena.layout.block_tokens,
            R=STORED_ROWS,
            **EXACT,
        )
        return queries

    def _store(self, to: Values, x: Tensor, places: Places, worst: Tensor) -> None:
        form = to.form
        if form.format == NATIVE:
            x = x.to(to.stored.codes.dtype)
        stored = _for_writing(to)
        store_kernel[(triton.cdiv(len(x), STORED_ROWS), x.shape[1], form.parts)](
            Rows.of(x),
            stored,
            places,
            worst,
            self._signs_of(form),
            self._inverse_scales,
            len(x),
            FORM=form,
            TOKENS=self.arena.layout.block_tokens,
            R=STORED_ROWS,
            **EXACT,
        )

    def _signs_of(self, form: Form) -> Tensor:
        """The signs of a rotation; of a native format, whose kernels read none, any tensor."""
        return self._signs.get(form.size, self._inverse_scales)

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
        """As `PagedAttention.attend`."""
        layer = self.arena.layer(layer_index)
        if layer.spec.latent or q.dtype not in DTYPES:
            return super().attend(layer_index, q, plan, scaling=scaling, window=window, softcap=softcap, sinks=sinks)
        queries = self._queries(self._values[layer_index][0].form, q)
        return self.attend_placed(layer_index, queries, plan, Scoring(scaling, softcap, window, sinks))

    def attend_placed(self, layer_index: int, q: Tensor, plan: AttentionPlan, scoring: Scoring) -> Tensor:
        """`attend` with queries that are as the keys are stored."""
        window, sinks = scoring.window, scoring.sinks
        self._refuse_misfit(layer_index, q, plan, window=window, sinks=sinks)
        layer, queries = self.arena.layer(layer_index), Rows.of(q)
        keys, values = own = self._values[layer_index]
        out = q.new_empty(*q.shape[:2], values.form.dim)
        is_plain = window is None and scoring.softcap is None and sinks is None
        use = Use(window, q.shape[1] // layer.spec.num_kv_heads, MOST_ROWS if is_plain else None)
        for items in self._sheet_of(plan, use).items(use):
            self._attend(items, queries, own, out, scoring)
        for row, span in plan.layout.rows_of_spans():
            if not use.takes(span):
                rows = slice(row, row + span.num_rows)
                out[rows] = attend_prompt(queries.data[rows], span, plan.layout, keys, values, scaling=scoring.scaling)
        return out

    def _queries(self, form: Form, q: Tensor) -> Tensor:
        """Queries as the keys are stored: rotated, in two halves."""
        if form.format == NATIVE:
            return q
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        rotate_kernel[(triton.cdiv(len(q), STORED_ROWS), q.shape[1], form.parts)](
            Rows.of(q), out, self._signs[form.size], len(q), HEADS=q.shape[1], FORM=form, R=STORED_ROWS, **EXACT
        )
        return out

    def _attend(self, items: Items, queries: Rows, layer: Layer, out: Tensor, scoring: Scoring) -> None:
        """The rows of one launch."""
        keys, values = layer
        kv_heads, heads, tokens = keys.stored.codes.shape[1], out.shape[1], self.arena.layout.block_tokens
        shape = Shape(
            kv_heads,
            heads // kv_heads,
            tokens,
            min(tokens, MOST_TILE),
            items.folded,
            scoring.window or 0,
            scoring.softcap is not None,
            DTYPES[out.dtype],
        )
        sums = out.new_empty(items.most, kv_heads, items.folded, values.form.dim, dtype=torch.float32)
        partial = Partial(sums, sums.new_empty(*sums.shape[:3], 2))
        attend_kernel[(min(self._programs, max(1, items.most) * kv_heads),)](
            queries,
            keys.stored,
            values.stored,
            items.work,
            partial,
            scoring.scaling,
            scoring.softcap or 0.0,
            SHAPE=shape,
            K=keys.form,
            V=values.form,
            num_warps=4 if items.folded <= LEAST_FOLDED else 8,
        )
        join_kernel[(len(items.pieces), heads, values.form.parts)](
            partial,
            items.pieces,
            sums if scoring.sinks is None else scoring.sinks,
            self._signs_of(values.form),
            Rows.of(out),
            SHAPE=shape,
            V=values.form,
            SINKS=scoring.sinks is not None,
            CODED=values.form.format != NATIVE,
            **EXACT,
        )


def _for_writing(to: Values) -> Stored:
    """Sections with codes of 4 bits as the words that are written."""
    if to.form.format != Q4H:
        return to.stored
    words = to.stored.codes.view(torch.int32)
    return to.stored._replace(codes=words, codes_block=words.stride(0))


def _values(layer: LayerView) -> Layer:
    spec = layer.spec
    return Values.of(layer.k, spec.k_format, spec.k_dim), Values.of(layer.v, spec.v_format, spec.v_dim)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
