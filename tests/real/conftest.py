"""Real weights: SmolLM2 in `make test`, both models in `make real`, which sets REAL=all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rekindle.config import Settings
from rekindle.model.load import load_model
from rekindle.model.loaded import LoadedModel
from tools.real_models import REAL_MODELS

NAMES = tuple(REAL_MODELS) if os.environ.get("REAL") == "all" else ("smollm2",)


@pytest.fixture(scope="session", params=NAMES)
def real_file(request: pytest.FixtureRequest) -> Path:
    """The GGUF file of each real model of this run."""
    return REAL_MODELS[request.param].path()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    return REAL_MODELS["smollm2"].path()


@pytest.fixture(scope="session")
def loaded(real_file: Path) -> LoadedModel:
    """Each real model by its default settings, as `rekindle serve FILE` loads it."""
    settings = Settings.load({"model": str(real_file)})
    return load_model(settings.model, block_tokens=64, max_context=None, format_map_dir=None)
