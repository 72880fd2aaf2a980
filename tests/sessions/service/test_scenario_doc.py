"""What docs/scenarios.md says is so: its examples are played."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle import Engine
from rekindle.config import Settings
from rekindle_sessions.scenes import scenario
from tests.sessions.service.test_scenario_play import kinds, played

DOC = (Path(__file__).parents[3] / "docs" / "scenarios.md").read_text()


PARTY, DEBATE = re.findall(r"^```yaml\n(.*?)^```", DOC, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(Settings.load({"store": "off", "threads": 1, "hot_bytes": "64MiB"})) as started:
        yield started


def test_the_party_is_played(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "party.yaml"
    path.write_text(PARTY)
    scene = scenario.load(path, {"place": "harbour"})
    events, said, play, heard = played(engine, scene)
    assert [data["name"] for data in kinds(events, "phase")] == ["in the kitchen", "at the table", "vote", "guess"]
    assert "The copper key is in the harbour." in [each.text for each in heard["Otto"]]
    assert "Mira, Otto, Petra, where is the copper key?" in [each.text for each in said]
    assert sum(play.story.scores.values()) == 2
    ((_, points),) = [data["verdicts"] for data in kinds(events, "outcome")]
    scores = play.story.values()["scores"]
    assert points["text"] == f"Mira {scores['Mira']}, Otto {scores['Otto']}."


def test_the_debate_is_played(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "my-debate.yaml"
    path.write_text(DEBATE)
    scene = scenario.load(path, {"topic": "Shall we move?"})
    events, said, play, heard = played(engine, scene)
    turns = kinds(events, "turn_complete")
    spoke = [turn["speaker"] for turn in turns if turn["purpose"] == "speak"]
    assert spoke == ["Selma", "Viktor", "Viktor", "Selma", "Viktor", "Selma", "Viktor", "Selma"]
    assert sorted(turn["speaker"] for turn in turns if turn["purpose"] == "ballot") == ["Ines", "Jonas", "Kira"]
    assert {by: sum(each.by == by for each in heard["Kira"]) for by in ("Selma", "Viktor", "Ines")} == {
        "Selma": 4,
        "Viktor": 4,
        "Ines": 0,
    }
    assert "Make your case: Shall we move?" in [each.text for each in said]
    assert set(play.story.values()["decisions"]["verdict"]["tally"]) == {"yes", "no"}
    ((verdict,),) = [data["verdicts"] for data in kinds(events, "outcome")]
    assert verdict["text"]
