"""Linear layers: right to the bound of fp32 sums, and the same bits in any company, on every level that runs here."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from rekindle.compute.cpu.kernels import build
from rekindle.compute.cpu.kernels.levels import LEVELS
from rekindle.compute.cpu.kernels.linear import LinearKernel, Matrix, PackedWeights, aligned_memory
from tests.kernels.native import built, needs_kernels

pytestmark = needs_kernels
SHAPES = [(96, 64), (64, 32), (1, 1), (65, 33), (200, 97), (130, 1000), (7, 4864)]  # columns, depth
MOST_ROWS = 512
FP32_ULP = 2.0**-24
PRODUCTS = {"amx": "tdpbf16ps", "avx512": "vdpbf16ps", "avxvnni": ("vfmadd", "{vex} vpdpbusd"), "avx2": "vfmadd"}


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Round fp32 to the nearest bf16, ties to even; uint16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def from_bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32)


def matrix(values: np.ndarray) -> Matrix:
    return Matrix(values.ctypes.data, *values.shape, values.strides[0] // values.itemsize)


def random_bf16(*shape: int, seed: int) -> np.ndarray:
    return to_bf16(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


@dataclass(frozen=True)
class Layer:
    """Weights and bias in bf16, packed."""

    kernel: LinearKernel
    weights: np.ndarray
    bias: np.ndarray
    packed: PackedWeights

    def multiply(
        self,
        rows: np.ndarray,
        *,
        output: Literal["bf16", "fp32"] = "fp32",
        threads: int = 1,
        with_bias: bool = True,
        spare: int = 0,
    ) -> np.ndarray:
        """Rows times the layer; the result's rows lie `spare` values apart, which must stay as they were."""
        columns = self.packed.columns
        whole = np.full((len(rows), columns + spare), 77, dtype=np.float32 if output == "fp32" else np.uint16)
        bias = self.bias.ctypes.data if with_bias else None
        out = whole[:, :columns]
        self.kernel.multiply(self.packed, matrix(rows), matrix(out), bias=bias, output=output, threads=threads)
        assert (whole[:, columns:] == 77).all()
        return out


@pytest.fixture(scope="module")
def kernels() -> dict[str, LinearKernel]:
    found = {level: choice.library for level, choice in built().items()}
    return {level: LinearKernel(library) for level, library in found.items() if library is not None}


@pytest.fixture(params=LEVELS)
def kernel(request: pytest.FixtureRequest, kernels: dict[str, LinearKernel]) -> LinearKernel:
    """Each level; the fastest that there is instead of one that this processor does not run."""
    level = request.param if request.param in kernels else next(iter(kernels))
    return kernels[level]


def layer(kernel: LinearKernel, columns: int, depth: int, *, seed: int = 0) -> Layer:
    weights, bias = random_bf16(columns, depth, seed=seed), random_bf16(columns, seed=seed + 1)
    packed = kernel.pack(matrix(weights))
    packed.check()
    return Layer(kernel, weights, bias, packed)


@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_products_are_those_of_fp64_to_the_bound_of_fp32_sums(kernel: LinearKernel, columns: int, depth: int) -> None:
    made = layer(kernel, columns, depth)
    rows = random_bf16(37, depth, seed=2)
    x, w, bias = (from_bf16(values).astype(np.float64) for values in (rows, made.weights, made.bias))
    expected = x @ w.T + bias
    # Each of depth + 1 additions rounds by half an ulp of a partial sum, which is at most the sum of magnitudes.
    bound = (depth + 1) * FP32_ULP * (np.abs(x) @ np.abs(w).T + np.abs(bias))
    sums = made.multiply(rows)
    assert (np.abs(sums - expected) <= bound).all()
    assert (np.abs(made.multiply(rows, with_bias=False) - x @ w.T) <= bound).all()
    np.testing.assert_array_equal(made.multiply(rows, output="bf16"), to_bf16(sums))


@pytest.mark.parametrize(("columns", "depth"), [(130, 70), (64, 1000)])
def test_bits_do_not_depend_on_company(kernel: LinearKernel, columns: int, depth: int) -> None:
    made = layer(kernel, columns, depth)
    rows = random_bf16(MOST_ROWS, depth, seed=3)
    whole = made.multiply(rows)
    for count in (*range(1, 41), 66, MOST_ROWS):
        for threads in (1, 2, 3):
            np.testing.assert_array_equal(made.multiply(rows[:count], threads=threads), whole[:count])
            np.testing.assert_array_equal(made.multiply(rows[-count:], threads=threads), whole[-count:])
    np.testing.assert_array_equal(made.multiply(rows[[5, 400, 17]]), whole[[5, 400, 17]])


def test_more_rows_than_are_staged_at_once(kernel: LinearKernel) -> None:
    made = layer(kernel, 70, 5000)
    rows = random_bf16(1100, 5000, seed=4)
    whole = made.multiply(rows, threads=2)
    for start in range(0, 1100, 100):
        np.testing.assert_array_equal(made.multiply(rows[start : start + 1]), whole[start : start + 1])


def test_columns_do_not_depend_on_company_either(kernel: LinearKernel) -> None:
    weights, rows = random_bf16(300, 96, seed=5), random_bf16(9, 96, seed=6)
    bias = np.zeros(300, dtype=np.uint16)

    def product(of: np.ndarray) -> np.ndarray:
        return Layer(kernel, of, bias, kernel.pack(matrix(of))).multiply(rows)

    np.testing.assert_array_equal(product(weights[63:130]), product(weights)[:, 63:130])


def test_rows_of_numbers_that_are_not_finite_touch_no_other(kernel: LinearKernel) -> None:
    made = layer(kernel, 65, 33)
    for count in (3, 16, 17, 40):
        rows = random_bf16(count, 33, seed=7)
        clean = made.multiply(rows)
        for row, value in ((0, np.nan), (1, np.inf)):
            rows[row, 32] = to_bf16(np.array([value], dtype=np.float32))[0]
        dirty = made.multiply(rows)
        np.testing.assert_array_equal(dirty[2:], clean[2:])
        assert np.isnan(dirty[0]).all() and np.isinf(dirty[1]).all()
        rounded = made.multiply(rows, output="bf16")
        np.testing.assert_array_equal(np.isnan(from_bf16(rounded)), np.isnan(dirty))


def test_weights_that_are_not_finite_touch_their_column_only(kernel: LinearKernel) -> None:
    weights, rows = random_bf16(70, 40, seed=8), random_bf16(5, 40, seed=9)
    weights[66, 39] = to_bf16(np.array([np.nan], dtype=np.float32))[0]
    made = Layer(kernel, weights, np.zeros(70, dtype=np.uint16), kernel.pack(matrix(weights)))
    assert np.isnan(made.multiply(rows)).any(axis=0).nonzero()[0].tolist() == [66]


def test_strides_of_input_and_output(kernel: LinearKernel) -> None:
    made = layer(kernel, 70, 64)
    wide = random_bf16(20, 101, seed=10)
    rows = wide[:, 3:67]  # their addresses are odd multiples of two bytes
    expected = made.multiply(np.ascontiguousarray(rows))
    np.testing.assert_array_equal(made.multiply(rows, spare=9), expected)
    np.testing.assert_array_equal(made.multiply(rows, spare=9, output="bf16"), to_bf16(expected))
    np.testing.assert_array_equal(made.multiply(rows[::3]), expected[::3])
    assert made.multiply(rows[:0]).shape == (0, 70)


@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_both_layouts_pack_to_the_same_memory_on_every_level(
    kernels: dict[str, LinearKernel], columns: int, depth: int
) -> None:
    weights = random_bf16(columns, depth, seed=11)
    across = np.ascontiguousarray(weights.T)
    packed = [kernel.pack(matrix(weights), threads=2) for kernel in kernels.values()]
    packed += [kernel.pack(matrix(across), layout="depth first") for kernel in kernels.values()]
    assert len({each.memory.tobytes() for each in packed}) == 1
    assert {(each.columns, each.depth) for each in packed} == {(columns, depth)}
    assert packed[0].num_bytes == -(-columns // 64) * 64 * -(-depth // 32) * 32 * 2


def test_weights_of_no_size_are_refused(kernel: LinearKernel) -> None:
    for rows, columns in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="cannot be packed"):
            kernel.pack(Matrix(0, rows, columns, columns))


def test_memory_is_aligned() -> None:
    for size in (1, 63, 64, 4097):
        memory = aligned_memory(size)
        assert memory.ctypes.data % 64 == 0 and memory.nbytes == size


def innermost_loops(assembly: str) -> Iterator[list[str]]:
    """The instructions of every loop that has no label but its own."""
    body: list[str] | None = None
    label = ""
    for line in assembly.splitlines():
        found = re.fullmatch(r"(\.L\d+):", line)
        if found:
            label, body = found[1], []
        elif body is not None and line.startswith("\t") and not line.startswith("\t."):
            body.append(line.strip())
            if re.match(rf"j\w+\s+{re.escape(label)}$", line.strip()):
                yield body


@pytest.mark.parametrize("level", LEVELS)
def test_sums_stay_in_registers_while_they_grow(level: str, tmp_path: Path) -> None:
    compiler = build.find_compiler()
    flags = [*build.COMPILE, *build.level_flags(level), "-S", "-o", str(tmp_path / "linear.s")]
    subprocess.run([*compiler.command, *flags, str(build.NATIVE / "linear.cpp")], check=True)
    loops = list(innermost_loops((tmp_path / "linear.s").read_text()))
    products = [loop for loop in loops if sum(line.startswith(PRODUCTS[level]) for line in loop) >= 4]
    assert len(products) >= (2 if level == "amx" else 6)
    stored = [line for loop in products for line in loop if re.search(r"mm\d+, -?\d*\(%r[sb]p\)$", line)]
    assert stored == []
