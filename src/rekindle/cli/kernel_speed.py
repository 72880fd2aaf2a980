"""Probe of `rekindle doctor`: what the kernels' linear layers reach of this machine's memory and arithmetic.

One row reads every weight once, so memory is its limit: compared with a sequential read of as many bytes. Many rows are
limited by arithmetic. Takes about a second and half a gigabyte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from rekindle.cli.findings import Finding
from rekindle.cli.repeats import judged, several, spread
from rekindle.compute.cpu.kernels.library import KernelLibrary
from rekindle.compute.cpu.kernels.linear import LinearKernel, Matrix, PackedWeights
from rekindle.layer_forms import WeightFormat

COLUMNS, DEPTH = 8192, 2048
NUM_MATRICES = 8  # 256 MB in bf16: more than most caches
MANY_ROWS = 256


@dataclass(frozen=True, slots=True)
class KernelSpeed:
    """GB/s of reading memory and of one row by format of weights; GFLOP/s of many rows by format.

    `widest`: how many times the slowest run of the same work took as long as the fastest.
    """

    memory: float
    one_row: dict[WeightFormat, float]
    many_rows: dict[WeightFormat, float]
    widest: float = 1.0

    def __str__(self) -> str:
        """What the finding says."""
        read = (f"{rate:.0f} GB/s in {name} ({rate / self.memory:.0%})" for name, rate in self.one_row.items())
        computed = (f"{rate:,.0f} GFLOP/s in {name}" for name, rate in self.many_rows.items())
        return (
            f"memory is read at {self.memory:.0f} GB/s, weights for one row at {', '.join(read)}; "
            f"{MANY_ROWS} rows at {', '.join(computed)}"
        )


def probe_kernel_speed(library: KernelLibrary, threads: int | None) -> Finding:
    """Measure with as many threads as the model would use; None: as many as torch does."""
    speed = measure_kernels(library, threads or torch.get_num_threads())
    return judged(Finding("kernel speed", "ok", str(speed)), speed.widest)


def measure_kernels(
    library: KernelLibrary, threads: int, *, columns: int = COLUMNS, depth: int = DEPTH, matrices: int = NUM_MATRICES
) -> KernelSpeed:
    """Measure products of matrices [columns, depth] with `matrices` of them in turn; medians."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kernel = LinearKernel(library)
        weights = torch.randn(columns, depth, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        plain = weights.view(torch.int64).repeat(matrices, 1)
        runs = [_seconds(plain.sum)]
        memory = plain.nbytes / median(runs[0]) / 1e9
        del plain
        one_row, many_rows = {}, {}
        for weight_format, packed in _packed(kernel, weights, matrices, threads):
            once = _seconds(partial(_multiply, kernel, packed, 1, threads))
            one_row[weight_format] = sum(each.num_bytes for each in packed) / median(once) / 1e9
            often = _seconds(partial(_multiply, kernel, packed[:1], MANY_ROWS, threads))
            many_rows[weight_format] = 2 * MANY_ROWS * columns * depth / median(often) / 1e9
            runs += [once, often]
    finally:
        torch.set_num_threads(before)
    return KernelSpeed(memory, one_row, many_rows, max(map(spread, runs)))


def _packed(
    kernel: LinearKernel, weights: torch.Tensor, matrices: int, threads: int
) -> Iterator[tuple[WeightFormat, list[PackedWeights]]]:
    source = _matrix(weights)
    formats: tuple[WeightFormat, ...] = ("bf16", "int8")
    for weight_format in formats:
        yield (
            weight_format,
            [kernel.pack(source, weight_format=weight_format, threads=threads) for _ in range(matrices)],
        )


def _multiply(kernel: LinearKernel, packed: Sequence[PackedWeights], rows: int, threads: int) -> None:
    source = torch.ones(rows, packed[0].depth, dtype=torch.bfloat16)
    target = torch.empty(rows, packed[0].columns, dtype=torch.bfloat16)
    for each in packed:
        kernel.multiply(each, _matrix(source), _matrix(target), threads=threads)


def _matrix(values: torch.Tensor) -> Matrix:
    return Matrix(values.data_ptr(), len(values), values.shape[1], values.stride(0))


def _seconds(work: Callable[[], object]) -> list[float]:
    """The times of several runs after one that is not counted."""

    def taken() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    work()
    return several(taken)
