"""The tensors of a GGUF file as the weights of transformers' model, read one after the other.

Owns which tensor becomes which weight: by the names in the package gguf, looked up once for the whole model, and by
transformers' own code for what llama.cpp stores otherwise (rows of Q and K in another order, norms less one, merged
experts). More memory than the weights take in their dtype is needed for one tensor alone, and for an embedding not even
that: its rows are widened some at a time. transformers' reader is left what only that knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from rekindle.model.gguf_grids import FileGrid, file_grid
from rekindle.model.gguf_header import GgufHeader, TensorEntry, shown, unreadable
from rekindle.model.kept_tensors import placeholder

PIECE_VALUES = 1 << 22  # of an embedding, which are widened together
WHOLE_ROWS = ("token_embd.weight", "output.weight")  # llama.cpp stores their rows as they are
LEAVES = ("weight", "bias")
PLAIN = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
MERGED_EXPERTS = "_exps.weight"  # tensors that transformers' code puts into a weight itself
State = dict[str, torch.Tensor]


def is_read_here(architecture: str) -> bool:
    """Whether this module reads files of an architecture: all but those that transformers has a newer reader for."""
    try:
        from transformers.integrations.gguf import GGUF_ARCHS
    except ImportError:  # transformers before 5.20
        return True
    return architecture not in GGUF_ARCHS


@dataclass(frozen=True, slots=True, eq=False)
class GgufWeights:
    """The weights in a file by their names in a model, and for some of them where their codes are."""

    state: State
    grids: Mapping[str, FileGrid]


def read_weights(
    header: GgufHeader,
    architecture: str,
    model: type[Any],
    config: Any,
    dtype: torch.dtype,
    *,
    coded: bool = False,
) -> GgufWeights:
    """The weights in a file for a class of models with this config.

    Values are widened to fp32 as the package gguf does it, and rounded to `dtype` once. `coded`: of linear layers and
    embeddings that have codes there are placeholders instead.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    with torch.device("meta"):
        empty = model._from_config(config)
    names = list(empty.state_dict())
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    places = weight_names(architecture, config.num_hidden_layers, names, processor)
    found, grids = State(), dict[str, FileGrid]()
    for entry in _shown(header.tensors, "reading weights"):
        if entry.name in places:
            _check_type(header.path, entry)
        grid = None if entry.name not in places else file_grid(header.path, entry, partial(_ordered, processor, entry))
        if grid is not None:
            grids[places[entry.name]] = grid
        if coded and grid is not None and _is_replaced(empty, places[entry.name]):
            found[places[entry.name]] = placeholder(torch.empty(entry.shape, dtype=dtype, device="meta")).data
        elif entry.name in WHOLE_ROWS and entry.name in places:
            found[places[entry.name]] = _rows(header.path, entry, dtype)
        elif entry.name in places or entry.name.endswith(MERGED_EXPERTS):
            _put(found, places, processor, entry.name, _values(header.path, entry), dtype)
    return GgufWeights(found, grids)


def widened(grid: FileGrid, dtype: torch.dtype) -> torch.Tensor:
    """The values of a tensor with codes, in the order of the weight's."""
    rows = _rows(grid.path, grid.entry, dtype)
    return rows if grid.order is None else rows[torch.from_numpy(grid.order)]


def _is_replaced(model: Any, name: str) -> bool:
    """Whether a weight is that of a layer which packed codes can replace, unless that is used in other ways."""
    path, _, leaf = name.rpartition(".")
    module, parent = model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])
    is_read = callable(getattr(parent, "expand_kv", None))  # as a map of latents, not multiplied by
    return leaf == "weight" and not is_read and (type(module) is nn.Linear or isinstance(module, nn.Embedding))


def _ordered(processor: Any, entry: TensorEntry, values: np.ndarray) -> np.ndarray:
    """What transformers' code for the architecture makes of values in place of a tensor's; nothing if it keeps them."""
    found = processor.process(values, entry.name, tensor_key_mapping={}, parsed_parameters={"tensors": {}})
    return values[:0] if found.name is None else np.asarray(found.weights)


def weight_names(architecture: str, num_layers: int, names: Iterable[str], processor: Any) -> dict[str, str]:
    """The names of a model's weights by those of llama.cpp's tensors.

    Some models were converted from a part of what transformers loads, so names are tried from the second or a later
    word on, too; where two have the same name then, the longer one is meant.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(kind, num_layers)
    found: dict[str, str] = {}
    left = [processor.preprocess_name(name) for name in names]
    skipped = 0
    while left:
        unknown = list[str]()
        for name in left:
            stem, _, leaf = name.rpartition(".")
            stem, ending = (stem, f".{leaf}") if leaf in LEAVES else (name, "")
            words = stem.split(".")[skipped:]
            theirs = table.get_name(".".join(words))
            if theirs is not None:
                found.setdefault(theirs + ending, name)
            elif len(words) > 1:
                unknown.append(name)
            if theirs is None and not skipped:
                processor.perform_fallback_tensor_mapping(found, ending, "", name)
        left, skipped = unknown, skipped + 1
    return found


def _put(
    found: State,
    places: Mapping[str, str],
    processor: Any,
    name: str,
    values: np.ndarray,
    dtype: torch.dtype,
) -> None:
    """Add one tensor to what was found, as transformers' code for the architecture changes and names it."""
    before = set(found)
    parsed = {"tensors": found}
    result = processor.process(weights=values, name=name, tensor_key_mapping=places, parsed_parameters=parsed)
    if result.name in places:
        found[places[result.name]] = torch.from_numpy(np.ascontiguousarray(result.weights)).to(dtype)
    for added in found.keys() - before:
        found[added] = found[added].to(dtype)


def _rows(path: Path, entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
    """The values of a matrix, some of its rows at a time."""
    rows, columns = entry.shape
    out = torch.empty(rows, columns, dtype=dtype)
    row_bytes, step = (entry.end - entry.begin) // rows, max(1, PIECE_VALUES // columns)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        begin = entry.begin + first * row_bytes
        part = replace(entry, shape=(count, columns), begin=begin, end=begin + count * row_bytes)
        out[first : first + count] = torch.from_numpy(_values(path, part))
    return out


def _check_type(path: Path, entry: TensorEntry) -> None:
    """Refuse values that the package gguf cannot widen, before a kernel looks for their codes."""
    from gguf import quants

    if entry.type.name not in PLAIN and not hasattr(quants, entry.type.name):
        raise unreadable(path, f"the tensor {shown(entry.name)} is {entry.type.name}, which is not widened here")


def _values(path: Path, entry: TensorEntry) -> np.ndarray:
    """A tensor's values: in fp32, those of 64 bits as they are."""
    from gguf import quants

    held = np.fromfile(path, np.uint8, count=entry.end - entry.begin, offset=entry.begin)
    kind = entry.type.name
    if kind in PLAIN:
        values = held.view(PLAIN[kind]).reshape(entry.shape)
        return values.astype(np.float32) if kind == "F16" else values
    blocks = held.reshape(-1, entry.type.block_bytes)  # `quants.dequantize` takes 16 rows at a time, half as fast
    reader: Any = getattr(quants, kind)
    reader.init_grid()  # of types whose codes are places in a table
    found: np.ndarray = reader.dequantize_blocks(blocks).reshape(entry.shape)
    return found


def shown_grids(grids: Mapping[str, FileGrid]) -> Iterator[tuple[str, FileGrid]]:
    """The items, with a bar on a terminal."""
    entries = _shown([grid.entry for grid in grids.values()], "packing weights")
    yield from ((name, grid) for (name, grid), _ in zip(grids.items(), entries, strict=True))


def _shown(entries: Sequence[TensorEntry], what: str) -> Iterator[TensorEntry]:
    """The entries, with a bar on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=sum(entry.end - entry.begin for entry in entries))
        for entry in entries:
            yield entry
            bar.advance(task, entry.end - entry.begin)
