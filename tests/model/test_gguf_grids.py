"""Codes of a GGUF file are packed as they are: the values that the package gguf gives, most to the last bit."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize, quants
from torch import nn

from rekindle.compute.cpu.kernels.grids import pack_grid, rows_of
from rekindle.compute.cpu.kernels.linear import LinearKernel
from rekindle.compute.cpu.packed import all_called, observed_linears, pack_codes, pack_linears, packed_weights
from rekindle.compute.cpu.packed_modules import PackedEmbedding
from rekindle.compute.cpu.packer import KernelPacker
from rekindle.compute.devices import choose_kernels
from rekindle.config import ModelSettings
from rekindle.layer_forms import GROUP
from rekindle.model.gguf_grids import UNPACKED, FileGrid, file_grid
from rekindle.model.gguf_header import TYPES, TensorEntry
from rekindle.model.gguf_weights import widened
from rekindle.model.kept_tensors import placeholder
from tests.kernels.native import needs_kernels

pytestmark = needs_kernels
ROWS, DEPTH, BEFORE = 200, 96, 7


def written(kind: str, path: Path) -> tuple[TensorEntry, np.ndarray]:
    """A random tensor in a file, and its values."""
    number = GGMLQuantizationType[kind]
    values = np.random.default_rng(1).standard_normal((ROWS, DEPTH)).astype(np.float32)
    held = quantize(values * np.exp(values[:, :1]), number)
    path.write_bytes(bytes(BEFORE) + held.tobytes())
    return TensorEntry("a", (ROWS, DEPTH), TYPES[number], BEFORE, BEFORE + held.nbytes), dequantize(held, number)


def read_back(grid: Any) -> np.ndarray:
    library = choose_kernels(ModelSettings(), "cpu").library
    assert grid is not None and library is not None
    columns, depth = grid.entry.shape
    packed = pack_grid(LinearKernel(library), grid.parts(), columns=columns, depth=depth)
    return rows_of(packed, np.arange(ROWS))


@pytest.mark.parametrize("kind", sorted(UNPACKED.keys() - {"Q4_K"}))
def test_values_are_those_of_gguf_in_any_order_of_rows(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, values = written(kind, tmp_path / "file")
    assert np.array_equal(read_back(file_grid(tmp_path / "file", entry, lambda rows: rows)), values)
    turned = file_grid(tmp_path / "file", entry, lambda rows: rows[::-1])
    assert np.array_equal(read_back(turned), values[::-1])
    monkeypatch.setattr("rekindle.model.gguf_grids.PART_VALUES", 64 * DEPTH)  # in several parts
    assert np.array_equal(read_back(file_grid(tmp_path / "file", entry, lambda rows: rows)), values)


def random_blocks(name: str, path: Path, *, factors: slice) -> tuple[TensorEntry, np.ndarray, np.ndarray]:
    """A tensor of random bytes with sensible factors, in a file; its values, and the sum of each block's factors."""
    number, random = GGMLQuantizationType[name], np.random.default_rng(2)
    kind, depth = TYPES[number], 512
    held = random.integers(0, 256, (ROWS, depth // kind.block_values, kind.block_bytes), np.uint8)
    count = (factors.stop - factors.start) // 2
    held[..., factors] = (2.0 ** random.uniform(-12, -8, (*held.shape[:2], count))).astype(np.float16).view(np.uint8)
    path.write_bytes(held.tobytes())
    sums = held[..., factors].copy().view(np.float16).astype(np.float32).sum(-1)
    values = dequantize(held.reshape(ROWS, -1), number)
    return TensorEntry("a", (ROWS, depth), kind, 0, held.nbytes), values, np.repeat(sums, kind.block_values, axis=1)


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ3_S", "IQ4_NL", "IQ1_M"])
def test_types_whose_codes_are_places_in_a_table_are_widened(name: str, tmp_path: Path) -> None:
    """In a process where nothing else has made that table."""
    entry, values, _ = random_blocks(name, tmp_path / "file", factors=slice(0, 2))
    reader: Any = getattr(quants, name)
    reader.grid = None
    found = widened(FileGrid(tmp_path / "file", entry), torch.float32)
    assert np.array_equal(found.numpy(), values, equal_nan=True)


def test_steps_of_groups_in_groups_are_rounded_once(tmp_path: Path) -> None:
    entry, values, factors = random_blocks("Q4_K", tmp_path / "file", factors=slice(0, 4))
    found = read_back(file_grid(tmp_path / "file", entry, lambda rows: rows))
    assert np.abs(found - values).max() > 0
    assert (np.abs(found - values) <= 2.0**-11 * 63 * 15 * factors).all()


@pytest.mark.parametrize(("name", "factors"), [("Q6_K", slice(208, 210)), ("Q5_K", slice(0, 4)), ("Q5_1", slice(0, 4))])
def test_what_is_on_no_grid_is_rounded_to_8_bits(name: str, factors: slice, tmp_path: Path) -> None:
    entry, values, _ = random_blocks(name, tmp_path / "file", factors=factors)
    found = read_back(file_grid(tmp_path / "file", entry, lambda rows: rows))
    largest = np.abs(values).reshape(ROWS, -1, GROUP).max(axis=-1, keepdims=True)
    off = np.abs(found - values).reshape(ROWS, -1, GROUP)
    assert found.any() and (off <= largest / 127 * (0.5 + 2.0**-9)).all()


class Tied(nn.Module):
    """An embedding, and a head with the same weights."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.embedding = nn.Embedding(*weight.shape, _weight=weight.to(torch.bfloat16))
        self.head = nn.Linear(*reversed(weight.shape), bias=False)
        self.head.weight = self.embedding.weight


def test_an_embedding_shares_codes_that_were_rounded(tmp_path: Path) -> None:
    entry, values, _ = random_blocks("Q6_K", tmp_path / "file", factors=slice(208, 210))
    model, library = Tied(torch.from_numpy(values)), choose_kernels(ModelSettings(), "cpu").library
    grid = file_grid(tmp_path / "file", entry, lambda rows: rows)
    assert grid is not None and library is not None
    assert not pack_linears(model, KernelPacker.of(library), {model.head}, "int8", {"embedding.weight": grid})
    embedding: Any = model.embedding
    assert isinstance(embedding, PackedEmbedding) and embedding.packed is model.head.packed


class Two(nn.Module):
    """Two layers; a pass goes through both, or through one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(DEPTH, ROWS, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, *, both: bool) -> torch.Tensor:
        return self.first(x) + self.second(x) if both else self.first(x)


def test_one_layer_at_a_time_is_wide_and_those_that_are_not_called_are_seen(tmp_path: Path) -> None:
    entry, _ = written("Q8_0", tmp_path / "file")
    grid = file_grid(tmp_path / "file", entry, lambda rows: rows)
    library, model, wide = choose_kernels(ModelSettings(), "cpu").library, Two(), list[weakref.ref[np.ndarray]]()
    assert grid is not None and library is not None
    for layer in (model.first, model.second):
        layer.weight = placeholder(torch.empty(ROWS, DEPTH, dtype=torch.bfloat16))

    def values(grid: FileGrid, dtype: torch.dtype) -> torch.Tensor:
        assert [each() for each in wide] == [None] * len(wide), "the values of the layer before are still there"
        memory = widened(grid, dtype).view(torch.int16).numpy().copy()
        wide.append(weakref.ref(memory))
        return torch.from_numpy(memory).view(dtype)

    grids = [("first.weight", grid), ("second.weight", grid)]
    assert not pack_codes(model, KernelPacker.of(library), grids, values)
    assert len(wide) == 2 and {each.format for each in packed_weights(model)} == {"grid8"}
    for both in (True, False):
        with observed_linears(model) as called:
            model(torch.zeros(1, DEPTH, dtype=torch.bfloat16), both=both)
        assert all_called(model, called) == both


def test_what_changes_values_or_is_no_grid_has_no_codes(tmp_path: Path) -> None:
    entry, _ = written("Q8_0", tmp_path / "file")
    for process in (lambda rows: rows - 1, lambda rows: rows.T, lambda rows: rows[:0], lambda rows: rows * 0):
        assert file_grid(tmp_path / "file", entry, process) is None
    plain = TensorEntry("a", (ROWS, 256), TYPES[GGMLQuantizationType.F32], 0, 0)
    assert file_grid(tmp_path / "file", plain, lambda rows: rows) is None
