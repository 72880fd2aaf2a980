"""Probes of `rekindle doctor` for the model and its device; earlier proofs are ignored and everything is run again."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from rekindle.cli.findings import Finding, several
from rekindle.compute.cpu.compute import KernelCompute
from rekindle.compute.cpu.kernels.library import KernelLibrary
from rekindle.compute.cpu.weights import loaded_bytes
from rekindle.compute.load import load_model
from rekindle.config import Settings
from rekindle.errors import ConfigError, ModelRefused, first_line
from rekindle.kv.arena import KVArena
from rekindle.kv.plan import AttentionPlan
from rekindle.kv.reference import attention_reference, relative_error, stored_vectors
from rekindle.kv.step_layout import SequenceSpan, StepLayout
from rekindle.model.loaded import BY_TORCH, Compute
from rekindle.model.trial import interleaved_tables, sequence_step
from rekindle.spec import KVLayout, LayerSpec

if TYPE_CHECKING:
    from rekindle.model.loaded import LoadedModel
from collections.abc import Callable
from functools import partial
from statistics import median

from rekindle.cli.findings import judged, spread
from rekindle.compute.cpu.kernels.linear import LinearKernel, Matrix, PackedWeights
from rekindle.layer_forms import WeightFormat

NUM_TOKENS = 600  # more than one tile of attention
LAST_ROWS = 8
HEADS_PER_KV = 2
BOUNDS = {torch.bfloat16: 0.02, torch.float32: 1e-5, torch.float64: 1e-10}
MOST_LOST = 0.0085  # normalised squared error of Gaussian data in Q4H is 0.0081 at most
PREFILL_TOKENS = (64, 256)  # the first ones warm up
# Tried if no model could be loaded: 4 bits and native, with and without a window.
USUAL_DTYPE = torch.bfloat16
USUAL_LAYERS = (
    LayerSpec(0, 2, 64, 64, None, "q4h", "q4h"),
    LayerSpec(1, 2, 128, 128, None, "bf16", "bf16"),
    LayerSpec(2, 2, 80, 80, 128, "q4h", "q4h"),
)
COLUMNS, DEPTH = 8192, 2048
NUM_MATRICES = 8  # 256 MB in bf16: more than most caches
MANY_ROWS = 256


@dataclass(frozen=True, slots=True)
class Place:
    """A device, and what computes there."""

    device: str
    compute: Compute

    def __str__(self) -> str:
        """Its name in findings."""
        return self.device if self.compute.level == BY_TORCH else f"{self.device} ({self.compute.level})"


@dataclass(frozen=True, slots=True)
class KernelResult:
    """One kind of layer as it is computed here, against torch on the CPU.

    `error`: largest difference of attention from the definition in fp64, over the largest magnitude; `bytes_differ`:
    stored bytes that differ from torch's; `lost`: normalised squared error of the stored vectors.
    """

    error: float
    bytes_differ: int
    lost: float


def load_for_doctor(settings: Settings) -> LoadedModel:
    """Load the model, running trial forward and self-test now. Earlier format decisions are used; nothing is saved."""
    with tempfile.TemporaryDirectory() as scratch:
        if settings.store.enabled:
            for known in settings.store.directory().glob("*.json"):
                if not known.name.startswith("proof-"):
                    shutil.copy(known, scratch)
        return load_model(
            replace(settings.model, map_weights="off"),
            block_tokens=settings.cache.block_tokens,
            max_context=settings.engine.max_context,
            format_map_dir=Path(scratch),
        )


def probe_model(settings: Settings) -> tuple[list[Finding], LoadedModel | None]:
    """Check whether the model can be served and what is guaranteed for it; also return the model if it can."""
    try:
        loaded = load_for_doctor(settings)
    except ModelRefused as error:
        said = str(error).removesuffix(f": {error.remedy}")
        return [Finding("model", "fail", said, error.remedy or "name another MODEL")], None
    except ConfigError as error:
        return [Finding("model", "fail", str(error), "change that setting, or name another MODEL")], None
    spec = loaded.spec
    findings = [
        Finding("model", "ok", f"{spec.name} ({spec.architecture}), context {spec.max_context:,} tokens"),
        Finding("trial forward", "ok", "packed sequences over paged KV give the logits of the model's own attention"),
        _weights(loaded),
        Finding("KV formats", "ok", spec.layout.describe()),
        _promise(loaded),
    ]
    return findings, loaded


def _weights(loaded: LoadedModel) -> Finding:
    """What the weights take in memory, and what was noted of it."""
    notes = (note.removeprefix("weights: ") for note in loaded.notes if note.startswith("weights"))
    return Finding("weights", "ok", "; ".join([f"{loaded_bytes(loaded.model):,} bytes", *notes]))


def _promise(loaded: LoadedModel) -> Finding:
    text = next((note for note in loaded.notes if note.startswith("self-test:")), loaded.promise)
    text = text.removeprefix("self-test: ")
    if loaded.promise == "none":
        return Finding(
            "self-test", "fail", text, "paths differ more than the format does: try --dtype fp32 or --kv fp32"
        )
    return Finding("self-test", "ok", text)


def probe_kernels(
    layers: Sequence[LayerSpec], dtype: torch.dtype, place: Place, block_tokens: int
) -> Iterator[Finding]:
    """Encode and attend as it is done here; yield one finding for every kind of layer."""
    dtype = torch.float32 if dtype == torch.float16 else dtype
    kinds = {replace(layer, index=0): layer for layer in layers}
    for layer in kinds.values():
        size = f"latent {layer.k_dim}+{layer.v_dim}" if layer.latent else str(layer.k_dim)
        name = f"kernels {layer.k_format}/{layer.v_format} {size}" + (f" w{layer.window}" if layer.window else "")
        try:
            yield judge(name, compare_kernels(layer, dtype, place, block_tokens), dtype, str(place))
        except (RuntimeError, TypeError) as error:  # torch raises these if a device lacks an operation
            yield Finding(name, "fail", f"{place} cannot run them: {first_line(error)}", "use --device cpu")


def judge(name: str, result: KernelResult, dtype: torch.dtype, place: str) -> Finding:
    text = (
        f"{place} against the definition on the CPU: largest error {result.error:.1e} (allowed {BOUNDS[dtype]:.0e}), "
        f"{result.bytes_differ} stored bytes differ"
    )
    if not result.error <= BOUNDS[dtype]:
        return Finding(
            name, "fail", text, "attention is wrong here: use --device cpu --kernels torch, and report this device"
        )
    if not result.lost <= MOST_LOST:
        text += f", {result.lost:.2%} of the signal lost"
        return Finding(
            name, "fail", text, "KV is stored wrong here: use --device cpu --kernels torch, and report this device"
        )
    if result.bytes_differ:
        return Finding(name, "warn", text, "KV stored on another device is read correctly, but new KV has other bits")
    return Finding(name, "ok", text)


def compare_kernels(layer: LayerSpec, dtype: torch.dtype, place: Place, block_tokens: int) -> KernelResult:
    """Store and attend to the same random vectors by torch on the CPU and as it is done here."""
    layout = KVLayout(block_tokens, (layer,))
    source = torch.Generator().manual_seed(0)
    shape = (NUM_TOKENS, layer.num_kv_heads)
    q = torch.randn(NUM_TOKENS, HEADS_PER_KV * layer.num_kv_heads, layer.q_dim, generator=source).to(dtype)
    k = torch.randn(*shape, layer.k_dim, generator=source).to(dtype)
    v = torch.randn(*shape, layer.v_dim, generator=source).to(dtype)
    (blocks,), num_blocks = interleaved_tables(block_tokens, [NUM_TOKENS])
    outputs, arenas = [], []
    for device, compute in (("cpu", KernelCompute(None)), (place.device, place.compute)):
        arena = compute.arena(layout, num_blocks, device)
        attention = compute.attention(arena)
        plan = AttentionPlan(
            StepLayout([SequenceSpan(blocks, 0, NUM_TOKENS, 0)], layout.block_tokens, NUM_TOKENS), device
        )
        with torch.inference_mode():
            attention.write(layer.index, k.to(device), v.to(device), plan)
            scaling = layer.q_dim**-0.5
            attended = attention.attend(layer.index, q.to(device), plan, scaling=scaling, window=layer.window)
            outputs.append(attended.cpu())
        arenas.append(arena)
    start = NUM_TOKENS - LAST_ROWS
    span = SequenceSpan(blocks, start, LAST_ROWS, NUM_TOKENS)
    wanted = attention_reference(arenas[0], layer.index, q[start:], [span], scaling=scaling, window=layer.window)
    lost = max(_lost(arenas[1], layer, blocks, given) for given in ((k, "k"), (v, "v")))
    return KernelResult(relative_error(outputs[1][start:], wanted), _bytes_differ(arenas[0], arenas[1]), lost)


def _lost(arena: KVArena, layer: LayerSpec, blocks: Sequence[int], given: tuple[torch.Tensor, str]) -> float:
    """Normalised squared error of these vectors [tokens, heads, dim] as stored in the arena."""
    vectors, which = given
    view = arena.layer(layer.index)
    sections, fmt = (view.k, layer.k_format) if which == "k" else (view.v, layer.v_format)
    stored = stored_vectors(sections, fmt, blocks)[:, :NUM_TOKENS].transpose(0, 1)
    wanted = vectors.double()
    return float((stored - wanted).square().sum() / wanted.square().sum())


def _bytes_differ(first: KVArena, second: KVArena) -> int:
    pairs = zip(first.parts, second.parts, strict=True)
    return sum(int(np.count_nonzero(a.cpu().numpy() != b.cpu().numpy())) for a, b in pairs)


def measure_steps(loaded: LoadedModel) -> tuple[list[float], list[float]]:
    """Measure several times, after a warm-up, prompt tokens a second in one step, and seconds of a token after it.

    Small prompts, so a low estimate.
    """
    layout, longest = loaded.spec.layout, min(sum(PREFILL_TOKENS), loaded.spec.max_context)
    (table,), num_blocks = interleaved_tables(layout.block_tokens, [longest])
    runner = loaded.compute.runner(loaded, loaded.compute.arena(layout, num_blocks, loaded.device))
    ids = torch.arange(longest) % loaded.spec.vocab_size

    def seconds(start: int, end: int) -> float:
        began = time.perf_counter()
        runner.forward([sequence_step(ids[start:end], start, table, "last")])
        return max(time.perf_counter() - began, math.ulp(1.0))

    cut, last = min(PREFILL_TOKENS[0], longest // 2), longest - 1
    seconds(0, cut)
    rates = several(lambda: (longest - cut) / seconds(cut, longest))
    seconds(last, longest)
    return rates, several(lambda: seconds(last, longest))


# Probe of `rekindle doctor`: what the kernels' linear layers reach of this machine's memory and arithmetic.
#
# One row reads every weight once, so memory is its limit: compared with a sequential read of as many bytes. Many rows
# are limited by arithmetic. Takes about a second and half a gigabyte.


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
