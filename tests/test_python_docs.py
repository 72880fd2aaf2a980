"""docs/python.md is what its tool writes of the docstrings now, and its code blocks run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle import cache
from tools.python_reference import PAGE, page

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_page_is_what_the_docstrings_say_now() -> None:
    assert PAGE.read_text() == page(), "write it anew: python tools/python_reference.py"


def test_the_page_has_the_interface() -> None:
    text = PAGE.read_text()
    for shown in ("`Engine`", "`Agent`", "`SamplingParams`", "`CacheManager`", "`BlockPool`", "- `ConfigError`:"):
        assert shown in text
    for method in ("fork(target: str) -> Agent", "generate(prompt: str | Ids, *, agent", "try_reuse_prefix(root"):
        assert f"**`{method}" in text
    assert "| `hot_bytes` | `int \\| str \\| None` | `None` |" in text
    assert {"BlockPool", "CacheManager", "RadixTrie"} <= set(cache.__all__) and len(BLOCKS) >= 5


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(block: str, tmp_path: Path) -> None:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([f"{ROOT}/src", f"{ROOT}/pocket/src"]),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
