"""Rows between products by Triton's kernels, against torch with the roundings of transformers.

In fp32 by the interpreter, which cuts bf16; on a card in bf16, too.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rekindle.model.layer_parts import ACTIVATIONS, ROUNDINGS, NormParts
from rekindle_cuda.rows import Norm, added, added_and_normalised, gated, normalised
from tests.cuda.conftest import IS_INTERPRETED
from tests.cuda.test_attention import DEVICE

DTYPES = [torch.float32] if IS_INTERPRETED else [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}
ROWS = st.integers(1, 11)


def same(ours: Tensor, theirs: Tensor) -> None:
    bound = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


def rows(num_rows: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random rows that do not lie next to each other."""
    wide = torch.randn(num_rows, 2, columns, generator=torch.Generator().manual_seed(seed))
    return (3 * wide).to(DEVICE, dtype)[:, 1]


def norms(columns: int, rounding: str | None, seed: int) -> tuple[NormParts | None, Norm | None]:
    if rounding is None:
        return None, None
    weight = torch.randn(columns, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    parts = NormParts(None, weight, 1e-3, "before the weight" if rounding == ROUNDINGS[0] else "after the weight")
    return parts, Norm.of(parts)


@settings(max_examples=25)
@given(st.data())
def test_rows_are_summed_and_normed(data: st.DataObject) -> None:
    dtype, columns = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([1, 40, 64, 72, 1030]), "columns")
    num_rows = data.draw(ROWS, "rows")
    x, base = (rows(num_rows, columns, dtype, seed) for seed in (0, 1))
    inner, of_inner = norms(columns, data.draw(st.sampled_from([None, *ROUNDINGS]), "inner"), 2)
    outer, of_outer = norms(columns, data.draw(st.sampled_from(ROUNDINGS), "outer"), 3)
    assert outer is not None and of_outer is not None
    total = base + (x if inner is None else inner.computed(x))
    sums, normed = added_and_normalised(x, base, of_inner, of_outer)
    same(sums, total)
    same(normed, outer.computed(sums))
    same(added(x, base, of_inner), total)
    same(normalised(x[None], of_outer), outer.computed(x)[None])
    base = base.contiguous()
    assert added(x, base, of_inner, into=base) is base
    same(base, total)


@settings(max_examples=20)
@given(st.data())
def test_rows_are_gated(data: st.DataObject) -> None:
    dtype, columns = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([1, 96, 1024, 1100]), "columns")
    activation = data.draw(st.sampled_from(list(ACTIVATIONS)), "activation")
    gates, others = rows(data.draw(ROWS, "rows"), 2 * columns, dtype, 4).chunk(2, -1)
    same(gated(gates, others, activation), ACTIVATIONS[activation](gates) * others)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_finite_stay_alone(dtype: torch.dtype) -> None:
    x = rows(5, 64, dtype, 0)
    _, norm = norms(64, ROUNDINGS[0], 2)
    assert norm is not None
    clean = normalised(x, norm)
    x[2, 7] = torch.nan
    ours = normalised(x, norm)
    assert ours[2].isnan().all() and torch.equal(ours[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    gates = gated(x, nn.functional.relu(x), "silu")
    assert gates.isnan().sum() == 1
