"""`python -m benchmarks neighbours`: the same program, once and briefly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.neighbours import STATES, NeighbourBench, run_neighbours
from rekindle.config import Settings
from rekindle.errors import ConfigError


@pytest.mark.long
def test_every_arm_is_measured_alone_and_with_neighbours(tmp_path: Path) -> None:
    out = tmp_path / "neighbours.jsonl"
    options = NeighbourBench(neighbours=1, repeats=1, tokens=8, out=out)
    assert run_neighbours(Settings.load({}), options, Console(quiet=True)) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    arms = {line["arm"] for line in lines}
    assert "1 thread" in arms and {(line["arm"], line["measure"]) for line in lines} == {
        (arm, f"decode, {state}") for arm in arms for state in STATES
    }
    assert all(line["median"] > 0 for line in lines)


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one neighbour"):
        NeighbourBench(neighbours=0)
