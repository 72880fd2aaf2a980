"""Linear layers over packed weights: which modules are replaced by `packed_modules`, and how.

A module is replaced for its type, never for its name: nn.Linear and the transposed one of GPT-2, with bf16 weights on
the CPU, and together with a head the embedding that has the same weights. The packed weights are then the only copy.
Left alone is what may look at weights in ways that we do not see: subclasses of linear layers, modules with hooks,
weights shared with anything else, modules that a pass through the model does not call. Every replacement is compared
with its original before that is dropped. In int8 and int4 only linear layers are replaced: an embedding keeps its
weights as they are. Weights whose codes are in a file keep these, and so do embeddings. A layer that int4 does not suit
is packed in int8, and one that int8 does not suit in bf16; a head is never in int4.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rekindle.compute.cpu.kernels.linear import MOST_INT8_DEPTH
from rekindle.compute.cpu.packed_modules import (
    GATHERED,
    PackedEmbedding,
    PackedLinear,
    PackedModule,
)
from rekindle.compute.cpu.packer import KernelPacker, Layout, Packed, Packer
from rekindle.layer_forms import WeightFormat
from rekindle.model.compare import checked_rows, same_products, same_weights
from rekindle.model.gguf_grids import FileGrid
from rekindle.model.kept_tensors import is_placeholder, placeholder
from rekindle.model.layer_parts import holds, is_changed

log = logging.getLogger(__name__)
LINEARS = (nn.Linear, Conv1D)
# What a layer is packed in, the first that suits it.
FALLBACKS: dict[WeightFormat, tuple[WeightFormat, ...]] = {
    "bf16": ("bf16",),
    "int8": ("int8", "bf16"),
    "int4": ("int4", "int8", "bf16"),
}


class Place(NamedTuple):
    """Where a module is: its parent, its name there, and its name in the whole model."""

    parent: nn.Module
    name: str
    path: str


Places = dict[int, list[Place]]  # by id of the module
Widened = Callable[[FileGrid, torch.dtype], torch.Tensor]


def pack(packer: Packer, weight: torch.Tensor, layout: Layout, weight_format: WeightFormat = "bf16") -> Packed | None:
    """Pack contiguous bf16 weights, in bf16 what is too deep for other formats; None if the packer does not."""
    depth = weight.shape[1] if layout == "columns first" else len(weight)
    suited: WeightFormat = "bf16" if depth > MOST_INT8_DEPTH else weight_format
    return packer.pack(weight, layout, suited) if suited in packer.formats else None


@contextmanager
def observed_linears(model: nn.Module) -> Iterator[set[nn.Module]]:
    """Yield a set; when the block ends it has the linear layers that were called in it, with one bf16 tensor each.

    A layer that was called otherwise, or not at all, has weights that are used in other ways.
    """
    called, otherwise = set[nn.Module](), set[nn.Module]()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plain = len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor and args[0].dtype == torch.bfloat16
        (called if plain else otherwise).add(module)

    linears = [
        module
        for module in list(model.modules())[1:]
        if isinstance(module, PackedLinear) or (type(module) in LINEARS and is_plain(module))
    ]
    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in linears]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()
        called -= otherwise


def pack_linears(
    model: nn.Module,
    packer: Packer,
    called: set[nn.Module],
    weight_format: WeightFormat = "bf16",
    grids: Mapping[str, FileGrid] | None = None,
) -> list[str]:
    """Replace what can be replaced of the layers `called`, which is empty afterwards: originals are freed one by one.

    `grids`: codes of weights by the names of these; what has none is packed in `weight_format`. Returns notes on layers
    that were left because ours would compute something else.
    """
    places = _places(model)
    users_of = _users_of_weights(model)
    groups = [[*users_of[address]] for address in {_address(module) for module in called}]
    users_of.clear()
    called_ids, head = {id(module) for module in called}, _head(model)
    called.clear()
    notes = list[str]()
    while groups:
        users: list[Any] = groups.pop()
        if _fit(users, called_ids):
            of_head = weight_format == "int4" and any(user is head for user in users)
            names = [f"{place.path}.weight" for user in users for place in places[id(user)]]
            grid = next((grids[name] for name in names if name in grids), None) if grids else None
            notes += _replace(users, packer, places, "int8" if of_head else weight_format, grid)
    log.info("%d linear layers are packed", sum(isinstance(module, PackedLinear) for module in model.modules()))
    return notes


def pack_codes(model: nn.Module, packer: Packer, grids: Iterable[tuple[str, FileGrid]], widened: Widened) -> list[str]:
    """Replace the layers that have placeholders for weights by such over the codes in a file; return notes.

    `grids`: by the names of weights. `widened` gives the values of one, with which its layers are compared; no two have
    theirs at a time. A layer that cannot be replaced keeps them. Whether all are called is to be seen (`all_called`).
    """
    places, users_of, notes = _places(model), _users_of_weights(model), list[str]()
    for name, grid in grids:
        weight = model.get_parameter(name)
        if is_placeholder(weight):
            notes += _replace_coded([*users_of.pop(weight.data_ptr())], packer, places, grid, widened)
    return notes


def _replace_coded(users: Sequence[Any], packer: Packer, places: Places, grid: FileGrid, widened: Widened) -> list[str]:
    weight = users[0].weight
    weight.data = widened(grid, weight.dtype)
    return _replace(users, packer, places, "int8", grid) if _fit(users, {id(user) for user in users}) else []


def all_called(model: nn.Module, called: set[nn.Module]) -> bool:
    """Whether a pass called every packed layer: weights of others are used in ways that only originals allow."""
    return all(module in called for module in model.modules() if isinstance(module, PackedLinear))


@contextmanager
def packed_for_trial(model: nn.Module, packer: Packer, called: set[nn.Module]) -> Iterator[int]:
    """Put int8 layers in place of those `called` until the block ends; yield how many places they take."""
    places, put_back = _places(model), list[tuple[Place, nn.Module]]()
    try:
        for old in called:
            new = packed_linear(old, packer, "int8")
            fits = new is not None and new.packed.format == "int8" and agrees(old, new)
            for place in places[id(old)] if fits else ():
                put_back.append((place, old))
                setattr(place.parent, place.name, new)
        yield len(put_back)
    finally:
        for place, old in put_back:
            setattr(place.parent, place.name, old)


def fits(module: Any, packed: Packed) -> bool:
    """Whether a module can be replaced by one over these weights, as far as types and shapes show."""
    is_gathered = isinstance(module, nn.Embedding)
    if not (is_gathered or type(module) in LINEARS) or not is_plain(module):
        return False
    columns, depth = reversed(module.weight.shape) if type(module) is Conv1D else module.weight.shape
    return (packed.columns, packed.depth) == (columns, depth) and not (is_gathered and packed.format not in GATHERED)


def replace(model: nn.Module, packer: Packer, weights: Mapping[nn.Module, Packed]) -> None:
    """Put modules over packed weights in place of those they were packed from; nothing is compared."""
    places, shared = _places(model), dict[Packed, nn.Parameter]()
    for old, packed in weights.items():
        weight = shared.setdefault(packed, placeholder(cast(nn.Parameter, old.weight)))
        new = (PackedEmbedding if isinstance(old, nn.Embedding) else PackedLinear)(packed, weight, old, packer)
        for place in places[id(old)]:
            setattr(place.parent, place.name, new)


def has_linears(model: nn.Module) -> bool:
    """Whether torch computes a linear layer, whose bits depend on the number of rows."""
    return any(isinstance(module, LINEARS) for module in model.modules())


def packed_weights(model: nn.Module) -> Iterator[Packed]:
    """The packed weights of linear layers and embeddings; a tied embedding has those of its head."""
    found = (module.packed for module in model.modules() if isinstance(module, PackedModule))
    return iter({weights.address: weights for weights in found}.values())


def is_plain(module: nn.Module) -> bool:
    """Whether a module computes nothing but its type's own product, of bf16 weights on the CPU."""
    if is_changed(module) or getattr(module, "max_norm", None) is not None:
        return False
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    return (
        weight is not None and weight.dim() == 2 and all(is_bf16(each) for each in (weight, bias) if each is not None)
    )


def is_bf16(tensor: torch.Tensor) -> bool:
    """Whether a parameter is nothing but bf16 values, contiguous or those of a placeholder, on the CPU."""
    whole = tensor.is_contiguous() or is_placeholder(tensor)
    return holds(tensor, torch.bfloat16) and tensor.device.type == "cpu" and whole


def _places(model: nn.Module) -> Places:
    places: Places = {}
    for path, parent in model.named_modules():
        for name, child in parent._modules.items():
            places.setdefault(id(child), []).append(Place(parent, name, f"{path}.{name}".lstrip(".")))
    return places


def _head(model: nn.Module) -> Any:
    """The layer whose outputs are the logits, if the model says which; in int4 it doubles what the others change."""
    found = getattr(model, "get_output_embeddings", None)
    return None if found is None else found()


def _users_of_weights(model: nn.Module) -> dict[int, set[nn.Module]]:
    """By address: the modules whose parameters or buffers are there."""
    users: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if isinstance(tensor, torch.Tensor) and type(tensor) in (torch.Tensor, nn.Parameter) and tensor.numel():
                users.setdefault(tensor.data_ptr(), set()).add(module)
    return users


def _address(linear: Any) -> int:
    return int(linear.weight.data_ptr())


def _fit(users: Sequence[Any], called_ids: set[int]) -> bool:
    """Whether modules that have the same weights can be replaced together: all use them, and in one way.

    Embeddings alone, too, which are replaced by codes only.
    """
    linears = [module for module in users if not isinstance(module, nn.Embedding)]
    types = {type(module) for module in linears}
    return (types <= {nn.Linear} or (types == {Conv1D} and linears == users)) and all(
        module.weight.shape == users[0].weight.shape
        and (id(module) in called_ids if type(module) in LINEARS else is_plain(module))
        for module in users
    )


def _replace(
    users: Sequence[Any],
    packer: Packer,
    places: Places,
    weight_format: WeightFormat,
    grid: FileGrid | None = None,
) -> list[str]:
    """Pack the weights that these modules share, compare, put the new modules in place; return notes."""
    linears = [module for module in users if type(module) in LINEARS]
    weights = _packed(linears[0], packer, weight_format) if grid is None else _coded(packer, grid)
    if weights is None:
        return [f"{places[id(users[0])][0].path} keeps its weights in bf16: it is too deep for others"]
    weight = placeholder(users[0].weight, packer.device)
    replacements: list[PackedLinear | PackedEmbedding] = []
    replaced = users if weights.format in GATHERED else linears
    for old in replaced:
        embedding = isinstance(old, nn.Embedding)
        new = (PackedEmbedding if embedding else PackedLinear)(weights, weight, old, packer)
        if not agrees(old, new):
            if grid is not None and not linears:
                return [f"{places[id(old)][0].path} keeps its weights in bf16: its codes give others"]
            if grid is not None:
                return _replace(users, packer, places, weight_format)
            others = [each for each in FALLBACKS[weight_format][1:] if each in packer.formats]
            if others:
                return _replace(users, packer, places, others[0])
            return [f"{places[id(old)][0].path} is left to torch: our kernel gives other outputs"]
        replacements.append(new)
    for old, new in zip(replaced, replacements, strict=True):
        for place in places[id(old)]:
            setattr(place.parent, place.name, new)
    return []


def _coded(packer: Packer, grid: FileGrid) -> Packed:
    assert isinstance(packer, KernelPacker)  # codes of files are kept on the processor alone
    return packer.pack_grid(grid)


def packed_linear(linear: Any, packer: Packer, weight_format: WeightFormat) -> PackedLinear | None:
    """Pack a layer of `LINEARS` with bf16 weights; None if the packer has no format for it."""
    packed = _packed(linear, packer, weight_format)
    return None if packed is None else PackedLinear(packed, placeholder(linear.weight, packer.device), linear, packer)


def _packed(linear: Any, packer: Packer, weight_format: WeightFormat) -> Packed | None:
    layout: Layout = "depth first" if type(linear) is Conv1D else "columns first"
    return pack(packer, linear.weight, layout, weight_format)


def release_files(model: nn.Module) -> None:
    """Copy what still lies in mapped files of weights, if less than half of the model, so that these are unmapped.

    Otherwise the pages that were packed stay resident, though the system may take them, until the process ends.
    """
    mapped = _mapped_ranges()
    left = [
        tensor
        for tensor in {id(each): each for each in (*model.parameters(), *model.buffers())}.values()
        if tensor.device.type == "cpu" and any(start <= tensor.data_ptr() < end for start, end in mapped)
    ]
    if 2 * sum(tensor.nbytes for tensor in left) < sum(each.nbytes for each in model.parameters()):
        for tensor in left:
            tensor.data = tensor.data.clone()


def _mapped_ranges(maps: Path = Path("/proc/self/maps")) -> list[tuple[int, int]]:
    """Addresses of the files of weights that this process maps."""
    if not maps.is_file():
        return []
    lines = [line.split(maxsplit=5) for line in maps.read_text("utf-8", "replace").splitlines()]
    ranges = [line[0].split("-") for line in lines if line[-1].rstrip().endswith(".safetensors")]
    return [(int(start, 16), int(end, 16)) for start, end in ranges]


def agrees(old: Any, new: PackedLinear | PackedEmbedding) -> bool:
    """Whether two layers give the same outputs for a few random rows, to the rounding of bf16 and of fp32 sums."""
    with torch.inference_mode():
        if isinstance(new, PackedEmbedding):
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(new.num_embeddings, (64,), generator=generator)
            return same_weights(new(ids), old(ids), new.packed.format)
        rows, weight = checked_rows(new.packed.depth), old.weight.T if type(old) is Conv1D else old.weight
        ours = new(rows.to(new.weight.device)).to(rows.device)
        return same_products(ours, old(rows), rows, weight, old.bias, weight_format=new.packed.format)
