"""Compile, without a card, what would be launched on one: python -m tests.cuda.compiled 80 86 89 90 120

The launches are those of `TritonAttention`, of `rows` and of packed weights, recorded. A line of JSON for each kernel,
layer and kind of card has the registers of a thread, the bytes that are spilled from them, the shared memory of a
program, how many of its loads are of single bytes and of single numbers of 16 bits, and how many copies to shared
memory are of less than 16 bytes. Layers but the first, and weights of other shapes, are compiled for the first kind
alone.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver

from rekindle.kv.arena import KVArena
from rekindle.kv.plan import AttentionPlan
from rekindle.kv.step_layout import SequenceSpan, StepLayout
from rekindle.model.layer_parts import ACTIVATIONS, ROUNDINGS, NormParts
from rekindle_cuda import attention, packing, prompts, rows
from tests.kv.steps import Layer

BF16 = torch.bfloat16
LAYERS = {
    "q4h 128": Layer(BF16, k_dim=128, v_dim=128, kv_heads=8, heads=32, block_tokens=64),
    "q8h 128": Layer(BF16, "q8h", "q8h", k_dim=128, v_dim=128, kv_heads=8, heads=32, block_tokens=64),
    "q8h/q4h 256, window, softcap": Layer(
        BF16, "q8h", "q4h", k_dim=256, v_dim=256, kv_heads=1, heads=4, block_tokens=64, window=512, softcap=50.0
    ),
    "bf16 64, sinks": Layer(BF16, "bf16", "bf16", kv_heads=8, heads=64, block_tokens=64, sinks=True),
    "q4h 96": Layer(BF16, k_dim=96, v_dim=96, kv_heads=8, heads=32, block_tokens=64),
}
KERNELS = {
    "store_kernel": attention,
    "rotate_kernel": attention,
    "attend_kernel": attention,
    "join_kernel": attention,
    "place_kernel": attention,
    "widen_kernel": prompts,
    "add_norm_kernel": rows,
    "gate_kernel": rows,
    "round_kernel": packing,
    "group_kernel": packing,
    "multiply_kernel": packing,
}
NUM_ROWS = 328
SIZE, INNER = 4096, 14336  # of a row, and of what an MLP gates
# Columns and depth of weights: of a model of 8 billion parameters, and such that are no multiple of a tile.
WEIGHTS = {"4096 x 4096": (4096, 4096), "4096 x 14336": (4096, 14336), "900 x 896": (900, 896)}
ROW_COUNTS = (1, 32, 64, 500)


@dataclass
class Recorder:
    """In the place of a kernel: notes its launches, computes nothing."""

    kernel: Any
    launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **named: self.launches.append((args, named))


def recorded(run: Callable[[], object]) -> list[Recorder]:
    """What is launched."""
    recorders = {name: Recorder(getattr(module, name)) for name, module in KERNELS.items()}
    try:
        for name, module in KERNELS.items():
            setattr(module, name, recorders[name])
        run()
    finally:
        for name, module in KERNELS.items():
            setattr(module, name, recorders[name].kernel)
    return [recorder for recorder in recorders.values() if recorder.launches]


def attend(layer: Layer) -> None:
    """A step of one decoded row, 64 more of another sequence and 260 of a third one."""
    ours = attention.TritonAttention(KVArena(layer.layout, 60))
    spans = [SequenceSpan(range(20 * n, 20 * n + 20), 1000, count, 1000) for n, count in enumerate((1, 64, 260))]
    plan = AttentionPlan(StepLayout(spans, layer.block_tokens, NUM_ROWS), "cpu")
    k, v, q = (
        torch.zeros(NUM_ROWS, heads, dim, dtype=layer.dtype)
        for heads, dim in ((layer.kv_heads, layer.k_dim), (layer.kv_heads, layer.v_dim), (layer.heads, layer.k_dim))
    )
    ours.write(5, k, v, plan)
    ours.attend(5, q, plan, **layer.scoring)
    of_heads = [rows.Norm.of(NormParts(None, torch.ones(layer.k_dim), 1e-6, rounding)) for rounding in ROUNDINGS]
    for dims, paired, norms in (
        (layer.k_dim, False, (None, None)),
        (layer.k_dim, False, of_heads),
        (layer.k_dim // 2, True, (None, None)),
    ):
        cos = torch.zeros(NUM_ROWS, dims, dtype=layer.dtype)
        heads = layer.heads, layer.kv_heads
        ours.place(5, q, k, v, plan, rows.turned(heads, tuple(norms), (cos, cos), layer.k_dim, dims, paired=paired))


def between(layer: Layer) -> None:
    """Norms, sums and gates in all their forms, over rows as merged products leave them."""
    x, both = (torch.zeros(NUM_ROWS, columns, dtype=layer.dtype) for columns in (SIZE, 2 * INNER))
    early, late = (rows.Norm.of(NormParts(None, torch.ones(SIZE), 1e-6, rounding)) for rounding in ROUNDINGS)
    rows.normalised(x, early)
    rows.added_and_normalised(x, x, None, early)
    rows.added_and_normalised(x, x, late, late)
    rows.added(x, x, None)
    rows.added(x, x, late)
    for activation in ACTIVATIONS:
        rows.gated(*both.chunk(2, -1), activation)


def multiply(columns: int, depth: int) -> None:
    """Weights packed in both formats, times few rows and many."""
    weight, bias = torch.empty(columns, depth, dtype=BF16), torch.empty(columns, dtype=BF16)
    packed = [packing.pack(weight, "int8"), packing.pack(weight, "int4")]
    for count in ROW_COUNTS:
        for each in packed:
            packing.multiply(each, torch.zeros(count, depth, dtype=BF16), bias)


@dataclass(frozen=True)
class NoCard:
    """A driver as far as compiling asks: a card of this kind, on which nothing is launched."""

    arch: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def registers_and_spills(ptx: str, arch: int) -> tuple[int, int]:
    """What the assembler makes of a kernel: registers of a thread, and bytes that it spills."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        target = re.search(r"\.target (sm_\w+)", ptx)
        assert target is not None
        told = subprocess.run(
            [get_ptxas(arch).path, "-v", f"--gpu-name={target[1]}", str(source), "-o", str(Path(folder, "out"))],
            check=True,
            capture_output=True,
            text=True,
        ).stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", told)))
    return max(map(int, re.findall(r"Used (\d+) registers", told))), spilled


def report(arch: int, layers: dict[str, Layer], weights: dict[str, tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """A line for each kernel and layer, and for each shape of weights."""
    driver.set_active(NoCard(arch))
    runs = [(name, partial(compute, layer)) for name, layer in layers.items()]
    runs += [(name, partial(multiply, *shape)) for name, shape in weights.items()]
    seen = set[tuple[str, str]]()
    for name, run in runs:
        for recorder in recorded(run):
            for args, named in recorder.launches:
                compiled_for = recorder.kernel.__name__, repr(sorted(named.items()))
                if compiled_for not in seen:
                    seen.add(compiled_for)
                    made = compiled(recorder, args, named)
                    yield {"kernel": recorder.kernel.__name__, "layer": name, "sm": arch, **made}


def compute(layer: Layer) -> None:
    """All that a layer launches."""
    attend(layer)
    between(layer)


def compiled(recorder: Recorder, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """What a launch is compiled to."""
    made = recorder.kernel.warmup(*args, grid=(1,), **named)
    ptx = made.asm["ptx"]
    registers, spilled = registers_and_spills(ptx, made.metadata.target.arch)
    tile = named.get("TILE")
    return {
        "rows": named["SHAPE"].folded if "SHAPE" in named else tile.rows if isinstance(tile, packing.Tile) else None,
        "registers": registers,
        "spilled": spilled,
        "shared": made.metadata.shared,
        "narrow": len(re.findall(r"ld\.global(?!\.v)[.\w]*\.[bsu]16 ", ptx)),
        "bytewise": len(re.findall(r"ld\.global[.\w]*\.[bsu]8 ", ptx)),
        "scattered": len(re.findall(r"cp\.async\.\w+\.shared\.global [^;]*, 0x[48],", ptx)),
    }


if __name__ == "__main__":
    first, usual = (dict([next(iter(each.items()))]) for each in (LAYERS, WEIGHTS))
    for index, each in enumerate(sys.argv[1:]):
        for line in report(int(each), first if index else LAYERS, usual if index else WEIGHTS):
            print(json.dumps(line), flush=True)
