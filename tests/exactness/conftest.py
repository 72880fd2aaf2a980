"""Tiny models of five architectures, loaded once per format and dtype; engines as the engine's own tests start them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from rekindle.model.loaded import LoadedModel
from tests.engine.conftest import start, tiny_llama
from tests.exactness.rig import ROUNDED, Rig, load
from tests.tiny_models import tiny_model_dir

__all__ = ["KINDS", "Loader", "MakeRig", "start", "tiny_llama"]

KINDS = ("llama", "qwen3", "gemma3", "mixtral", "phi3")
Loader = Callable[[str, str, str], LoadedModel]
MakeRig = Callable[..., Rig]


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    """(kind, dtype, kv) -> the loaded model."""
    parent = tmp_path_factory.mktemp("exactness")

    @cache
    def directory(kind: str, dtype: str) -> Path:
        return tiny_model_dir(kind, dtype, parent / f"{kind}-{dtype}")

    @cache
    def get(kind: str, dtype: str, kv: str) -> LoadedModel:
        return load(directory(kind, "bf16" if dtype in ROUNDED else dtype), dtype, kv)

    return get


@pytest.fixture
def make_rig(loaded: Loader) -> Iterator[MakeRig]:
    """Rigs that are closed at the end of the test."""
    rigs: list[Rig] = []

    def make(kind: str, dtype: str, kv: str, **options: Any) -> Rig:
        rig = Rig(loaded(kind, dtype, kv), **options)
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.close()
