"""`rekindle.cache` is usable alone: nothing heavy comes with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROBE = """
import sys
before = set(sys.modules)
import rekindle.cache as cache
assert cache.BlockPool(2, 4).allocate() is not None
manager = cache.CacheManager(cache.CacheConfig(ttl_s=9, max_entries_per_namespace=2))
assert manager.store([1, 2, 3], b"payload") is not None and manager.lookup([1, 2, 4]).matched == 2
assert manager.analyze_batch([[1, 2], [1, 3]]).distinct_tokens == 3
for name in cache.__all__:
    assert hasattr(cache, name), name
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
others = {name for name in loaded - set(sys.stdlib_module_names) if not name.startswith("_")}
assert others == {"numpy", "rekindle"}, f"imported with rekindle.cache: {sorted(others)}"
"""


def test_rekindle_cache_loads_numpy_only() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
