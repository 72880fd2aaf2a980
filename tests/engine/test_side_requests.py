"""Side requests of a client under the name of its conversation: they neither push it out nor explain its misses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rekindle import Engine
from tests.engine.test_clients_habits import TOOLS, ask, engine_of, user
from tests.server.scripted import write_scripted_model

RULES = "You are an agent that works on code, with care and with tests.\nBe brief.\n"
SYSTEM = {"role": "system", "content": RULES * 2}
TITLE = {"role": "system", "content": "Write a title of a few words for this talk, without quotes. " * 2}
HELPER = {"role": "system", "content": "You help another agent to find a file, and change nothing. " * 2}

NEW = 40  # tokens of a turn's words, and more than that


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("scripted") / "model")


def said(engine: Engine, talk: list[dict[str, Any]], text: str) -> int:
    """A turn of a conversation, to which it is appended; how many tokens of it were computed."""
    talk.append(user(f"talk {text}"))
    result = ask(engine, *talk, tools=None)
    talk.append({"role": "assistant", "content": result.text})
    return result.report.computed_tokens


def test_a_conversation_its_forks_and_helpers_stay_among_ten_titles(model: Path, tmp_path: Path) -> None:
    with engine_of(model, tmp_path / "store", max_branches=4) as engine:
        talk, helper, forked = [SYSTEM], [HELPER], [SYSTEM]
        for turn in range(10):
            ask(engine, TITLE, user(f"talk of box {turn}"), tools=None)
            assert said(engine, talk, f"of box {turn}") < NEW or not turn, turn
            if turn == 1:
                forked = [*talk]
                said(engine, forked, "of the weather")
            if turn in (2, 3):
                said(engine, helper, "of the file")
        assert said(engine, forked, "of snow") < NEW
        assert said(engine, helper, "of the other file") < NEW
        assert said(engine, talk, "of nothing") < NEW
        engine.check()


def test_the_first_request_after_a_title_is_the_first_of_its_conversation(model: Path, tmp_path: Path) -> None:
    with engine_of(model, tmp_path / "store") as engine:
        ask(engine, TITLE, user("talk of a box"), tools=None)
        explanation = ask(engine, SYSTEM, user("talk of a box"), tools=TOOLS).report.explanation
        assert explanation is not None and (explanation.cause, explanation.message_index) == ("not_stored", 0)
        assert explanation.detail == "this is the first request of a conversation: the agent's others begin otherwise"
        assert explanation.stored is None, "what it is not compared with is not quoted"
        changed = {**SYSTEM, "content": f"Signed again.\n{SYSTEM['content']}"}
        explanation = ask(engine, changed, user("talk of a box"), tools=TOOLS).report.explanation
        assert explanation is not None and explanation.cause == "text_differs", "the rest is what it was"
        assert explanation.sent is not None and "Signed again" in explanation.sent
