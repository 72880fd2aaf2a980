"""Turns of agents of a model with windows: what they share and take back is there after a restart, too."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.engine.api import Engine
from tests.engine.turns import asked, purged, with_template
from tests.tiny_models import WINDOW, tiny_model_dir

Start = Callable[..., Engine]
SIZE = 16


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(tiny_model_dir("gemma3", "fp32", tmp_path_factory.mktemp("gemma")))


def test_agents_share_their_system_text_after_a_restart(start: Start, gemma: Path) -> None:
    engine = start(gemma)
    first = asked(engine, "ada", "What is on the table? " * 8)
    engine.flush()
    engine = start(gemma)
    second = asked(engine, "bob", "Where does the river end?")
    assert second.warm_tokens > 0 and second.source == "shared"
    assert second.prompt_tokens - 40 < second.reused_tokens < first.prompt_tokens - 40
    third = asked(engine, "cyd", "Where does the river end?")
    assert third.reused_tokens == third.prompt_tokens - 1, "its last token runs again"


def test_a_prompt_that_parts_where_windows_have_ended_says_where_it_resumed(start: Start, gemma: Path) -> None:
    engine = start(gemma)
    asked(engine, "ada", "What is on the table? " * 12)
    engine.flush()
    engine = start(gemma)
    report = asked(engine, "ada", "What is on the table? " * 4 + "And in the river?")
    assert report.outcome == "diverge" and report.explanation is not None
    assert report.explanation.cause == "text_differs"
    said = re.search(r"; matched (\d+) tokens, resumed at (\d+)$", report.explanation.detail)
    assert said is not None, report.explanation.detail
    matched, resumed = map(int, said.groups())
    assert resumed == report.reused_tokens
    assert matched - resumed > WINDOW, "the last resume point is the end of the system text"
    again = asked(engine, "ada", "What is on the table? " * 4 + "And in the house?")
    assert again.reused_tokens > matched, "prompts have parted there before"


def test_a_fork_and_a_rewound_agent_go_on_after_a_restart(start: Start, gemma: Path) -> None:
    engine = start(gemma)
    first = asked(engine, "ada", "Hello " * 20)
    engine.flush()
    asked(engine, "ada", "Hello " * 20, "Yes.", "And then?")
    engine.flush()
    engine.agent("ada").fork("eve")
    engine.agent("ada").rewind(1)
    engine.flush()
    engine = start(gemma)
    eve = asked(engine, "eve", "Hello " * 20, "Yes.", "And then?")
    assert eve.computed_tokens == 1 and eve.warm_tokens > first.prompt_tokens
    ada = asked(engine, "ada", "Hello " * 20)
    assert ada.reused_tokens > 0
    engine.components.loop.call(lambda core: core.check()).result()
    assert engine.components.store is not None
    engine.components.store.check("records")


@pytest.mark.parametrize("how", ["offload", "delete"])
def test_an_agent_that_leaves_memory_leaves_no_window_behind(start: Start, gemma: Path, how: str) -> None:
    engine = start(gemma)
    report = asked(engine, "ada", "Hello " * 20)
    engine.flush()
    if how == "offload":
        engine.agent("ada").offload()
        again = asked(engine, "ada", "Hello " * 20)
        assert again.warm_tokens == report.prompt_tokens - 1
    else:
        engine.agent("ada").delete()
        assert engine.components.store is not None
        assert engine.components.store.flush(10)
        with engine.components.store.index.reading() as connection:
            assert connection.execute("SELECT COUNT(*) FROM block").fetchone() == (0,)
            assert connection.execute("SELECT COUNT(*) FROM cover").fetchone() == (0,)
    engine.components.loop.call(lambda core: core.check()).result()


def test_no_window_of_a_purged_agent_is_left(start: Start, gemma: Path, tmp_path: Path) -> None:
    assert purged(start(gemma), tmp_path, least=1000).computed_tokens == 1
