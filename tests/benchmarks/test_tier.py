"""`python -m benchmarks tier` and its relatives: the same programs, small."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.tier.agents import AgentsBench, run_agents
from benchmarks.tier.silence import ARMS, SilenceBench, run_silence
from rekindle.config import Settings
from rekindle.errors import ConfigError
from tests.server.scripted import write_scripted_model

CONSOLE = Console(quiet=True)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    model = write_scripted_model(tmp_path_factory.mktemp("scripted") / "model")
    return Settings.load({"model": str(model), "threads": 1, "hot_bytes": 8 << 20, "block_tokens": 16})


@pytest.mark.long
def test_agents_that_two_replicas_write_at_once_are_not_lost(settings: Settings, tmp_path: Path) -> None:
    assert run_agents(settings, AgentsBench(agents=20, out=tmp_path / "out"), CONSOLE) == 0
    lines = map(json.loads, (tmp_path / "out").read_text().splitlines())
    found = {line["measure"].removeprefix("tier-agents: "): line["median"] for line in lines}
    assert (found["agents"], found["conversations"], found["branches in heads"]) == (20, 30, 30)
    assert found["heads lost"] == 0 and found["block objects"] == found["distinct blocks"] > 100


def test_a_silent_tier_is_measured_beside_a_healthy_one(settings: Settings, tmp_path: Path) -> None:
    waiting = replace(settings, tier=replace(settings.tier, wait_s=0.2))
    assert run_silence(waiting, SilenceBench(tokens=400, repeats=1, out=tmp_path / "out"), CONSOLE) == 0
    lines = list(map(json.loads, (tmp_path / "out").read_text().splitlines()))
    assert [line["arm"] for line in lines[::3]] == list(ARMS)


def test_what_is_no_measurement_is_refused() -> None:
    for wrong in ({"repeats": 0}, {"tokens": 1}):
        with pytest.raises(ConfigError):
            SilenceBench(**wrong)
    with pytest.raises(ConfigError):
        AgentsBench(agents=0)
