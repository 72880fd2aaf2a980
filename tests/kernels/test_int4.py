"""Linear layers in int4: bit for bit what their definition gives, the same at every level and in any company."""

from __future__ import annotations

import numpy as np
import pytest

from rekindle.compute.cpu.kernels.linear import MOST_INT8_DEPTH, LinearKernel, Matrix
from tests.kernels.native import needs_kernels
from tests.kernels.test_int8 import kernels, product, quantised, rotated
from tests.kernels.test_linear import SHAPES, from_bf16, matrix, random_bf16, to_bf16

__all__ = ["kernels"]
pytestmark = needs_kernels
GROUP, HIGHEST, MULTIPLIERS = 32, 7, 16


def in_4_bits(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers [n, depth], each a code from -7 to 7 times the multiplier of its 32, and scales [n]."""
    x = rotated(x)
    columns, depth = x.shape
    largest = np.abs(x).max(axis=1)
    inverse = np.divide(np.float32(HIGHEST * MULTIPLIERS), largest, out=np.zeros_like(largest), where=largest > 0)
    groups = np.pad(x * inverse[:, None], ((0, 0), (0, -depth % GROUP))).reshape(columns, -1, 1, GROUP)
    multipliers = np.arange(1, MULTIPLIERS + 1, dtype=np.float32)[:, None]
    codes = np.rint(groups * (np.float32(1) / multipliers)).clip(-HIGHEST, HIGHEST)  # [column, group, multiplier, 32]
    off = groups - codes * multipliers
    errors = np.zeros(off.shape[:3], dtype=np.float32)
    for k in range(GROUP):
        errors += off[..., k] * off[..., k]
    best = errors.argmin(axis=2)[:, :, None, None]
    numbers = np.take_along_axis(codes * multipliers, best, axis=2).reshape(columns, -1)[:, :depth]
    return numbers.astype(np.int64), largest / np.float32(HIGHEST * MULTIPLIERS)


def uneven(columns: int, depth: int, *, seed: int) -> np.ndarray:
    """Weights whose groups have different magnitudes after the rotation, too: bf16 [columns, depth]."""
    weights = from_bf16(random_bf16(columns, depth, seed=seed))
    pieces = 2.0 ** np.random.default_rng(seed).integers(-4, 5, (columns, -(-depth // GROUP)))
    return to_bf16(weights * np.repeat(pieces, GROUP, axis=1)[:, :depth].astype(np.float32))


@pytest.mark.parametrize(("columns", "depth"), [*SHAPES, (70, 896), (3, 512), (66, 2528), (200, 160)])
def test_outputs_are_those_of_the_definition_to_the_bit(kernels: list[LinearKernel], columns: int, depth: int) -> None:
    weights, bias, rows = (
        uneven(columns, depth, seed=columns),
        random_bf16(columns, seed=1),
        random_bf16(100, depth, seed=2),
    )
    (q, row_scale), (w, column_scale) = quantised(from_bf16(rows)), in_4_bits(from_bf16(weights))
    exact = (q @ w.T).astype(np.float32) * row_scale[:, None] * column_scale
    for kernel in kernels:
        packed = kernel.pack(matrix(weights), weight_format="int4", threads=2)
        packed.check()
        for count in (1, 2, 7, 12, 13, 37, 100):  # whose weights are unpacked block by block, or panel by panel
            np.testing.assert_array_equal(product(kernel, packed, rows[:count]), exact[:count])
        with_bias = exact + from_bf16(bias)
        np.testing.assert_array_equal(product(kernel, packed, rows, bias), with_bias)
        np.testing.assert_array_equal(product(kernel, packed, rows, bias, output="bf16"), to_bf16(with_bias))
        turned = np.ascontiguousarray(weights.T)
        other = kernel.pack(matrix(turned), weight_format="int4", layout="depth first")
        np.testing.assert_array_equal(other.memory, packed.memory)


@pytest.mark.parametrize("depth", [256, 896])
def test_an_outlier_does_not_cost_the_precision_of_other_values(kernels: list[LinearKernel], depth: int) -> None:
    weights, rows = random_bf16(64, depth, seed=3), random_bf16(20, depth, seed=4)
    weights[:, 7] = to_bf16(from_bf16(weights[:, 7]) * np.float32(60))
    rows[:, 7] = to_bf16(from_bf16(rows[:, 7]) / np.float32(60))
    true = from_bf16(rows).astype(np.float64) @ from_bf16(weights).astype(np.float64).T
    for kernel in kernels:
        packed = kernel.pack(matrix(weights), weight_format="int4")
        error = product(kernel, packed, rows) - true
        # Without the rotation a unit of 60 * 3 / 112 leaves next to nothing of the other values: an error of 0.9.
        assert np.linalg.norm(error) < 0.5 * np.linalg.norm(true)


def test_the_best_multiplier_is_better_than_the_one_of_the_largest_value(kernels: list[LinearKernel]) -> None:
    weights, rows = random_bf16(64, 896, seed=5), random_bf16(64, 896, seed=6)
    true = from_bf16(rows).astype(np.float64) @ from_bf16(weights).astype(np.float64).T
    for kernel in kernels:
        error = product(kernel, kernel.pack(matrix(weights), weight_format="int4"), rows) - true
        # Of numbers from a normal distribution, scales of the largest of 32 over 7 give 0.0975.
        assert np.linalg.norm(error) < 0.0945 * np.linalg.norm(true)


def test_what_is_not_finite_is_nan_and_touches_nothing_else(kernels: list[LinearKernel]) -> None:
    weights, bias = random_bf16(65, 96, seed=7), random_bf16(65, seed=8)
    dirty_weights = weights.copy()
    dirty_weights[3, 50] = to_bf16(np.array([-np.inf], dtype=np.float32))[0]
    for kernel in kernels:
        clean, dirty = (kernel.pack(matrix(each), weight_format="int4") for each in (weights, dirty_weights))
        for count in (4, 16, 17, 40):
            rows = random_bf16(count, 96, seed=9)
            expected = product(kernel, clean, rows, bias)
            rows[0, 95], rows[1, 3], rows[2] = to_bf16(np.array([np.nan, np.inf, 0.0], dtype=np.float32))
            found = product(kernel, dirty, rows, bias)
            assert np.isnan(found[:2]).all() and np.isnan(found[:, 3]).all()
            expected[:, 3] = found[:, 3] = 0.0
            np.testing.assert_array_equal(found[3:], expected[3:])
            np.testing.assert_array_equal(np.delete(found[2], 3), np.delete(from_bf16(bias), 3))


def test_magnitudes_do_not_matter(kernels: list[LinearKernel]) -> None:
    weights, rows = random_bf16(70, 128, seed=10), random_bf16(5, 128, seed=11)
    for kernel in kernels:
        expected = product(kernel, kernel.pack(matrix(weights), weight_format="int4"), rows)
        for power in (2.0**-90, 2.0**90):
            scaled = to_bf16(from_bf16(weights) * np.float32(power))
            packed = kernel.pack(matrix(scaled), weight_format="int4")
            np.testing.assert_array_equal(product(kernel, packed, rows), expected * np.float32(power))


def test_a_weight_takes_little_more_than_4_bits_and_too_deep_layers_are_refused(kernels: list[LinearKernel]) -> None:
    packed = kernels[0].pack(matrix(random_bf16(128, 1024, seed=12)), weight_format="int4")
    assert packed.num_bytes == 128 * (1024 * 33 // 64 + 8)
    with pytest.raises(ValueError, match="too large for int4"):
        kernels[0].pack(Matrix(0, 1, MOST_INT8_DEPTH + 1, MOST_INT8_DEPTH + 1), weight_format="int4")
