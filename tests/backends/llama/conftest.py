"""What needs a real llama-server is collected where there is one: named by `LLAMA_SERVER`, or on the path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.backends.llama import imitation
from tests.backends.llama.real_server import executable
from tests.backends.llama.recording import write_model

collect_ignore_glob = [] if executable() else ["test_real_*.py", "test_scripted_llama.py"]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model as a GGUF file, for its tokenizer."""
    return write_model(tmp_path_factory.mktemp("gguf"), **{"llama.attention.sliding_window": imitation.WINDOW})


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The imitation as a program, which the variable names; its requests are logged."""
    monkeypatch.setattr("rekindle.harness.own_server.POLL_S", 0.05)  # the imitation is there in a moment
    path = imitation.write_program(tmp_path / "llama-server")
    monkeypatch.setenv("LLAMA_SERVER", str(path))
    monkeypatch.setenv("IMITATION_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    return path
