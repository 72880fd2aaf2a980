"""`python -m benchmarks wear`: the same program, briefly."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from benchmarks.wear import ARMS, MEASURES, WearBench, run_wear
from rekindle.config import Settings


def test_prompts_seen_once_write_less_and_conversations_the_same(tmp_path: Path) -> None:
    out = tmp_path / "wear.jsonl"
    settings = Settings.load({"hot_bytes": "64MiB", "threads": 1})
    assert run_wear(settings, WearBench(6, 1, 3, 120, 0, out), Console(quiet=True)) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    found = {(line["arm"], line["measure"]): line["median"] for line in lines}
    assert found.keys() == {(arm, measure) for arm in ARMS for measure in MEASURES}
    once, once_index, talks, talks_index = MEASURES
    assert found["reused", once] < found["always", once] / 2
    assert found["reused", talks] < 1.5 * found["agents", talks]
    for arm in ARMS:
        assert 0 < found[arm, once_index] <= found[arm, once] and 0 < found[arm, talks_index] <= found[arm, talks]
