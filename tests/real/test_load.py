"""Real models are served by each level of the kernels, by torch alone and in other formats, and loading stays small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rekindle.config import Settings
from rekindle.model.load import load_model
from tests.kernels.native import runnable

# Other tests load the fastest level, and fp32 with it. Torch takes half a minute for bf16 on some processors.
WAYS: list[dict[str, Any]] = [*({"kernels": level} for level in runnable()[1:]), {"kernels": "torch", "dtype": "fp32"}]
if os.environ.get("REAL") == "all":
    WAYS += [{"kernels": "torch"}, {"weights": "int8"}, {"weights": "int4"}]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_real_model_is_served_in_many_ways(real_file: Path, way: dict[str, Any]) -> None:
    """In a context of the trial's length, for which the self-test takes little time."""
    settings = Settings.load({"model": str(real_file), "threads": 1, **way}).model
    loaded = load_model(settings, block_tokens=64, max_context=128, format_map_dir=None)
    assert loaded.promise == "bitwise", loaded.notes


LOADING = """
import json, resource, sys
from rekindle.config import Settings
from rekindle.model.load import load_model

def most_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

imported = most_bytes()
settings = Settings.load({"model": sys.argv[1], "threads": 1}).model
loaded = load_model(settings, block_tokens=64, max_context=None, format_map_dir=None)
print(json.dumps([imported, most_bytes(), loaded.spec.facts.num_parameters]))
"""
MOST = 2.6  # times the wide weights; measured:


def test_loading_takes_memory_in_proportion_to_the_weights(real_file: Path) -> None:
    command = [sys.executable, "-c", LOADING, str(real_file)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    imported, most, num_parameters = json.loads(done.stdout.splitlines()[-1])
    assert most - imported <= MOST * 2 * num_parameters, (imported, most, num_parameters)
