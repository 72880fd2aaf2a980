"""`rekindle.cache` is usable alone: nothing heavy comes with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROBE = """
import sys
import rekindle.cache as cache
assert cache.BlockPool(2, 4).allocate() is not None
heavy = {"torch", "transformers", "tokenizers", "safetensors", "jinja2", "pydantic"} & set(sys.modules)
assert not heavy, f"imported with rekindle.cache: {sorted(heavy)}"
"""


def test_rekindle_cache_loads_numpy_only() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
