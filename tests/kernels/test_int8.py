"""Linear layers in int8: bit for bit what their definition gives, the same at every level and in any company."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import pytest

from rekindle.compute.cpu.kernels.linear import MOST_INT8_DEPTH, LinearKernel, Matrix, PackedWeights
from rekindle.layer_forms import WeightFormat
from tests.kernels.native import built, needs_kernels
from tests.kernels.test_linear import SHAPES, from_bf16, matrix, random_bf16, to_bf16

pytestmark = needs_kernels
MOST_ROTATED = 256


@pytest.fixture
def kernels() -> list[LinearKernel]:
    """One for each level that runs here."""
    return [LinearKernel(each.library) for each in built().values() if each.library is not None]


def signs() -> np.ndarray:
    def generated() -> Iterator[float]:
        state = 1
        while True:
            state = (state * 1664525 + 1013904223) % (1 << 32)
            yield -1.0 if state >> 31 else 1.0

    found = generated()
    return np.array([next(found) for _ in range(MOST_ROTATED)], dtype=np.float32)


def rotated(x: np.ndarray) -> np.ndarray:
    """fp32 [n, depth]: signs, then a Hadamard transform of each piece, in the order of a butterfly."""
    depth = x.shape[1]
    size = min(depth & -depth, MOST_ROTATED)
    x = (x.reshape(-1, size) * signs()[:size]).astype(np.float32)
    half = 1
    while half < size:
        pairs = x.reshape(len(x), -1, 2, half)
        x = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(len(x), size)
        half *= 2
    scale = np.float32(0.5) ** (size.bit_length() // 2 if size.bit_length() % 2 else size.bit_length() // 2 - 1)
    if size.bit_length() % 2 == 0:
        scale = np.float32(scale * np.float32(0.70710678))
    return (x * scale).reshape(-1, depth)


def quantised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers [n, depth] and scales [n]."""
    x = rotated(x)
    largest = np.abs(x).max(axis=1)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return np.rint(x * inverse[:, None]).astype(np.int64), largest / np.float32(127)


def product(
    kernel: LinearKernel,
    packed: PackedWeights,
    rows: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    output: Literal["bf16", "fp32"] = "fp32",
    threads: int = 1,
) -> np.ndarray:
    out = np.zeros((len(rows), packed.columns), dtype=np.float32 if output == "fp32" else np.uint16)
    address = None if bias is None else bias.ctypes.data
    kernel.multiply(packed, matrix(rows), matrix(out), bias=address, output=output, threads=threads)
    return out


@pytest.mark.parametrize(("columns", "depth"), [*SHAPES, (70, 896), (3, 512)])
def test_outputs_are_those_of_the_definition_to_the_bit(kernels: list[LinearKernel], columns: int, depth: int) -> None:
    weights, bias, rows = (random_bf16(*shape, seed=columns) for shape in ((columns, depth), (columns,), (37, depth)))
    (q, row_scale), (w, column_scale) = quantised(from_bf16(rows)), quantised(from_bf16(weights))
    exact = (q @ w.T).astype(np.float32) * row_scale[:, None] * column_scale
    for kernel in kernels:
        packed = kernel.pack(matrix(weights), weight_format="int8", threads=2)
        packed.check()
        np.testing.assert_array_equal(product(kernel, packed, rows), exact)
        with_bias = exact + from_bf16(bias)
        np.testing.assert_array_equal(product(kernel, packed, rows, bias), with_bias)
        np.testing.assert_array_equal(product(kernel, packed, rows, bias, output="bf16"), to_bf16(with_bias))
        turned = np.ascontiguousarray(weights.T)
        other = kernel.pack(matrix(turned), weight_format="int8", layout="depth first")
        np.testing.assert_array_equal(other.memory, packed.memory)


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_bits_do_not_depend_on_company(weight_format: WeightFormat, kernels: list[LinearKernel]) -> None:
    weights, rows = random_bf16(130, 200, seed=1), random_bf16(512, 200, seed=2)
    for kernel in kernels:
        packed = kernel.pack(matrix(weights), weight_format=weight_format)
        whole = product(kernel, packed, rows, threads=2)
        for count in (*range(1, 41), 66):
            for threads in (1, 3):
                np.testing.assert_array_equal(product(kernel, packed, rows[:count], threads=threads), whole[:count])
                np.testing.assert_array_equal(product(kernel, packed, rows[-count:], threads=threads), whole[-count:])


def test_threads_unpack_int4_weights_apart(kernels: list[LinearKernel]) -> None:
    # Long enough that threads overlap even where other processes take turns with them.
    weights, rows = random_bf16(4096, 512, seed=1), random_bf16(64, 512, seed=2)
    for kernel in kernels:
        packed = kernel.pack(matrix(weights), weight_format="int4", threads=2)
        alone = product(kernel, packed, rows, threads=1)
        for _ in range(10):
            np.testing.assert_array_equal(product(kernel, packed, rows, threads=3), alone)


@pytest.mark.parametrize("depth", [256, 896])
def test_an_outlier_does_not_cost_the_precision_of_other_values(kernels: list[LinearKernel], depth: int) -> None:
    weights, rows = random_bf16(64, depth, seed=3), random_bf16(20, depth, seed=4)
    rows[:, 7] = to_bf16(from_bf16(rows[:, 7]) * np.float32(60))
    weights[:, 7] = to_bf16(from_bf16(weights[:, 7]) / np.float32(60))
    true = from_bf16(rows).astype(np.float64) @ from_bf16(weights).astype(np.float64).T
    for kernel in kernels:
        packed = kernel.pack(matrix(weights), weight_format="int8")
        error = product(kernel, packed, rows) - true
        # Without the rotation a scale of 60 * 3 / 127 leaves two bits for the other values: an error of 0.3.
        assert np.linalg.norm(error) < 0.06 * np.linalg.norm(true)


def test_rows_that_are_not_finite_are_nan_and_touch_no_other(kernels: list[LinearKernel]) -> None:
    weights, bias = random_bf16(65, 96, seed=5), random_bf16(65, seed=6)
    for kernel in kernels:
        packed = kernel.pack(matrix(weights), weight_format="int8")
        for count in (4, 16, 17, 40):
            rows = random_bf16(count, 96, seed=7)
            clean = product(kernel, packed, rows, bias)
            rows[0, 95], rows[1, 3], rows[2] = to_bf16(np.array([np.nan, np.inf, 0.0], dtype=np.float32))
            dirty = product(kernel, packed, rows, bias)
            np.testing.assert_array_equal(dirty[3:], clean[3:])
            assert np.isnan(dirty[:2]).all()
            np.testing.assert_array_equal(dirty[2], from_bf16(bias))


def test_a_column_that_is_not_finite_is_nan_and_touches_no_other(kernels: list[LinearKernel]) -> None:
    weights, rows = random_bf16(65, 96, seed=8), random_bf16(5, 96, seed=9)
    dirty = weights.copy()
    dirty[3, 50] = to_bf16(np.array([-np.inf], dtype=np.float32))[0]
    for kernel in kernels:
        outputs = [product(kernel, kernel.pack(matrix(each), weight_format="int8"), rows) for each in (weights, dirty)]
        assert np.isnan(outputs[1][:, 3]).all()
        for output in outputs:
            output[:, 3] = 0
        np.testing.assert_array_equal(*outputs)


def test_bytes_are_half_of_those_of_bf16_and_too_deep_layers_are_refused(kernels: list[LinearKernel]) -> None:
    weights = random_bf16(128, 1024, seed=10)
    packed = kernels[0].pack(matrix(weights), weight_format="int8")
    assert packed.num_bytes == 128 * (1024 + 8)
    with pytest.raises(ValueError, match="too large for int8"):
        kernels[0].pack(Matrix(0, 1, MOST_INT8_DEPTH + 1, MOST_INT8_DEPTH + 1), weight_format="int8")
