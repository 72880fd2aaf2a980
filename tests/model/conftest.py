"""One thread, quiet loading, and tiny model directories written once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging

from rekindle.compute.load import load_model
from rekindle.config import ModelSettings
from rekindle.model.loaded import LoadedModel
from tests.model.helpers import Loader
from tests.tiny_models import DTYPES, tiny_model_dir


@pytest.fixture(scope="session", autouse=True)
def _one_quiet_thread() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`model_dir(kind, dtype, **changes)`: the directory of a tiny model, written at the first call."""
    written: dict[Any, Path] = {}

    def get(kind: str, dtype: str = "fp32", **changes: Any) -> Path:
        key = (kind, dtype, repr(sorted(changes.items())))
        if key not in written:
            written[key] = tiny_model_dir(kind, dtype, tmp_path_factory.mktemp("models"), **changes)
        return written[key]

    return get


@pytest.fixture
def load(model_dir: Callable[..., Path]) -> Loader:
    """`load(kind, dtype, kv=..., max_context=..., maps=...)`: a tiny model, loaded and proven."""

    def get(
        kind: str, dtype: str = "fp32", *, kv: str = "auto", max_context: int | None = None, maps: Path | None = None
    ) -> LoadedModel:
        settings = ModelSettings(model=str(model_dir(kind, dtype)), kv=kv)
        return load_model(
            settings, block_tokens=16, max_context=max_context, format_map_dir=maps, compute_dtype=DTYPES[dtype]
        )

    return get
