"""`python -m benchmarks loads`: all arms, a few blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.loads import ARMS, SHAPES, LoadBench, run_loads
from rekindle.errors import ConfigError
from tests.kernels.native import needs_kernels


@needs_kernels
def test_every_arm_loads_every_shape(tmp_path: Path) -> None:
    out = tmp_path / "loads.jsonl"
    assert run_loads(LoadBench(blocks=5, repeats=1, out=out), Console(quiet=True)) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(line["measure"], line["arm"]) for line in lines if line["median"] > 0} == {
        (f"{shape}: {what}", arm) for shape in SHAPES for what in ("rate", "CPU of a block") for arm in ARMS
    }


@pytest.mark.parametrize("given", [{"blocks": 0}, {"repeats": 0}])
def test_what_cannot_be_measured_is_refused(given: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        LoadBench(**given)
