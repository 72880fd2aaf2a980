"""Products of rows with linear layers on a card: by torch, and with weights that are packed there by ours.

Owns which modules are linear layers there, and where the weights of several lie that multiply the same rows: together
where they can, so that one product has all outputs. Each module keeps its own columns of them, so that nothing takes
more memory and its own code goes on to work. Rows that meet several weights in 8 or 4 bits are rounded once for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rekindle.compute.cpu.packed_modules import PackedLinear
from rekindle.model.layer_parts import holds
from rekindle_cuda.packing import CardWeights, Rounded, multiply, multiply_rounded, rounded


def is_linear(module: Any, dtype: torch.dtype) -> bool:
    """Whether a module is a product with weights of this dtype, or with packed ones."""
    if type(module) is PackedLinear:
        return isinstance(module.packed, CardWeights)
    held = [each for each in module._parameters.values() if each is not None]
    return type(module) is nn.Linear and all(holds(each, dtype) for each in held)


def is_rounded(module: Any) -> bool:
    """Whether a linear layer rounds its inputs to 8 bits."""
    return type(module) is PackedLinear


class Product(Protocol):
    """Rows times weights, plus a bias."""

    def forward(self, rows: Tensor, /) -> Tensor:
        """[rows, depth] -> [rows, columns]."""


def product(linear: Product, rows: Tensor) -> Tensor:
    """Rows [rows, depth] times the weights of a linear layer, plus its bias: [rows, columns]."""
    return linear.forward(rows)


@dataclass(frozen=True, slots=True, eq=False)
class PackedProduct:
    """A `Product` with packed weights."""

    packed: CardWeights
    bias: Tensor | None

    def forward(self, rows: Tensor) -> Tensor:
        """As `Product.forward`."""
        return multiply(self.packed, rows, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class Products:
    """The products of the same rows with several linear layers; `together` is one that has all their outputs."""

    modules: tuple[Any, ...]
    together: Product | None

    @classmethod
    def of(cls, *modules: Any) -> Products:
        """With their weights together, if all have weights of one form, and a bias or none."""
        forms = {(type(each), each.bias is None, is_rounded(each) and each.packed.format) for each in modules}
        if len(modules) == 1 or len(forms) > 1:
            return cls(modules, None)
        with torch.inference_mode(mode=False), torch.no_grad():
            return cls(modules, _packed_together(modules) if is_rounded(modules[0]) else _together(modules))

    def __call__(self, rows: Tensor) -> Sequence[Tensor]:
        """The outputs of each layer for rows [rows, depth]: [rows, columns]; values of a row next to each other."""
        if self.together is not None:
            return product(self.together, rows).split([module.out_features for module in self.modules], -1)
        if len(rows) and len(self.modules) > 1 and all(map(is_rounded, self.modules)):
            once = rounded(rows)
            return [_of_rounded(module, rows, once) for module in self.modules]
        return [product(module, rows) for module in self.modules]


def _of_rounded(module: Any, rows: Tensor, once: Rounded) -> Tensor:
    """As `product`, of rows that are rounded already."""
    out = rows.new_empty(len(rows), module.packed.columns)
    multiply_rounded(module.packed, once, module.bias, out)
    return out


def _together(modules: Sequence[Any]) -> Product:
    """A layer with the outputs of all, of whose weights and biases these are given the parts that were theirs."""
    found = nn.Linear(1, 1, bias=False, device="meta")
    for name in ("weight", "bias"):
        each = [getattr(module, name) for module in modules]
        if each[0] is None:
            continue
        whole = torch.cat([one.data for one in each])
        setattr(found, name, nn.Parameter(whole, requires_grad=False))
        for module, part in zip(modules, whole.split([len(one) for one in each]), strict=True):
            setattr(module, name, nn.Parameter(part, requires_grad=False))
    return found


def _packed_together(modules: Sequence[Any]) -> Product:
    """The same of packed weights."""
    whole = CardWeights.joined([module.packed for module in modules])
    borders = accumulate((module.packed.columns for module in modules), initial=0)
    for module, (first, end) in zip(modules, pairwise(borders), strict=True):
        module.packed = whole.part(first, end)
    biases = [module.bias for module in modules]
    return PackedProduct(whole, None if biases[0] is None else torch.cat([each.data for each in biases]))
