"""What was taken out of a prompt is told with what it would have cost, and why a prompt was computed again."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.engine.api import Engine
from rekindle.engine.types import GenerationRequest, Report
from rekindle.model.params import SamplingParams
from rekindle.text.messages import Message
from tests.engine.conftest import Start

SYSTEM = "You are a careful assistant. Answer in one short sentence, and remember what you are told. " * 2
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def signed(sign: str, *, day: str = "") -> Message:
    head = f"x-anthropic-billing-header: cc_version=2.1.177.{sign}; cc_entrypoint=cli; cch=00{sign};"
    return Message("system", f"{head}\n{SYSTEM}{day}")


def ask(engine: Engine, *messages: Message, agent: str | None = "ada", **options: Any) -> Report:
    asked = GenerationRequest(messages=messages, agent=agent, params=GREEDY, **options)
    return engine.submit(asked).result().report


def test_a_line_that_changes_costs_nothing_and_says_what_it_would_have(start: Start) -> None:
    engine = start()
    first = ask(engine, signed("a1b"), Message("user", "Hello!"))
    (line,) = first.normalised
    assert (line.kind, line.message_index, line.tokens) == ("attribution", 0, 0)
    assert line.text.startswith("x-anthropic-billing-header: cc_version=2.1.177.a1b")
    again = ask(engine, signed("c2d"), Message("user", "Hello!"))
    assert (again.outcome, again.computed_tokens) == ("exact", 1)
    (line,) = again.normalised
    head = len(engine.encoder.encode(engine.render(GenerationRequest(text="<|im_start|>system\n"))))
    assert line.tokens == again.reused_tokens - head
    same = ask(engine, signed("c2d"), Message("user", "Hello!"))
    assert same.normalised[0].tokens == 0
    assert ask(engine, signed("e3f"), Message("user", "Hello!"), reuse="off").normalised[0].tokens == 0


def test_unnamed_conversations_are_compared_with_themselves(start: Start) -> None:
    engine = start()
    ask(engine, signed("a1b"), Message("user", "Hello!"), agent=None)
    again = ask(engine, signed("c2d"), Message("user", "Hello!"), agent=None)
    assert again.normalised[0].tokens > 0


def test_switched_off_the_line_is_named_as_the_cause(start: Start) -> None:
    engine = start(normalise="off")
    ask(engine, signed("a1b"), Message("user", "Hello!"))
    again = ask(engine, signed("c2d"), Message("user", "Hello!"))
    assert again.normalised == ()
    assert again.explanation is not None
    assert (again.explanation.cause, again.explanation.message_index) == ("attribution_header", 0)
    assert "stored tokens after it are recomputed" in again.explanation.detail


def test_dates_and_tools_are_put_in_order_where_that_is_asked_for(start: Start) -> None:
    tools = [{"type": "function", "function": {"name": name, "description": "It does."}} for name in ("look", "ask")]
    engine = start(normalise="attribution,dates,tools")
    ask(engine, signed("a", day="\nToday's date: 2026-11-20"), Message("user", "Hello!"), tools=tools)
    again = ask(engine, signed("a", day="\nToday's date: 2026-11-21"), Message("user", "Hello!"), tools=tools[::-1])
    assert again.outcome == "exact"
    told = {line.kind: line for line in again.normalised}
    assert set(told) == {"attribution", "dates"}, "these tools stand in order already"
    assert (told["attribution"].tokens, told["dates"].text) == (0, "Today's date: 2026-11-21")
    assert 0 < told["dates"].tokens < again.reused_tokens
    mixed = ask(engine, signed("a", day="\nToday's date: 2026-11-21"), Message("user", "Hello!"), tools=tools)
    (line,) = [line for line in mixed.normalised if line.kind == "tools"]
    assert (line.message_index, line.text) == (None, "look, ask")


@pytest.mark.parametrize("normalise", ["off", "attribution"])
def test_a_message_that_is_gone_keeps_the_numbers_of_the_others(start: Start, normalise: str) -> None:
    engine = start(normalise=normalise)
    line = Message("system", signed("a1b").content.split("\n")[0])
    ask(engine, line, Message("system", SYSTEM), Message("user", "Remember the red box."))
    again = ask(engine, line, Message("system", SYSTEM), Message("user", "Remember the blue box."))
    assert again.explanation is not None
    assert again.explanation.message_index == 2
    assert "message 2" in again.explanation.detail
