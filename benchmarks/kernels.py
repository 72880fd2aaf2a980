"""`python -m benchmarks kernels`: the CPU's kernels against torch, in one process and turn by turn.

    python -m benchmarks kernels --threads 1
    python -m benchmarks kernels --threads 2 --rows 1 --rows 8

The arm `torch` is torch.nn.functional.linear in bf16; the others are the levels that this processor runs, in bf16,
int8 and int4. With one thread the process's CPU time is taken, which other processes disturb least, with more the time
that passes. Weights are used in turn, as those of a model's layers are, so that a single matrix does not stay in the
cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import torch
from rich.console import Console
from rich.table import Table

from rekindle.compute.cpu.kernels import library
from rekindle.compute.cpu.kernels.levels import LEVELS
from rekindle.compute.cpu.kernels.linear import LinearKernel, Matrix, PackedWeights
from rekindle.errors import ConfigError
from rekindle.layer_forms import WeightFormat
from rekindle_lab.record import Measurement, Origin, deliver

Shape = tuple[int, int]  # columns, depth
SHAPES: tuple[Shape, ...] = ((1152, 896), (9728, 896), (896, 4864))  # of a layer of the 24-layer model
WEIGHT_BYTES = 96 << 20  # of all matrices of one shape
MOST_MATRICES = 24
Multiply = Callable[[int, torch.Tensor], object]  # number of the matrix, rows


@dataclass(frozen=True, slots=True)
class KernelBench:
    """Which rows and shapes, how often each matrix is used; `out` None prints the JSON lines after the table."""

    rows: tuple[int, ...] = (1, 8, 66, 512)
    shapes: tuple[Shape, ...] = SHAPES
    threads: int = 1
    repeats: int = 3
    seed: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        if min((*self.rows, self.threads, self.repeats)) < 1:
            raise ConfigError("give at least one row, one thread and one repeat")


def read_shape(text: str) -> Shape:
    """Read `columns x depth`, as in 1152x896; ConfigError if it is none."""
    columns, _, depth = text.partition("x")
    if not (columns.isdecimal() and depth.isdecimal() and int(columns) and int(depth)):
        raise ConfigError(f"{text!r} is no shape: write columns and depth, as in 1152x896")
    return int(columns), int(depth)


class Layers:
    """Matrices of one shape, for torch and packed for every level."""

    def __init__(self, shape: Shape, kernels: dict[str, LinearKernel], options: KernelBench) -> None:
        generator = torch.Generator().manual_seed(options.seed)
        number = max(1, min(MOST_MATRICES, WEIGHT_BYTES // (2 * shape[0] * shape[1])))
        self.weights = [torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(number)]
        self.threads = options.threads
        self.arms: dict[str, Multiply] = {"torch": self._by_torch}
        for level, kernel in kernels.items():
            for weight_format in get_args(WeightFormat):
                packed = [kernel.pack(matrix(each), weight_format=weight_format) for each in self.weights]
                self.arms[f"{level} {weight_format}"] = self._by_kernel(kernel, packed)

    def _by_torch(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rows, self.weights[number])

    def _by_kernel(self, kernel: LinearKernel, packed: list[PackedWeights]) -> Multiply:
        def multiply(number: int, rows: torch.Tensor) -> torch.Tensor:
            weights = packed[number]
            out = rows.new_empty(len(rows), weights.columns)
            source, target = (matrix(each) for each in (rows, out))
            kernel.multiply(weights, source, target, threads=self.threads)
            return out

        return multiply


def matrix(values: torch.Tensor) -> Matrix:
    """The memory of a contiguous tensor [rows, columns]."""
    return Matrix(values.data_ptr(), len(values), values.shape[1], values.stride(0))


def measure(layers: Layers, num_rows: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every call, by arm; the arms take turns at each matrix. The first round is not counted."""
    clock = time.process_time if layers.threads == 1 else time.perf_counter
    rows = torch.randn(num_rows, layers.weights[0].shape[1]).to(torch.bfloat16)
    times: dict[str, list[float]] = {arm: [] for arm in layers.arms}
    for turn in range(repeats + 1):
        for number in range(len(layers.weights)):
            for arm, multiply in layers.arms.items():
                began = clock()
                multiply(number, rows)
                if turn:
                    times[arm].append((clock() - began) * 1e3)
    return times


def measurements(options: KernelBench, kernels: dict[str, LinearKernel]) -> Iterator[Measurement]:
    """Yield one measurement for each shape, number of rows and arm."""
    for shape in options.shapes:
        layers = Layers(shape, kernels, options)
        for num_rows in options.rows:
            work = {"columns": shape[0], "depth": shape[1], "rows": num_rows}
            for arm, values in measure(layers, num_rows, options.repeats).items():
                yield Measurement(f"linear {shape[0]}x{shape[1]}, {num_rows} rows", arm, "ms", tuple(values), work)


def run_kernel_bench(options: KernelBench, console: Console) -> int:
    """Measure every level that runs here, print table and lines; return 0 whatever the figures are."""
    torch.set_num_threads(options.threads)
    kernels: dict[str, LinearKernel] = {}
    for level in LEVELS:
        try:
            found = library.load(level).library
        except ConfigError as error:
            console.print(f"{level} is left out: {error}")
        else:
            assert found is not None, level
            kernels[level] = LinearKernel(found)
    measured = list(measurements(options, kernels))
    console.print(table(measured))
    deliver(measured, Origin.here("kernels", {**asdict(options), "out": None}), options.out, console)
    return 0


def table(measured: list[Measurement]) -> Table:
    """Build a table with a row per product: least and median milliseconds of each arm."""
    arms = list(dict.fromkeys(item.arm for item in measured))
    shown = Table(title="Least / median of calls, in ms", title_justify="left")
    shown.add_column("product")
    for arm in arms:
        shown.add_column(arm, justify="right")
    for name in dict.fromkeys(item.measure for item in measured):
        found = {item.arm: item for item in measured if item.measure == name}
        shown.add_row(name, *(f"{min(found[arm].values):.3f} / {found[arm].median:.3f}" for arm in arms))
    return shown
