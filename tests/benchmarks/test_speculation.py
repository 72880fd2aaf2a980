"""`python -m benchmarks speculation`: the same program, on short replies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.speculation import ARMS, KINDS, SpeculationBench, run_speculation
from rekindle.config import Settings
from rekindle.errors import ConfigError
from tests.tiny_models import tiny_model_dir


def test_each_kind_is_measured_with_drafts_and_without(tmp_path: Path) -> None:
    out, model = tmp_path / "lines.jsonl", tiny_model_dir("llama", "fp32", tmp_path)
    options = SpeculationBench(tokens=6, streams=(1, 2), repeats=1, out=out)
    settings = Settings.load({"model": str(model), "threads": 1, "hot_bytes": 4 << 20})
    assert run_speculation(settings, options, Console(quiet=True)) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    wanted = [(f"{kind}, {streams} streams", arm) for kind in KINDS for streams in (1, 2) for arm in ARMS]
    assert [(line["measure"], line["arm"]) for line in lines] == wanted
    for line in lines:
        assert line["median"] > 0
        assert line["detail"]["accepted"] <= line["detail"]["drafted"]
        assert line["arm"] == "auto" or line["detail"]["drafted"] == 0


@pytest.mark.parametrize("wrong", [{"tokens": 1}, {"streams": (0,)}, {"repeats": 0}])
def test_nothing_is_no_measurement(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least"):
        SpeculationBench(**wrong)
