"""docs/scenarios.md names every field of a scenario file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rekindle_sessions.machine.types import TOPOLOGIES
from rekindle_sessions.scenes import games, outcomes, phases, scenario

DOC = (Path(__file__).parents[2] / "docs" / "scenarios.md").read_text()


@pytest.mark.parametrize(
    "names",
    [
        scenario.FIELDS,
        scenario.AGENT_FIELDS,
        phases.FIELDS,
        phases.QUESTION_FIELDS,
        phases.MODES,
        games.FIELDS,
        outcomes.FIELDS,
        TOPOLOGIES,
        sorted(scenario.TAKEN),
        [path.stem for path in scenario.shipped()],
    ],
    ids=["file", "agent", "phase", "vote", "modes", "game", "rule", "topologies", "texts", "shipped"],
)
def test_every_name_is_told(names: list[str]) -> None:
    assert [name for name in names if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", DOC)] == []
