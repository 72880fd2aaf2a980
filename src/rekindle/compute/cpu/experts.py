"""Experts of mixture models, packed for our kernels one by one.

Owns which projections are, and in what format. How experts compute is in `padded_experts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rekindle.compute.cpu.packed import FALLBACKS, is_bf16, pack
from rekindle.compute.cpu.packer import Layout, Packed, Packer
from rekindle.layer_forms import WeightFormat
from rekindle.model.compare import checked_rows, same_products
from rekindle.model.kept_tensors import placeholder
from rekindle.model.padded_experts import PACKED_NAME, PROJECTIONS, mixtures, torch_product


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """One projection of every expert of a layer."""

    packer: Packer
    weights: tuple[Packed, ...]

    def product(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows [rows, depth] by one expert's weights."""
        return self.packer.multiply(self.weights[expert], rows)


class Projection(NamedTuple):
    """A projection of a layer by its name, and packed weights of every expert."""

    module: Any
    name: str
    weights: tuple[Packed, ...]


def pack_experts(model: Any, packer: Packer, weight_format: WeightFormat = "bf16") -> list[str]:
    """Pack the bf16 experts of layers that compute by `padded_experts`; their weights are freed layer by layer.

    Returns notes on projections that were left because ours would compute something else.
    """
    notes = list[str]()
    for path, module in mixtures(model):
        made = _packed(module, packer, weight_format)
        for name in made:
            module._parameters[name] = placeholder(getattr(module, name))
        setattr(module, PACKED_NAME, made)
        left = [name for name in _packable(module) if name not in made]
        notes += [f"{path}.{name} is left to torch: our kernel gives other outputs" for name in left]
    return notes


@contextmanager
def packed_for_trial(model: Any, packer: Packer) -> Iterator[int]:
    """Compute experts in int8 until the block ends; yield how many matrices are."""
    modules = [module for _, module in mixtures(model)]
    try:
        for module in modules:
            setattr(module, PACKED_NAME, _packed(module, packer, "int8"))
        yield sum(each.format == "int8" for each in packed_weights(model))
    finally:
        for module in modules:
            setattr(module, PACKED_NAME, {})


def packed_weights(model: Any) -> Iterator[Packed]:
    """The packed weights of every expert."""
    for _, module in mixtures(model):
        for projection in getattr(module, PACKED_NAME, {}).values():
            yield from projection.weights


def wide_bytes(model: Any) -> int:
    """Bytes of the experts of layers, one tensor for all of a projection, that are not in 8 or 4 bits."""
    total = 0
    for module in model.modules():
        packed = getattr(module, PACKED_NAME, {})
        for name in PROJECTIONS:
            weights = module._parameters.get(name)
            if name in packed:
                total += sum(each.num_bytes for each in packed[name].weights if each.format == "bf16")
            elif weights is not None and weights.dim() == 3 and weights.is_floating_point():
                total += weights.nbytes
    return total


def named_weights(model: Any) -> Iterator[tuple[str, Packed]]:
    """The packed weights of every expert with their names: of the layer, the projection, the number."""
    for path, module in mixtures(model):
        for name, projection in getattr(module, PACKED_NAME, {}).items():
            yield from ((f"{path}.{name}.{number}", each) for number, each in enumerate(projection.weights))


def fitting(model: Any, weights: dict[str, Packed]) -> list[Projection]:
    """Projections for whose experts there are weights by these names; they are taken out of `weights`."""
    found = list[Projection]()
    for path, module in mixtures(model):
        for name in _packable(module):
            count, *shape = getattr(module, name).shape
            columns, depth = reversed(shape) if module.is_transposed else shape
            held = [weights.get(f"{path}.{name}.{number}") for number in range(count)]
            if all(each is not None and (each.columns, each.depth) == (columns, depth) for each in held):
                taken = tuple(weights.pop(f"{path}.{name}.{number}") for number in range(count))
                found.append(Projection(module, name, taken))
    return found


def replace(projections: Iterable[Projection], packer: Packer) -> None:
    """Let projections compute with packed weights in place of those they were packed from; nothing is compared."""
    for module, name, weights in projections:
        module._parameters[name] = placeholder(getattr(module, name))
        setattr(module, PACKED_NAME, {**getattr(module, PACKED_NAME, {}), name: PackedExperts(packer, weights)})


def _packable(module: Any) -> list[str]:
    """Names of the projections whose experts' weights are plain bf16 values."""
    found = ((name, module._parameters.get(name)) for name in PROJECTIONS)
    return [name for name, weights in found if weights is not None and weights.dim() == 3 and is_bf16(weights)]


def _packed(module: Any, packer: Packer, weight_format: WeightFormat) -> dict[str, PackedExperts]:
    """The projections of one layer, packed; in the first format that suits it, and not at all where bf16 differs."""
    layout: Layout = "depth first" if module.is_transposed else "columns first"
    packed: dict[str, PackedExperts] = {}
    for name in _packable(module):
        for each_format in FALLBACKS[weight_format]:
            weights = getattr(module, name).detach()
            found = [pack(packer, each, layout, each_format) for each in weights]
            made = PackedExperts(packer, tuple(each for each in found if each is not None))
            if len(made.weights) == len(weights) and _agrees(module, name, made):
                packed[name] = made
                break
    return packed


def _agrees(module: Any, name: str, packed: PackedExperts) -> bool:
    """Whether every expert's product with a few random rows is that of torch, to the rounding."""
    weights = getattr(module, name)
    rows = checked_rows(packed.weights[0].depth)

    def agrees(expert: int, weight: torch.Tensor) -> bool:
        ours, theirs = packed.product(expert, rows), torch_product(module, name, expert, rows)
        by_column = weight.T if module.is_transposed else weight
        return same_products(ours, theirs, rows, by_column, weight_format=packed.weights[expert].format)

    with torch.inference_mode():
        return all(agrees(expert, weight) for expert, weight in enumerate(weights))
