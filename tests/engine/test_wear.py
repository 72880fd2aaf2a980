"""Wear of the disk, seen through the engine: figures, and turns of a day whose budget of writes is used up."""

from __future__ import annotations

import logging

import pytest

from rekindle.engine.api import Engine
from rekindle.errors import ConfigError
from rekindle.store.maintenance import wear
from tests.engine.conftest import Start
from tests.engine.test_engine import SYSTEM, talk, user


@pytest.fixture
def days(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The day that it is."""
    today = [20_000]
    monkeypatch.setattr(wear, "day_of", lambda now: today[0])
    return today


def saved(engine: Engine, agent: str) -> int:
    engine.flush()
    return engine.agent(agent).info().saved_tokens


def test_a_turn_and_a_day_are_told_in_bytes(start: Start) -> None:
    engine = start()
    assert (told := engine.wear()) is not None and told.a_turn is None and told.a_day is None
    history = [SYSTEM]
    for text in ("Hello!", "How are you?"):
        talk(engine, "ada", history, text)
    engine.flush()
    stats, told = engine.stats().store, engine.wear()
    assert stats is not None and told is not None and told.a_turn is not None
    assert told.a_turn == (stats["bytes_written"] + stats["index_bytes_written"]) // 2 > 0
    assert told.today == 2 * told.a_turn + (stats["bytes_written"] + stats["index_bytes_written"]) % 2
    assert start(store="off").wear() is None


def test_turns_of_a_used_up_day_are_hot_and_saved_on_the_next(
    start: Start, days: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(disk_writes_a_day=120 * 12_288)
    assert engine.health().ok
    for number in range(80):
        talk(engine, f"full {number}", [user(f"Number {number} has a story to tell. " * 8)], "Hm?")
        engine.flush()
        if not engine.health().ok:
            break
    assert not engine.health().ok
    before = engine.stats().store
    history = [SYSTEM]
    with caplog.at_level(logging.WARNING):
        for text in ("Hello!", "How are you?", "And now?"):
            reply = talk(engine, "ada", history, text)
    assert reply.report.source == "own" and reply.report.hot_tokens >= 48, "it is hot all the same"
    assert saved(engine, "ada") == 0
    after = engine.stats().store
    assert before is not None and after is not None and after["blocks_postponed"] > 0
    assert (after["bytes_written"], after["index_bytes_written"]) == (
        before["bytes_written"],
        before["index_bytes_written"],
    )
    (problem,) = engine.health().problems
    assert "used up" in problem and "disk_writes_a_day" in problem
    assert caplog.text.count("are used up") == 1
    engine.agent("full 0").delete()
    engine.check()
    days[0] += 1
    assert engine.health().ok
    talk(engine, "ada", history, "Good morning!")
    info = engine.agent("ada").info()
    assert saved(engine, "ada") == info.num_tokens, "the turns of the day before are saved with the next"
    engine.check()
    engine.close()
    engine = start()
    assert talk(engine, "ada", history, "Still there?").report.warm_tokens > 0


def test_a_budget_below_a_block_is_refused(start: Start) -> None:
    with pytest.raises(ConfigError, match="disk_writes_a_day=100 holds less than one block"):
        start(disk_writes_a_day=100)
