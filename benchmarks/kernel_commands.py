"""Those commands of `python -m benchmarks` that measure the kernels alone, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rekindle.cli.console import console
from rekindle.cli.settings import exit_with


def bench_kernels(
    rows: Annotated[list[int] | None, typer.Option(help="rows of a product; may be repeated [1 8 66 512]")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="columns x depth, as 1152x896; may be repeated")] = None,
    threads: Annotated[int, typer.Option(help="of torch and kernels; with one, CPU time is measured")] = 1,
    repeats: Annotated[int, typer.Option(help="how often each matrix is used")] = 3,
    seed: Annotated[int, typer.Option(help="of the weights")] = 0,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> None:
    """The CPU's kernels against torch: linear layers in bf16, turn by turn in one process."""

    def run() -> int:
        from benchmarks.kernels import SHAPES, KernelBench, read_shape, run_kernel_bench

        shapes = tuple(map(read_shape, shape)) if shape else SHAPES
        return run_kernel_bench(
            KernelBench(tuple(rows or (1, 8, 66, 512)), shapes, threads, repeats, seed, out), console()
        )

    exit_with(run)


def bench_loads(
    blocks: Annotated[int, typer.Option(help="of a load")] = 64,
    repeats: Annotated[int, typer.Option(help="loads of each arm; the median counts")] = 15,
    seed: Annotated[int, typer.Option(help="of the blocks' bytes")] = 0,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> None:
    """Stored blocks from the page cache into hot memory: by Python and by the kernels, with one reader and with two."""

    def run() -> int:
        from benchmarks.loads import LoadBench, run_loads

        return run_loads(LoadBench(blocks, repeats, seed, out), console())

    exit_with(run)
