"""What docs/cache.md shows runs as it stands there, and so do the examples it names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "cache.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
NO_TORCH = "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"


def run(*arguments: str, cwd: Path) -> str:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([f"{ROOT}/src", f"{ROOT}/pocket/src"]),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs_without_torch(block: str, tmp_path: Path) -> None:
    assert run("-c", NO_TORCH + block, cwd=tmp_path).strip()


def test_the_page_shows_the_example_as_it_is() -> None:
    (quoted,) = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    code = (ROOT / "examples" / "reuse_past_key_values.py").read_text()
    assert [line for line in quoted.splitlines() if line.strip() not in code] == []


def test_every_link_of_the_page_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", PAGE)
    assert links and [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_past_key_values_are_reused_and_the_answers_stay(tmp_path: Path) -> None:
    said = run(str(ROOT / "examples" / "reuse_past_key_values.py"), cwd=tmp_path)
    turns = [(int(part), int(whole)) for part, whole in re.findall(r"(\d+) of (\d+) prompt tokens", said)]
    (first, whole), (second, longer), (other, _) = turns
    assert first == whole and second < first < longer and other < first, said
    assert said.count("the same without the cache: True") == 2, said


def test_a_batch_is_analysed(tmp_path: Path) -> None:
    said = run(str(ROOT / "examples" / "analyse_batch.py"), cwd=tmp_path)
    assert "8 prompts share 62 characters, 434 saved" in said
    assert "prompts (4, 7) are the same" in said
