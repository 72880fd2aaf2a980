"""Real models are served by each level of the kernels, by torch alone and in other formats, and loading stays small."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rekindle.compute.load import load_model
from rekindle.config import Settings
from rekindle.model.loaded import LoadedModel
from tests.kernels.native import runnable
from tests.real.conftest import FirstStart

# Others load the fastest level, whose formats of KV are found on the way, and torch in fp32. Torch takes half a minute
# for bf16 on some processors. Where one level runs, as on those with AVX2 alone, torch is the other way.
TORCH: dict[str, Any] = {"kernels": "torch", "dtype": "fp32"}
WAYS: list[dict[str, Any]] = [{"kernels": level, "kv": "q8h/q4h"} for level in runnable()[1:]] or [TORCH]
if os.environ.get("REAL") == "all":
    WAYS += [{"kernels": "torch"}, {"weights": "int8"}, {"weights": "int4"}]
    WAYS += [TORCH] if TORCH not in WAYS else []


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_real_model_is_served_in_many_ways(real_file: Path, way: dict[str, Any]) -> None:
    """In a context of the trial's length, for which the self-test takes little time."""
    settings = Settings.load({"model": str(real_file), "threads": 1, **way}).model
    loaded = load_model(settings, block_tokens=64, max_context=128, format_map_dir=None)
    assert loaded.promise == "bitwise", loaded.notes


def test_a_real_model_is_served_by_default_settings(loaded: LoadedModel) -> None:
    assert loaded.promise == "bitwise" and loaded.unsaved is None
    assert any("are mapped from" in note for note in loaded.notes), loaded.notes


MOST = 2.6  # times the wide weights


def test_loading_takes_memory_in_proportion_to_the_weights(first_start: FirstStart) -> None:
    wide = 2 * first_start.num_parameters
    assert first_start.most - first_start.imported <= MOST * wide, first_start
