"""How near two results must be to be those of one computation: products, rows read back, modules, whole layers.

Owns the random rows on which things are compared, and every tolerance. Knows no modules and no kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from rekindle.layer_forms import GridFormat, WeightFormat

CHECKED_ROWS = 4
# Of outputs rounded to bf16 on both sides: an ulp of the larger. Of their fp32 sums: a share of the product of norms,
# which an unrounded sum of 4,096 products stays below by a factor of 60; one wrong weight of as many exceeds it.
OUTPUT_ULP, SUM_SHARE = 2.0**-7, 2.0**-14
# In int8 and int4: of the norm of all outputs, where numbers from a normal distribution give 0.013 and 0.093; and of
# each one, of the product of norms over the square root of the depth, about ten times what those give. Codes of a file
# differ from their own values by the rounding of these to bf16, those of 8 bits also by that of what is on no grid.
SHARES: dict[WeightFormat | GridFormat, float] = {"int8": 0.05, "int4": 0.2, "grid4": 0.01, "grid8": 0.02}
EACH: dict[WeightFormat | GridFormat, float] = {"int8": 0.15, "int4": 0.8, "grid4": 0.03, "grid8": 0.06}
MAGNITUDES = (1e-3, 0.1, 1.0, 10.0, 1e3)
ROWS_EACH = 8
# Of results rounded to bf16 on both sides. Where a sum was ordered or an exponential rounded otherwise, 1 in 200
# differs; with another order of roundings half of them do; with the GELU of erf for that of tanh, a third of those
# around magnitude 1. In fp32 a sum in another order changes most results, by a few of their last bits.
ULPS, MOST_UNEQUAL, FP32_SHARE = 2.0**-6, 0.05, 2.0**-16
# Of the norm of a row, where products in between were summed in another order and each rounded: several ulps.
ROUNDED_SHARE = {torch.bfloat16: 2.0**-6, torch.float32: 2.0**-14}
LEAST_SHARE = 1e-30  # below, shares may be 0 or anything as small, and any expert may have them
# How far a row may be from that of a layer's own code: a share of what the layer adds to it, and of the row itself,
# which both round. Rounding in between moves trained and random layers by less than a fifth of that.
UPDATE_SHARE, ROW_SHARE = 0.05, 2.0**-8


def checked_rows(depth: int) -> torch.Tensor:
    """A few random rows for products, always the same: bf16 [rows, depth]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(CHECKED_ROWS, depth, generator=generator).to(torch.bfloat16)


def random_rows(depth: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random rows of several magnitudes, half of them off centre, always the same: [rows, depth]."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(MAGNITUDES), ROWS_EACH, depth, generator=generator)
    rows[:, ::2] += 0.5
    return (rows * torch.tensor(MAGNITUDES, dtype=torch.float32)[:, None, None]).flatten(0, 1).to(dtype)


def same_products(
    ours: torch.Tensor,
    theirs: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    weight_format: WeightFormat | GridFormat = "bf16",
) -> bool:
    """Whether two products of rows and weight [columns, depth] differ by no more than the format's roundings.

    In bf16 NaN equals NaN; in int8 and int4 ours must be NaN where theirs are not finite.
    """
    if weight_format != "bf16":
        return _same_rounded(ours, theirs, rows, weight, bias, weight_format)
    ours, theirs = ours.float(), theirs.float()
    sums = rows.float().norm(dim=1)[:, None] * torch.linalg.vector_norm(weight, dim=1).float()
    if bias is not None:
        sums = sums + bias.float().abs()
    near = (ours - theirs).abs() <= OUTPUT_ULP * theirs.abs() + SUM_SHARE * sums
    return bool((near | (ours == theirs) | (ours.isnan() & theirs.isnan())).all())


def _same_rounded(
    ours: torch.Tensor,
    theirs: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_format: WeightFormat | GridFormat,
) -> bool:
    finite, error = theirs.isfinite(), (ours.double() - theirs.double()).abs()
    products = theirs.double() - (0.0 if bias is None else bias.double())
    sums = rows.double().norm(dim=1)[:, None] * torch.linalg.vector_norm(weight, dim=1).double()  # no wide weights
    each = error <= EACH[weight_format] * sums / rows.shape[1] ** 0.5 + OUTPUT_ULP * theirs.double().abs()
    small = error[finite].norm() <= SHARES[weight_format] * products[finite].norm()
    return bool(small) and bool(each[finite].all()) and torch.equal(ours.isnan(), ~finite)


def same_weights(ours: torch.Tensor, theirs: torch.Tensor, weight_format: WeightFormat | GridFormat) -> bool:
    """Whether weights that were read back are the others: in bf16 to the bit, else within the format's roundings."""
    if weight_format == "bf16":
        return torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
    return bool((ours.double() - theirs.double()).norm() <= SHARES[weight_format] * theirs.double().norm())


def same_results(ours: torch.Tensor, theirs: Any) -> bool:
    """Whether two results of `random_rows` are the same but for a few, of every magnitude, that lie next to it.

    In fp32: whether all differ by no more than the order of their sums.
    """
    if type(theirs) is not torch.Tensor or theirs.dtype != ours.dtype or theirs.shape != ours.shape:
        return False
    a, b = ours.float(), theirs.float()
    scale = b.square().mean(-1, keepdim=True).sqrt()
    if ours.dtype == torch.float32:
        return bool(((a - b).abs() <= FP32_SHARE * torch.maximum(b.abs(), scale)).all())
    near = (a - b).abs() <= ULPS * torch.maximum(b.abs(), scale)
    unequal = (a != b).reshape(len(MAGNITUDES), -1).float().mean(1)
    return bool(near.all()) and float(unequal.max()) <= MOST_UNEQUAL


def same_in_8_bits(ours: torch.Tensor, theirs: Any) -> bool:
    """Whether two results of `random_rows` differ by no more than the rounding of inputs to 8 bits moves them."""
    return _same_rows(ours, theirs, SHARES["int8"])


def same_but_for_sums(ours: torch.Tensor, theirs: Any) -> bool:
    """Whether two results of `random_rows` differ by no more than sums in another order, rounded on the way, do.

    Where a device sums in bf16, that changes more single values than `same_results` allows.
    """
    return _same_rows(ours, theirs, ROUNDED_SHARE[ours.dtype])


def _same_rows(ours: torch.Tensor, theirs: Any, share: float) -> bool:
    """Whether the norm of each row's difference is at most a share of its own."""
    if type(theirs) is not torch.Tensor or theirs.dtype != ours.dtype or theirs.shape != ours.shape:
        return False
    a, b = ours.float(), theirs.float()
    return bool(((a - b).norm(dim=-1) <= share * b.norm(dim=-1)).all())


def same_updates(ours: torch.Tensor, theirs: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether what two layers make of the rows `before` differs by roundings only; all [rows, size]."""
    ours, theirs, before = ours.float(), theirs.float(), before.float()
    allowed = UPDATE_SHARE * (theirs - before).norm(dim=1) + ROW_SHARE * theirs.norm(dim=1)
    return bool(((ours - theirs).norm(dim=1) <= allowed).all())


def same_largest(ours: torch.Tensor, theirs: torch.Tensor, share: float) -> bool:
    """Whether no value differs from the other by more than a share of the largest one."""
    return ours.shape == theirs.shape and bool((ours - theirs).abs().max() <= share * theirs.abs().max())


def same_choices(
    logits: torch.Tensor, ours: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor]
) -> bool:
    """Whether two choices by the same logits, experts and their shares, are of equal logits with the same shares."""
    (found, our_shares), (chosen, shares) = ours, theirs
    same = logits.gather(1, found) == logits.gather(1, chosen)
    a, b = (x.where(x >= LEAST_SHARE, 0.0).bfloat16() for x in (our_shares, shares))
    return bool((same | (shares < LEAST_SHARE)).all()) and same_results(a, b)
