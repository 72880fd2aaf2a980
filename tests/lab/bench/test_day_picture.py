"""The picture and the table of a replayed day, from recorded lines."""

from __future__ import annotations

import hashlib
import json
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.terminal_theme import TerminalTheme

from rekindle.server.dayfile import Day, DayEvent, Header, RecordedRequest
from rekindle_lab.bench.replay.client import Answer
from rekindle_lab.bench.replay.day import write_day
from rekindle_lab.bench.replay.replay import EventOutcome, Exchange, Replayed
from rekindle_lab.bench.replay.report import ColdCheck, measurements
from rekindle_lab.record import Origin, append_lines
from tools.day_picture import BOTTOM, LABEL, LEFT, RIGHT, TOP, read_plot, spread
from tools.demo_picture import THEMES
from tools.readme_tables import table

ARMS = {"ours": 0.5, "reuse off": 3.0, "peer, disk": 3.1, "peer <ram>": 1.25}
REQUESTS = tuple(
    RecordedRequest(at_s, {"messages": []}, None, session="s", agent=f"agent-{at_s > 500}", id=f"{at_s:g}")
    for at_s in (0.0, 300.0, 900.0, 1200.0)
)
EVENTS = (DayEvent(100.0, "pause", 100.0), DayEvent(850.0, "kill"), DayEvent(1100.0, "restart"))
DAY = Day(Header(0.0, about={"seed": 7, "scale": "small", "context": 4096, "midnight_s": 870.0}), REQUESTS, EVENTS)


def record(path: Path, arm: str, first_s: float, day_sha256: str) -> None:
    """What `rekindle bench replay --out` adds where every first token takes `first_s`."""
    usage = {"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": 600}}
    answer = Answer(token_s=(first_s,), usage=usage)
    exchanges = [Exchange(request, {}, answer, "kill" if request.at_s > 850 else None) for request in REQUESTS]
    outcomes = [EventOutcome(event, 2.5) for event in EVENTS]
    cold = ColdCheck(3, (), 0) if arm == "ours" else None
    settings = {"day_sha256": day_sha256, "about": dict(DAY.header.about), "speed": "100.0"}
    found = measurements(Replayed(tuple(exchanges), tuple(outcomes), 0, 0, 0, 9.0), arm, cold)
    append_lines(path, Origin.here("replay", settings), found)


@pytest.fixture(name="recorded")
def _recorded(tmp_path: Path) -> tuple[Path, Path]:
    """A day and the replays of four arms; one arm was replayed twice, and one on another day."""
    day, replay = tmp_path / "day.jsonl", tmp_path / "replay.jsonl"
    write_day(day, DAY)
    digest = hashlib.sha256(day.read_bytes()).hexdigest()[:16]
    record(replay, "ours", 77.0, digest)
    record(replay, "another", 1.0, "another day")
    for arm, first_s in ARMS.items():
        record(replay, arm, first_s, digest)
    return day, replay


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_every_arm_is_a_line_up_to_its_sum(recorded: tuple[Path, Path], theme: TerminalTheme) -> None:
    drawn = read_plot(*recorded).svg(theme)
    assert drawn == read_plot(*recorded).svg(theme)
    assert len(drawn.encode()) < 60_000
    picture = ElementTree.fromstring(drawn)
    paths = [found.attrib["d"] for found in picture.iterfind(".//{*}path")]
    assert len(paths) == 4
    for path, first_s in zip(paths, ARMS.values(), strict=True):
        heights = [float(height) for height in re.findall(r"V([\d.]+)", path)]
        assert heights == pytest.approx([BOTTOM - (BOTTOM - TOP) * n * first_s / 12.4 for n in (1, 2, 3, 4)], abs=0.1)
        numbers = [float(place) for place in re.findall(r"H([\d.]+)", path)]
        assert numbers[:-1] == pytest.approx([LEFT + (RIGHT - LEFT) * number / 4 for number in range(4)], abs=0.1)
    texts = [found.text for found in picture.iterfind(".//{*}text")]
    assert texts[-8:] == ["2 s", "ours", "12 s", "reuse off", "12.4 s", "peer, disk", "5 s", "peer <ram>"]
    assert "Seconds waited for first tokens, summed over a day of 4 requests by 2 agents" in texts
    places = {text.text: float(text.attrib["x"]) for text in picture.iterfind(".//{*}text")}
    assert places["pause"] < places["kill"] == places["midnight"] < places["restart"] < RIGHT


@pytest.mark.parametrize("heights", [[300.0, 84.0, 90.0, 100.0], [362.0] * 4, [84.0] * 4, [200.0, 100.0, 360.0, 350.0]])
def test_labels_do_not_overlap(heights: list[float]) -> None:
    placed = spread(heights)
    assert all(below - above >= LABEL for above, below in pairwise(sorted(placed)))
    assert max(placed) <= BOTTOM - LABEL / 2
    assert all(placed[a] <= placed[b] for a in range(4) for b in range(4) if heights[a] < heights[b])


def test_labels_with_room_stay_at_their_lines() -> None:
    assert spread([300.0, 100.0, 200.0]) == [300.0, 100.0, 200.0]


def test_the_table_has_the_sums_of_every_arm(recorded: tuple[Path, Path]) -> None:
    rows = table([json.loads(line) for line in recorded[1].read_text().splitlines() if "another" not in line])
    assert rows.splitlines()[0] == "| measure | ours | reuse off | peer, disk | peer <ram> |"
    assert "| first tokens, sum | 2 s | 12 s | 12.4 s | 5 s |" in rows
    assert "| first tokens, sum, 10 min after a kill | 1 s | 6 s | 6.2 s | 2.5 s |" in rows
    assert "| prompt tokens computed | 1,600 tokens | 1,600 tokens | 1,600 tokens | 1,600 tokens |" in rows
    assert "| replies unlike cold | 0 of 3 |  |  |  |" in rows
    assert "; seed 7, scale small, context 4096, speed 100.0; " in rows
    assert "whole replay" not in rows
