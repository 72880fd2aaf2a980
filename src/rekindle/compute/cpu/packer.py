"""What packs weights of linear layers for one kind of device, and multiplies by them there: `Packer`.

Owns what those who replace modules know of packed weights. `KernelPacker` is that of the processor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from rekindle.compute.cpu.kernels.grids import pack_grid
from rekindle.compute.cpu.kernels.library import KernelLibrary
from rekindle.compute.cpu.kernels.linear import LinearKernel, Matrix, PackedWeights
from rekindle.layer_forms import GridFormat, WeightFormat
from rekindle.model.gguf_grids import FileGrid

Layout = Literal["columns first", "depth first"]
CPU = torch.device("cpu")


class Packed(Protocol):
    """Weights [columns, depth] of a linear layer in the form that one packer multiplies by."""

    @property
    def format(self) -> WeightFormat | GridFormat:
        """The format that they are packed in."""

    @property
    def columns(self) -> int:
        """Outputs of the layer."""

    @property
    def depth(self) -> int:
        """Inputs of the layer."""

    @property
    def num_bytes(self) -> int:
        """Bytes held."""

    @property
    def address(self) -> int:
        """Where they are: no two have the same."""


class Packer(Protocol):
    """Packs bf16 weights that are on the processor, for modules on its `device`."""

    @property
    def device(self) -> torch.device:
        """Where packed weights are, and rows are multiplied."""

    @property
    def formats(self) -> frozenset[WeightFormat]:
        """Those that it packs weights in."""

    def pack(self, weight: torch.Tensor, layout: Layout, weight_format: WeightFormat) -> Packed:
        """Pack contiguous weights, [columns, depth] or [depth, columns]; ValueError for what cannot be packed so."""

    def multiply(self, packed: Packed, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply rows [..., depth] by weights that it packed, add the bias, round once: [..., columns] in x's dtype.

        RuntimeError if `x` has another dtype than rows may have, or its rows another length.
        """


@dataclass(frozen=True, slots=True)
class KernelPacker:
    """That of one library of kernels: rows are bf16."""

    kernel: LinearKernel
    device: torch.device = CPU
    formats: frozenset[WeightFormat] = frozenset(("bf16", "int8", "int4"))

    @classmethod
    def of(cls, library: KernelLibrary) -> KernelPacker:
        """That of a library."""
        return cls(LinearKernel(library))

    def pack(self, weight: torch.Tensor, layout: Layout, weight_format: WeightFormat) -> PackedWeights:
        """As `Packer.pack`."""
        values = Matrix(weight.data_ptr(), len(weight), weight.shape[1], weight.stride(0))
        return self.kernel.pack(values, weight_format=weight_format, layout=layout, threads=torch.get_num_threads())

    def pack_grid(self, grid: FileGrid) -> PackedWeights:
        """Pack the codes of a file."""
        columns, depth = grid.entry.shape
        return pack_grid(self.kernel, grid.parts(), columns=columns, depth=depth)

    def multiply(self, packed: Packed, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """As `Packer.multiply`."""
        assert isinstance(packed, PackedWeights)
        if x.dtype is not torch.bfloat16 or x.shape[-1] != packed.depth:
            raise RuntimeError(f"rows of {packed.depth} bf16 values are needed, not {x.dtype} {tuple(x.shape)}")
        rows = x.reshape(-1, packed.depth)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = x.new_empty(*x.shape[:-1], packed.columns)
        if len(rows):
            self.kernel.multiply(
                packed,
                Matrix(rows.data_ptr(), len(rows), packed.depth, rows.stride(0)),
                Matrix(out.data_ptr(), len(rows), packed.columns, packed.columns),
                bias=None if bias is None else bias.data_ptr(),
                threads=torch.get_num_threads(),
            )
        return out
