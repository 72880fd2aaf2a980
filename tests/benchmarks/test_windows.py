"""`python -m benchmarks windows`: the same program, on shapes and on a short conversation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.windows import ARMS, SHAPES, WindowBench, run_windows
from rekindle.config import Settings
from rekindle.errors import ConfigError
from tests.tiny_models import tiny_model_dir


def lines_of(out: Path) -> dict[tuple[str, str], float]:
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return {(line["measure"], line["arm"]): line["median"] for line in lines}


def test_large_shapes_keep_a_window_of_each_layer(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    assert run_windows(Settings.load({}), WindowBench(out=out), Console(quiet=True)) == 0
    found = lines_of(out)
    assert set(found) == {(name, arm) for name in SHAPES for arm in ARMS}
    kept = {name: found[name, ARMS[1]] for name in SHAPES}
    assert [round(size / 1e9, 2) for size in kept.values()] == [
        *(0.87, 0.22, 1.87, 0.42, 0.11),
        *(0.74, 0.25, 0.14, 0.3, 0.1),
    ]
    assert all(kept[name] < min(found[name, "16 bits"], found[name, ARMS[0]]) for name in SHAPES)


def test_a_conversation_keeps_what_is_computed(tmp_path: Path) -> None:
    out, model = tmp_path / "lines.jsonl", tiny_model_dir("gemma3", "fp32", tmp_path)
    settings = Settings.load({"model": str(model), "threads": 1, "hot_bytes": 16 << 20, "kv": "q4h"})
    assert run_windows(settings, WindowBench(1024, out=out), Console(quiet=True)) == 0
    found = lines_of(out)
    assert found["computed", ARMS[1]] < found["computed", ARMS[0]]
    assert found["on disk", ARMS[1]] >= found["computed", ARMS[1]], "records have headers"
    assert found["on disk", ARMS[1]] % 4096 == 0


def test_nothing_is_no_conversation() -> None:
    with pytest.raises(ConfigError, match="at least"):
        WindowBench(100)
