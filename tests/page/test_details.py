"""What a page that is left open costs the engine: few questions, and none where nothing changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle import Engine
from rekindle.config import Settings
from rekindle.server.page.page import LOOK_S, Details
from tests.proofs import proved

NAMES = ("ada", "bo", "cy")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with proved(Engine(Settings.load({"store": tmp_path, "threads": 1, "hot_bytes": "64MiB"}))) as engine:
        for name in NAMES:
            say(engine, name, "The copper key is in the attic.")
        engine.flush()
        yield engine


def say(engine: Engine, name: str, text: str) -> None:
    engine.chat(name, [{"role": "user", "content": text * 10}], temperature=0, max_tokens=2)


def known(details: Details, engine: Engine) -> set[str]:
    """The agents of which branches are known by now."""
    found = details.of("default", engine.agents("default"))
    assert {info.agent for info in found} == set(NAMES)
    return {info.agent for info in found if info.branch_infos}


def test_all_are_told_at_once_where_there_is_time(engine: Engine) -> None:
    found = Details(engine, clock=lambda: 0.0).of("default", engine.agents("default"))
    assert found == [engine.agent(info.agent).info() for info in found]


def test_a_busy_engine_is_asked_for_one_at_a_time(engine: Engine) -> None:
    details = Details(engine, clock=itertools.count(step=2 * LOOK_S).__next__)
    assert [len(known(details, engine)) for _ in range(4)] == [1, 2, 3, 3]


def test_who_changed_comes_first_and_then_those_beside(engine: Engine) -> None:
    slow = Details(engine, clock=itertools.count(step=2 * LOOK_S).__next__)
    for _ in NAMES:
        known(slow, engine)
    say(engine, "bo", "Mira owns the silver bell.")
    engine.flush()
    infos = engine.agents("default")
    (bo,) = [info for info in slow.of("default", infos) if info.agent == "bo"]
    assert len(bo.branch_infos) == 2
    for _ in NAMES:
        slow.of("default", infos)
    assert slow.of("default", infos) == [engine.agent(info.agent).info() for info in infos]


def test_who_is_gone_is_forgotten(engine: Engine) -> None:
    details = Details(engine, clock=lambda: 0.0)
    infos = engine.agents("default")
    details.of("default", infos)
    engine.agent("ada").delete()
    assert [info.branch_infos for info in Details(engine).of("default", infos) if info.agent == "ada"] == [()]
    assert "ada" not in {info.agent for info in details.of("default", engine.agents("default"))}
