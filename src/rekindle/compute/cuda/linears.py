"""Products of rows with linear layers on a card.

Owns which modules are linear layers there, and where the weights of several lie that multiply the same rows: together
where they can, so that one product has all outputs. Each module keeps its own rows of them, so that nothing takes more
memory and its own code goes on to work. Rows that meet several weights in 8 or 4 bits are rounded once for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.compute.cpu.packed_modules import PackedLinear
from rekindle.compute.cuda.packing import CardWeights, Rounded, multiply_rounded, rounded
from rekindle.model.layer_parts import holds


def is_linear(module: Any, dtype: torch.dtype) -> bool:
    """Whether a module is a product with weights of this dtype, or with weights that are packed for a card."""
    if type(module) is PackedLinear:
        return isinstance(module.packed, CardWeights)
    held = [each for each in module._parameters.values() if each is not None]
    return type(module) is nn.Linear and all(holds(each, dtype) for each in held)


def product(module: Any, rows: Tensor) -> Tensor:
    """Rows [rows, depth] times the weights of a linear layer, plus its bias: [rows, columns]."""
    result: Tensor = module.forward(rows)
    return result


@dataclass(frozen=True, slots=True, eq=False)
class Products:
    """The products of the same rows with several linear layers; `together` is one that has all their outputs."""

    modules: tuple[Any, ...]
    together: nn.Linear | None

    @classmethod
    def of(cls, *modules: Any) -> Products:
        """With their weights together, if all have weights of torch's, and a bias or none."""
        biased = {module.bias is not None for module in modules}
        plain = all(type(module) is nn.Linear for module in modules)
        return cls(modules, _together(modules) if plain and len(modules) > 1 and len(biased) == 1 else None)

    def __call__(self, rows: Tensor) -> Sequence[Tensor]:
        """The outputs of each layer for rows [rows, depth]: [rows, columns]; values of a row next to each other."""
        if self.together is None:
            once = rounded(rows) if all(type(module) is PackedLinear for module in self.modules) else None
            return [product(module, rows) if once is None else _packed(module, rows, once) for module in self.modules]
        return product(self.together, rows).split([module.out_features for module in self.modules], -1)


def _packed(module: Any, rows: Tensor, once: Rounded) -> Tensor:
    """As `product`, of rows that are rounded already."""
    out = rows.new_empty(len(rows), module.packed.columns)
    if len(rows):
        multiply_rounded(module.packed, once, module.bias, out)
    return out


def _together(modules: Sequence[nn.Linear]) -> nn.Linear:
    """A layer with the outputs of all, of whose weights and biases these are given the parts that were theirs."""
    found = nn.Linear(1, 1, bias=False, device="meta")
    with torch.inference_mode(mode=False), torch.no_grad():
        for name in ("weight", "bias"):
            each = [getattr(module, name) for module in modules]
            if each[0] is None:
                continue
            whole = torch.cat([one.data for one in each])
            setattr(found, name, nn.Parameter(whole, requires_grad=False))
            for module, part in zip(modules, whole.split([len(one) for one in each]), strict=True):
                setattr(module, name, nn.Parameter(part, requires_grad=False))
    return found
