"""Linear layers over codes of files: bit for bit what their definition gives, at every level and in any company."""

from __future__ import annotations

import numpy as np
import pytest

from rekindle.compute.cpu.kernels.grids import pack_grid, rows_of
from rekindle.compute.cpu.kernels.linear import LinearKernel, PackedWeights
from rekindle.layer_forms import GROUP, ZERO, Grid, GridFormat
from tests.kernels.native import needs_kernels
from tests.kernels.test_int8 import kernels, product
from tests.kernels.test_linear import from_bf16, random_bf16, to_bf16

__all__ = ["kernels"]
pytestmark = needs_kernels
FORMATS: tuple[GridFormat, ...] = ("grid4", "grid8")
SHAPES = [(1, 32), (64, 64), (65, 96), (130, 224), (200, 160), (70, 896), (3, 2528)]
LARGEST = np.float32(127 * 256)


def random_grid(weight_format: GridFormat, columns: int, depth: int, *, seed: int) -> Grid:
    """Codes of all sizes with steps of all magnitudes, and offsets that nothing depends on."""
    rng = np.random.default_rng(seed)
    highest, numbers = 16 if weight_format == "grid4" else 256, (columns, depth // GROUP)
    codes = rng.integers(0, highest, (columns, depth), dtype=np.uint8)
    codes[0] = highest - 1  # sums as large as they can be
    steps = (rng.standard_normal(numbers) * 2.0 ** rng.integers(-9, 3, numbers)).astype(np.float16)
    return Grid(codes, steps, rng.standard_normal(numbers).astype(np.float16) if weight_format == "grid4" else None)


def packed_of(kernel: LinearKernel, grid: Grid) -> PackedWeights:
    columns, depth = grid.codes.shape
    found = pack_grid(kernel, [grid], columns=columns, depth=depth)
    found.check()
    return found


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c in fp32, rounded once: the product of two such numbers is exact in fp64."""
    return (a.astype(np.float64) * b.astype(np.float64) + c).astype(np.float32)


def defined(grid: Grid, rows: np.ndarray) -> np.ndarray:
    """Products of fp32 rows [n, depth] as the format defines them: fp32 [n, columns]."""
    codes = grid.codes.astype(np.int64) - (ZERO if grid.offsets is None else 0)
    total = np.zeros((len(rows), len(codes)), np.float32)
    for group in range(grid.steps.shape[1]):
        at = slice(group * GROUP, (group + 1) * GROUP)
        largest = np.abs(rows[:, at]).max(axis=1)[:, None]
        inverse = np.divide(LARGEST, largest, out=np.zeros_like(largest), where=largest > 0)
        numbers, scale = np.rint(rows[:, at] * inverse).astype(np.int64), largest / LARGEST
        sums = (numbers @ codes[:, at].T).astype(np.float32)
        total = fused(sums, grid.steps[:, group].astype(np.float32) * scale, total)
        if grid.offsets is not None:
            total = fused(numbers.sum(axis=1).astype(np.float32)[:, None] * scale, grid.offsets[:, group], total)
    return total


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_outputs_are_those_of_the_definition_to_the_bit(
    kernels: list[LinearKernel], weight_format: GridFormat, columns: int, depth: int
) -> None:
    grid = random_grid(weight_format, columns, depth, seed=columns)
    bias, rows = random_bf16(columns, seed=1), random_bf16(50, depth, seed=2)
    rows[3] = to_bf16(np.full(depth, -3.0, dtype=np.float32))  # all numbers the largest
    exact = defined(grid, from_bf16(rows))
    for kernel in kernels:
        packed = packed_of(kernel, grid)
        for count in (1, 2, 3, 4, 5, 6, 7, 13, 50):
            np.testing.assert_array_equal(product(kernel, packed, rows[:count]), exact[:count])
        with_bias = exact + from_bf16(bias)
        np.testing.assert_array_equal(product(kernel, packed, rows, bias, output="bf16"), to_bf16(with_bias))


@pytest.mark.parametrize("weight_format", FORMATS)
def test_bits_do_not_depend_on_company(kernels: list[LinearKernel], weight_format: GridFormat) -> None:
    grid, rows = random_grid(weight_format, 130, 224, seed=3), random_bf16(512, 224, seed=4)
    for kernel in kernels:
        packed = packed_of(kernel, grid)
        whole = product(kernel, packed, rows, threads=2)
        for count in (*range(1, 20), 66):
            for threads in (1, 3):
                np.testing.assert_array_equal(product(kernel, packed, rows[:count], threads=threads), whole[:count])
                np.testing.assert_array_equal(product(kernel, packed, rows[-count:], threads=threads), whole[-count:])


@pytest.mark.parametrize("weight_format", FORMATS)
def test_rows_lose_next_to_nothing_and_an_outlier_costs_its_group_alone(
    kernels: list[LinearKernel], weight_format: GridFormat
) -> None:
    grid, rows = random_grid(weight_format, 64, 896, seed=5), random_bf16(20, 896, seed=6)
    rows[:, 7] = to_bf16(from_bf16(rows[:, 7]) * np.float32(1000))
    grid.steps[:, 0] = 0  # so that what the others lose shows
    if grid.offsets is not None:
        grid.offsets[:, 0] = 0
    true = from_bf16(rows).astype(np.float64) @ grid.values().astype(np.float64).T
    for kernel in kernels:
        error = product(kernel, packed_of(kernel, grid), rows) - true
        # It is 2e-5; in 8 bits 0.005, in 16 with one scale for a row 0.008.
        assert np.linalg.norm(error) < 5e-5 * np.linalg.norm(true)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_what_is_not_finite_is_nan_and_touches_nothing_else(
    kernels: list[LinearKernel], weight_format: GridFormat
) -> None:
    grid, bias = random_grid(weight_format, 65, 96, seed=7), random_bf16(65, seed=8)
    steps = grid.steps.copy()
    steps[3, 1] = np.inf
    dirty_grid = Grid(grid.codes, steps, grid.offsets)
    for kernel in kernels:
        clean, dirty = packed_of(kernel, grid), packed_of(kernel, dirty_grid)
        for count in (4, 17):
            rows = random_bf16(count, 96, seed=9)
            expected = product(kernel, clean, rows, bias)
            rows[0, 95], rows[1, 3], rows[2] = to_bf16(np.array([np.nan, np.inf, 0.0], dtype=np.float32))
            found = product(kernel, dirty, rows, bias)
            assert np.isnan(found[:2]).all() and not np.isfinite(found[:, 3]).any()
            expected[:, 3] = found[:, 3] = 0.0
            np.testing.assert_array_equal(found[3:], expected[3:])
            np.testing.assert_array_equal(np.delete(found[2], 3), np.delete(from_bf16(bias), 3))


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_rows_are_read_back_as_they_were_packed(
    kernels: list[LinearKernel], weight_format: GridFormat, columns: int, depth: int
) -> None:
    grid = random_grid(weight_format, columns, depth, seed=10)
    ids = np.random.default_rng(11).integers(0, columns, 40)
    np.testing.assert_array_equal(rows_of(packed_of(kernels[0], grid), ids), grid.values()[ids])


@pytest.mark.parametrize("weight_format", FORMATS)
def test_parts_are_packed_as_the_whole(kernels: list[LinearKernel], weight_format: GridFormat) -> None:
    grid = random_grid(weight_format, 150, 96, seed=12)
    parts = [
        Grid(grid.codes[at], grid.steps[at], None if grid.offsets is None else grid.offsets[at])
        for at in (slice(64), slice(64, 128), slice(128, 150))
    ]
    found = pack_grid(kernels[0], parts, columns=150, depth=96)
    np.testing.assert_array_equal(found.memory, packed_of(kernels[0], grid).memory)
    with pytest.raises(ValueError, match="128 columns are there, and 150 are to be packed"):
        pack_grid(kernels[0], parts[:2], columns=150, depth=96)
    with pytest.raises(ValueError, match="does not follow column 22"):
        pack_grid(kernels[0], parts[::-1], columns=150, depth=96)


def test_weights_take_as_much_as_in_files(kernels: list[LinearKernel]) -> None:
    sizes = {}
    for weight_format in FORMATS:
        sizes[weight_format] = packed_of(kernels[0], random_grid(weight_format, 128, 1024, seed=13)).num_bytes
    assert sizes == {"grid4": 128 * 1024 // 32 * 20, "grid8": 128 * 1024 // 32 * 34}
