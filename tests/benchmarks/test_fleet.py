"""A small fleet through little memory and less disk, and a small store restarted: the same programs, sizes for CI."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.fleet import FleetBench, run_fleet
from benchmarks.restart import RestartBench, run_restart
from rekindle.config import Settings
from rekindle.errors import ConfigError
from rekindle.text.prompt import PromptEncoder
from rekindle_lab.bench.distinct import Distinct
from rekindle_pocket import MODEL_DIR


def lines(path: Path) -> dict[str, float]:
    return {line["measure"]: line["median"] for line in map(json.loads, path.read_text().splitlines())}


def test_a_fleet_is_served_within_its_budgets_and_the_right_agents_are_warm(tmp_path: Path) -> None:
    out = tmp_path / "fleet.jsonl"
    options = FleetBench(agents=40, tokens=150, hot_agents=3, disk_agents=20, sample=5, out=out)
    assert run_fleet(Settings.load({"threads": 1}), options, Console(quiet=True)) == 0
    found = lines(out)
    checks = [name for name in found if name.endswith(("refused", "hot", "warm", "cold", "off", "allocated)"))]
    assert len(checks) == 7 and all(found[name] == 1 for name in checks)
    assert "fleet: 0 requests or blocks were refused" in found


@pytest.mark.long
def test_a_filled_store_is_restarted_used_again_and_warm(tmp_path: Path) -> None:
    out, settings = tmp_path / "restart.jsonl", Settings.load({"threads": 1})
    options = RestartBench(agents=(12,), tokens=150, repeats=1, keep=tmp_path, out=out)
    assert run_restart(settings, options, Console(quiet=True)) == 0
    found = lines(out)
    phases = ("weights loaded", "store opened", "agents known", "serving", "first warm token")
    for state in ("cached", "dropped"):
        seconds = [found[f"restart: {phase}, 12 agents, {state}"] for phase in phases]
        assert seconds == sorted(seconds) and seconds[0] > 0
        assert found[f"restart: index_bytes, 12 agents, {state}"] > 0
    (mark,) = tmp_path.glob("*/filled.json")
    assert json.loads(mark.read_text())["agents"] == 12


def test_conversations_are_distinct_reproducible_and_of_the_wanted_length() -> None:
    encoder = PromptEncoder.from_dir(MODEL_DIR)
    for tokens in (150, 1000):
        texts, same = (Distinct(encoder, tokens=tokens, seed=3) for _ in range(2))
        drawn = [texts.messages(number) for number in range(8)]
        assert drawn == [same.messages(number) for number in range(8)]
        assert len({str(messages) for messages in drawn}) == 8
        assert all(0.8 * tokens <= texts.count(messages) <= tokens for messages in drawn)


def test_sizes_that_show_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="less than all"):
        FleetBench(agents=10, disk_agents=20)
    with pytest.raises(ConfigError, match="at least 100"):
        RestartBench(tokens=10)
