"""A card by kernels in Triton, if they run there and write the bytes that a processor writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rekindle.cache.blocks.windows import WindowSlots
from rekindle.compute.cpu.compute import TorchCompute
from rekindle.compute.cpu.packer import Packer
from rekindle.compute.devices import use
from rekindle.errors import first_line
from rekindle.kv.arena import KVArena
from rekindle.kv.attention import PagedAttention
from rekindle.kv.plan import AttentionPlan
from rekindle.kv.step_layout import SequenceSpan, StepLayout
from rekindle.model.fused_layers import fuse_layers
from rekindle.model.loaded import LoadedModel
from rekindle.model.proof import code_digest
from rekindle.model.runner import ModelRunner
from rekindle.spec import Format, KVLayout, LayerSpec
from rekindle_cuda.runner import CardRunner

LEAST_CAPABILITY = (8, 0)  # products of bf16
HARD_VECTORS, HARD_DIM = 64, 128


@dataclass(frozen=True, slots=True)
class TritonCompute(TorchCompute):
    """The kernels as one version of Triton compiles them for one kind of card."""

    compiler: str
    card: str

    @property
    def level(self) -> str:
        """Its name."""
        return "triton"

    @property
    def digest(self) -> str:
        """What the bits depend on, this package's code included."""
        return f"{self.compiler}, {self.card}, code {code_digest(Path(__file__).parent)}"

    @property
    def computes_ahead(self) -> bool:
        """As `Compute.computes_ahead`."""
        return True

    def arena(
        self, layout: KVLayout, num_blocks: int, device: torch.device | str, windows: Sequence[WindowSlots] = ()
    ) -> KVArena:
        """As `Compute.arena`."""
        from rekindle_cuda.arena import CardArena, CudaStreams

        where = torch.device(device)
        if where.type != "cuda":  # Triton's interpreter
            return KVArena(layout, num_blocks, where, windows)
        return CardArena(layout, num_blocks, where, windows, CudaStreams(where))

    def packer(self, device: str) -> Packer:
        """What packs weights for this device."""
        from rekindle_cuda.packer import CardPacker

        return CardPacker(torch.device(device))

    def attention(self, arena: KVArena) -> PagedAttention:
        """As `Compute.attention`."""
        from rekindle_cuda.attention import TritonAttention

        return TritonAttention(arena)

    def runner(self, loaded: LoadedModel, arena: KVArena) -> ModelRunner:
        """As `Compute.runner`."""
        from rekindle_cuda.graphs import CudaGraphs, GraphRunner, can_be_recorded

        on_card = torch.device(loaded.device).type == "cuda"  # else in Triton's interpreter
        if on_card and can_be_recorded(loaded):
            return GraphRunner(loaded, arena, CudaGraphs())
        return CardRunner(loaded, arena)

    def fuse(self, loaded: LoadedModel) -> int:
        """As `Compute.fuse`."""
        from rekindle_cuda.decoder import CardKernels
        from rekindle_cuda.places import DTYPES

        kernels = CardKernels(loaded.dtype, torch.device(loaded.device))
        return fuse_layers(loaded, kernels) if loaded.dtype in DTYPES else 0

    def rest(self) -> None:
        """A thread that launches kernels holds nothing."""


def triton_compute(device: torch.device) -> TritonCompute | str:
    """What computes on a card; a reason where the kernels cannot be used there."""
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"it has compute capability {capability[0]}.{capability[1]}, and the kernels need 8.0"
    try:
        import triton
    except ModuleNotFoundError:
        return "Triton is missing: pip install triton"
    use(device)
    try:
        different = first_difference(device)
    except Exception as error:  # Border: a compiler or driver that cannot run them
        return f"the kernels do not run there ({type(error).__name__}: {first_line(error)})"
    if different is not None:
        return different
    return TritonCompute(f"triton {triton.__version__}", torch.cuda.get_device_name(device))


def first_difference(device: torch.device) -> str | None:
    """Where the kernels write other bytes on this device than `PagedAttention` on a processor; None: nowhere.

    Checked because stores are shared: a compiler that fuses a product and a sum, or a device that drops the smallest
    numbers, would write what no other machine writes for the same text.
    """
    from rekindle_cuda.attention import TritonAttention

    formats: tuple[Format, ...] = ("q4h", "q8h")
    layers = tuple(LayerSpec(index, 1, HARD_DIM, HARD_DIM, None, fmt, fmt) for index, fmt in enumerate(formats))
    layout, span = KVLayout(HARD_VECTORS, layers), SequenceSpan([0], 0, HARD_VECTORS, 0)
    step, arenas = StepLayout([span], HARD_VECTORS, HARD_VECTORS), []
    values = hard_vectors()
    for where, kind in ((torch.device("cpu"), PagedAttention), (device, TritonAttention)):
        arena = KVArena(layout, 1, where)
        attention, plan = kind(arena), AttentionPlan(step, where)
        for spec in layers:
            attention.write(spec.index, values.to(where), values.flip(0).to(where), plan)
        arenas.append(arena.parts[0].cpu())
    count = int((arenas[0] != arenas[1]).sum())
    return f"{count} bytes of {HARD_VECTORS} vectors are stored differently there" if count else None


def hard_vectors() -> torch.Tensor:
    """Vectors fp32 [64, 1, 128] of every magnitude that a format has, and zeros, subnormal numbers and ties."""
    values = torch.randn(HARD_VECTORS, 1, HARD_DIM, generator=torch.Generator().manual_seed(0))
    values *= torch.logspace(-42, 5, HARD_VECTORS, dtype=torch.float64)[:, None, None].float()
    values[3], values[7, :, 64:], values[11] = 0.0, 0.0, torch.finfo(torch.float32).tiny / 8
    values[13] = 1.0  # a rotation of equal numbers has one value and zeros
    values[17] = torch.arange(HARD_DIM) / 16 - 4  # many ties of codes
    return values
