"""Real weights: SmolLM2 in `make test`, both models in `make real`, which sets REAL=all.

Each model is converted once, by a process of its own; all others start from the packed weights that it left.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from filelock import FileLock

from rekindle.compute.load import load_model
from rekindle.config import Settings
from rekindle.model.loaded import LoadedModel
from tools.real_models import REAL_MODELS

NAMES = tuple(REAL_MODELS) if os.environ.get("REAL") == "all" else ("smollm2",)
FIRST_START = """
import json, resource, sys
from pathlib import Path
from rekindle.config import Settings
from rekindle.compute.load import load_model

def most_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

imported = most_bytes()
settings = Settings.load({"model": sys.argv[1], "threads": 1}).model
loaded = load_model(settings, block_tokens=64, max_context=None, format_map_dir=Path(sys.argv[2]))
most = most_bytes()
loaded.unsaved.save(is_stopped=lambda: False)
print(json.dumps([imported, most, loaded.spec.facts.num_parameters]))
"""


class FirstStart(NamedTuple):
    """What the first start of a model left in a directory; the most bytes that were in use before and after it."""

    directory: Path
    imported: int
    most: int
    num_parameters: int

    def store(self, place: Path) -> Path:
        """A directory that a store can be made in, with what this start left."""
        return shutil.copytree(self.directory, place / "store", copy_function=os.link)


@pytest.fixture(scope="session", params=NAMES)
def real_file(request: pytest.FixtureRequest) -> Path:
    """The GGUF file of each real model of this run."""
    return REAL_MODELS[request.param].path()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    return REAL_MODELS["smollm2"].path()


@pytest.fixture(scope="session")
def first_start_of(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[Path], FirstStart]:
    """What the first start of a GGUF file left: one for all processes that run tests beside each other."""
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent

    def found(file: Path) -> FirstStart:
        directory, said = shared / f"{file.stem}-first", shared / f"{file.stem}.json"
        with FileLock(shared / f"{file.stem}.lock"):
            if not said.exists():
                directory.mkdir()
                command = [sys.executable, "-c", FIRST_START, str(file), str(directory)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                said.write_text(done.stdout.splitlines()[-1])
        return FirstStart(directory, *json.loads(said.read_text()))

    return found


@pytest.fixture(scope="session")
def first_start(real_file: Path, first_start_of: Callable[[Path], FirstStart]) -> FirstStart:
    """That of each real model of this run."""
    return first_start_of(real_file)


@pytest.fixture(scope="session")
def loaded(real_file: Path, first_start: FirstStart) -> LoadedModel:
    """Each real model by its default settings, as the second `rekindle serve FILE` loads it."""
    settings = Settings.load({"model": str(real_file), "threads": 1})
    return load_model(settings.model, block_tokens=64, max_context=None, format_map_dir=first_start.directory)
