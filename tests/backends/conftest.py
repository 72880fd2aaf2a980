"""A front over a real socket, whose requests our own server computes over another one.

`test_real_llama.py` is collected where there is a llama-server: `make engines` builds one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.server.conftest import Served
from tests.server.scripted import serving, write_scripted_model

collect_ignore = [] if shutil.which(os.environ.get("LLAMA_SERVER") or "llama-server") else ["test_real_llama.py"]


@dataclass(frozen=True)
class Pair:
    """A front, the server that computes for it, and their model."""

    model: Path
    backend: Served
    front: Served


@contextmanager
def fronting(model: Path, backend: Served, store: Path | str, kind: str = "vllm", **flags: object) -> Iterator[Served]:
    """A front of a backend, with a store of texts."""
    with serving(model=str(model), store=str(store), backend=f"{kind}={backend.url}", **flags) as front:
        yield front


@pytest.fixture(scope="package")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("front") / "scripted")


@pytest.fixture(scope="package")
def computing(scripted_model: Path) -> Iterator[Served]:
    """The server that computes."""
    with serving(model=str(scripted_model), store="off", threads=1, hot_bytes="16MiB") as backend:
        yield backend


@pytest.fixture(scope="package")
def pair(scripted_model: Path, computing: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with fronting(scripted_model, computing, tmp_path_factory.mktemp("texts")) as front:
        yield Pair(scripted_model, computing, front)
