"""A client that keeps changing its system text from one line on is offered the setting that moves it; it works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rekindle import Engine
from rekindle.engine.memory.system_texts import MOST_CHARS, MOST_CLIENTS, MOST_TEXTS, SystemTexts
from rekindle.engine.types import Report
from rekindle.matching.explain import Offer
from tests.engine.rewriting import with_template
from tests.engine.test_clients_habits import TOOLS, WORDS, ask, engine_of, user
from tests.server.scripted import TEMPLATE, write_scripted_model

TOOLS_FIRST = f"{{% if tools %}}{{{{ tools | tojson }}}}{{% endif %}}{TEMPLATE}".replace("loop.first and tools", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("scripted") / "model")


def began(engine: Engine, agent: str | None, build: int, *, rules: str = WORDS * 3, tools: Any = TOOLS) -> Report:
    """A new conversation of a client whose system text ends with its build."""
    system = {"role": "system", "content": f"Rules\n{rules}\nBuild: {build}\nHost: a"}
    return ask(engine, system, user(f"talk of lamp {build}"), agent=agent, tools=tools).report


def offer_of(report: Report) -> Offer | None:
    return report.explanation.offer if report.explanation is not None else None


NAMES = (["ada"] * 4, ["ada", "bob", "eve", "dan"], [None] * 4)
CLIENTS = [[*TOOLS, {"type": "function", "function": {"name": name}}] for name in ("one", "two", "three")]


def test_it_is_offered_when_the_same_line_changes_twice_and_then_costs_no_tools(model: Path, tmp_path: Path) -> None:
    """For an agent, for several of one client, and for conversations without a name."""
    with engine_of(model, tmp_path / "one") as engine:
        for at, (names, tools) in enumerate(zip(NAMES, CLIENTS, strict=True)):
            reports = [began(engine, name, build, tools=tools) for build, name in enumerate(names, 10 * at)]
            assert [offer_of(report) for report in reports[:2]] == [None, None], "once may be an edit"
            for report in reports[2:]:
                offer = offer_of(report)
                assert offer is not None and "from line 3 on" in offer.reason
                assert (offer.setting, offer.value) == ("tail_heading", "Build:")
                assert report.reused_tokens < 0.5 * report.prompt_tokens
    with engine_of(model, tmp_path / "two", tail_heading="Build:") as engine:
        for at, (names, tools) in enumerate(zip(NAMES, CLIENTS, strict=True)):
            reports = [began(engine, name, build, tools=tools) for build, name in enumerate(names, 10 * at)]
            assert [offer_of(report) for report in reports] == [None] * 4, "it has moved"
            for report in reports[1:]:
                assert report.reused_tokens > 0.8 * report.prompt_tokens
                assert [each.kind for each in report.normalised] == ["tail"]


def test_nothing_is_offered_where_nothing_would_be_won(model: Path, tmp_path: Path) -> None:
    with engine_of(model, tmp_path / "store") as engine:
        for number in range(4):
            assert offer_of(began(engine, "without tools", number, tools=None)) is None
            assert offer_of(began(engine, "edited", 0, rules=f"{WORDS}{number}{WORDS}")) is None
            assert offer_of(began(engine, "same", 0, tools=TOOLS[:1])) is None
    first = with_template(model, TOOLS_FIRST, tmp_path / "first")
    for directory, options in ((first, {}), (model, {"normalise": "off"})):
        with engine_of(directory, tmp_path / "other", **options) as engine:
            offers = [offer_of(began(engine, "ada", number)) for number in range(4)]
            assert offers == [None] * 4, (directory.name, options)


def test_texts_are_kept_by_client_within_bounds_and_forgotten_with_their_agent() -> None:
    texts = SystemTexts()

    def put(number: int, agent: str = "ada", client: str = "look", namespace: str = "a") -> bool:
        texts.check()
        return texts.put(namespace, client, agent, f"{WORDS}\n{WORDS}\nBuild: {number}") is not None

    assert [put(1), put(2), put(1, client="add"), put(2, namespace="b")] == [False] * 4
    assert [put(2), put(3), put(3)] == [False, True, False], "the same text again is no change"
    texts.drop("a", "eve")
    assert put(4, agent="bob")
    texts.drop("a", "bob")
    assert not put(5), "nothing is left to compare with"
    assert not put(8, agent="bob") and put(9, agent="eve")
    texts.drop("a", "bob")
    assert not put(10, agent="eve"), "with its texts, what they showed is forgotten"
    for number in range(3 * MOST_TEXTS):
        texts.put("a", "look", "ada", f"A text of its own, number {number}.")
    for number in range(2 * MOST_CLIENTS):
        assert not put(number, client=f"client {number}")
    assert not put(6), "the oldest client is forgotten"
    assert texts.put("a", "look", "ada", "x" * (MOST_CHARS + 1)) is None
    texts.check()
