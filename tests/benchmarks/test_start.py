"""`python -m benchmarks start`: the same program, once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.start import KINDS, StartBench, run_start
from rekindle.config import Settings
from rekindle.errors import ConfigError

PHASES = ("code imported", "weights loaded", "store opened", "agents known", "serving")


@pytest.mark.long
def test_a_server_starts_first_and_again_and_its_phases_follow_each_other(tmp_path: Path) -> None:
    out = tmp_path / "start.jsonl"
    assert run_start(Settings.load({"threads": 1}), StartBench(repeats=1, out=out), Console(quiet=True)) == 0
    found = {line["measure"]: line["median"] for line in map(json.loads, out.read_text().splitlines())}
    for kind in KINDS:
        seconds = [found[f"start, {kind}: {phase}"] for phase in PHASES]
        assert seconds == sorted(seconds) and seconds[0] > 0
        assert found[f"start, {kind}: CPU"] > 0
        assert 0 < found[f"start, {kind}: memory"] <= found[f"start, {kind}: peak memory"]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"repeats": 0}, "at least one"),
        ({"real": ("mistral",)}, "--real must be one of .*, not mistral"),
        ({"against": "vllm", "real": ("smollm2",)}, "--against must be llama.cpp, not vllm"),
        ({"against": "llama.cpp"}, "--against needs --real"),
    ],
)
def test_what_cannot_be_measured_is_refused(given: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        StartBench(**given)
