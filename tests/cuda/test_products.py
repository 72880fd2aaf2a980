"""Weights in 8 and 4 bits on a card: codes, scales and products are those of the processor's kernels, to the bit.

In the interpreter rows are bf16 values in fp32, as it cuts what it should round.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rekindle.compute.cpu.kernels.linear import MOST_INT8_DEPTH, LinearKernel, PackedWeights
from rekindle_cuda import packing
from rekindle_cuda.packing import CardWeights, RoundFormat, multiply, pack
from tests.cuda.test_attention import DEVICE
from tests.kernels.native import built, needs_kernels, runnable
from tests.kernels.test_int4 import uneven
from tests.kernels.test_int8 import product
from tests.kernels.test_linear import from_bf16, matrix, random_bf16, to_bf16

pytestmark = needs_kernels
FORMATS: tuple[RoundFormat, ...] = ("int8", "int4")
SHAPES = [(66, 32), (1, 1), (5, 33), (9, 130), (3, 896)]


@pytest.fixture(scope="module")
def kernel() -> LinearKernel:
    found = built()[runnable()[0]].library
    assert found is not None
    return LinearKernel(found)


def on_device(values: np.ndarray) -> torch.Tensor:
    """Values of bf16 on the device, in fp32."""
    return torch.from_numpy(from_bf16(values)).to(DEVICE)


def of_processor(packed: PackedWeights) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What native/panel.hpp has: codes [columns, depth], multipliers [columns, depth / 32] and scales [columns]."""
    panels = -(-packed.columns // 64)
    memory = packed.memory.view(np.uint8).reshape(panels, -1)
    blocks, tail = np.split(memory, [memory.shape[1] - 512], axis=1)
    if packed.format == "int8":
        words = blocks.view(np.int8).reshape(panels, -1, 4, 16, 16, 4)  # [panel, block, strip, word, column, byte]
        multipliers = np.ones((panels, words.shape[1], 64, 2), np.int8)
    else:
        blocks = blocks.reshape(panels, -1, 2048 + 64)
        both = blocks[..., :2048].reshape(panels, -1, 4, 8, 16, 4)
        words = np.concatenate([both & 15, both >> 4], axis=3).astype(np.int8) - 8
        multipliers = np.stack([blocks[..., 2048:] & 15, blocks[..., 2048:] >> 4], axis=-1).astype(np.int8) + 1
    codes = words.transpose(0, 2, 4, 1, 3, 5).reshape(64 * panels, -1)[: packed.columns]
    groups = multipliers.transpose(0, 2, 1, 3).reshape(64 * panels, -1)[: packed.columns]
    scales = np.ascontiguousarray(tail[:, :256]).view(np.float32).reshape(-1)[: packed.columns]
    return codes, groups, scales


def of_card(packed: CardWeights) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same of packed weights on a card."""
    packed.check()
    numbers, multipliers, scales = (each.cpu().numpy() for each in packed.held[:3])
    if packed.format == "int8":
        return numbers, np.ones((packed.columns, numbers.shape[1] // 32), np.int8), scales
    blocks = numbers.reshape(packed.columns, -1, 64)
    codes = np.concatenate([(blocks << 4) >> 4, blocks >> 4], axis=2).reshape(packed.columns, -1)
    return codes, multipliers[:, : codes.shape[1] // 32], scales


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(("columns", "depth", "held"), [*((*each, packing.CHUNK) for each in SHAPES), (3, 896, 256)])
def test_codes_and_scales_are_the_processors(
    kernel: LinearKernel,
    columns: int,
    depth: int,
    held: int,
    weight_format: RoundFormat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "CHUNK", held)  # values of a row at a time
    monkeypatch.setattr(packing, "SCRATCH_BYTES", 1 << 13)  # a few columns at a time
    weights = uneven(columns, depth, seed=columns)
    weights[0] = 0
    theirs = of_processor(kernel.pack(matrix(weights), weight_format=weight_format))
    ours = of_card(pack(on_device(weights), weight_format))
    groups = -(-depth // 32)
    np.testing.assert_array_equal(ours[0][:, :depth], theirs[0][:, :depth])
    np.testing.assert_array_equal(ours[1][:, :groups], theirs[1][:, :groups])
    np.testing.assert_array_equal(ours[2], theirs[2])
    assert not ours[0][:, depth:].any()
    turned = of_card(pack(on_device(np.ascontiguousarray(weights.T)).T, weight_format))
    for one, other in zip(turned, ours, strict=True):
        np.testing.assert_array_equal(one, other)


@settings(max_examples=8, phases=[Phase.generate])  # smaller cases of a failure take the interpreter minutes
@given(st.data())
def test_products_are_the_processors_to_the_bit(kernel: LinearKernel, data: st.DataObject) -> None:
    """For any number of rows: so a row's bits depend on no company, and on neither of the two machines."""
    columns, depth = data.draw(st.integers(1, 12), "columns"), data.draw(st.sampled_from([1, 48, 100, 256]))
    weight_format, biased = data.draw(st.sampled_from(FORMATS)), data.draw(st.booleans(), "bias")
    count = data.draw(st.sampled_from([1, 17, 33, 65]), "rows")
    weights, bias, rows = (
        uneven(columns, depth, seed=3),
        random_bf16(columns, seed=1),
        random_bf16(count, depth, seed=2),
    )
    theirs = product(kernel, kernel.pack(matrix(weights), weight_format=weight_format), rows, bias if biased else None)
    ours = multiply(pack(on_device(weights), weight_format), on_device(rows), on_device(bias) if biased else None)
    np.testing.assert_array_equal(ours.cpu().numpy(), theirs)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_what_is_not_finite_is_nan_and_touches_nothing_else(kernel: LinearKernel, weight_format: RoundFormat) -> None:
    weights, rows = random_bf16(20, 96, seed=7), random_bf16(20, 96, seed=8)
    weights[3, 50] = to_bf16(np.array([-np.inf], np.float32))[0]
    rows[0, 95], rows[1, 3], rows[2] = to_bf16(np.array([np.nan, np.inf, 0.0], np.float32))
    theirs = product(kernel, kernel.pack(matrix(weights), weight_format=weight_format), rows)
    ours = multiply(pack(on_device(weights), weight_format), on_device(rows)).cpu().numpy()
    assert np.isnan(ours[:2]).all() and np.isnan(ours[:, 3]).all() and np.isfinite(np.delete(ours[2:], 3, 1)).all()
    np.testing.assert_array_equal(ours, theirs)


def test_rows_of_any_shape_and_stride_are_taken_and_others_refused() -> None:
    packed = pack(torch.randn(20, 96, device=DEVICE), "int8")
    rows = torch.randn(3, 5, 200, device=DEVICE)
    whole = multiply(packed, rows[..., :96].contiguous())
    assert whole.shape == (3, 5, 20)
    assert torch.equal(multiply(packed, rows[..., :96]), whole)
    assert torch.equal(multiply(packed, rows[1, :, :96].T.contiguous().T), whole[1])
    assert multiply(packed, rows[:, :0, :96]).shape == (3, 0, 20)
    for wrong in (rows[..., :96].half(), rows[..., :95]):
        with pytest.raises(RuntimeError, match="rows of 96 values in bf16 or fp32 are needed"):
            multiply(packed, wrong)
    with pytest.raises(ValueError, match="cannot be packed in int4"):
        pack(torch.empty(1, MOST_INT8_DEPTH + 1, device="meta"), "int4")


def test_weights_take_half_and_little_more_than_a_quarter_of_what_bf16_takes() -> None:
    weights = torch.randn(4, 4096, device=DEVICE)
    assert pack(weights, "int8").num_bytes == 4 * (4096 + 4)
    assert pack(weights, "int4").num_bytes == 4 * (4096 // 2 + 4096 // 32 + 4)
