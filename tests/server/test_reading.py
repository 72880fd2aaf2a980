"""One choice as it is read: what the prompt has begun, what ends it, and which of its tokens were thoughts."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.engine.generation import Generation
from rekindle.engine.types import Delta
from rekindle.server.answers.choice import Choice, ReplyParser
from rekindle.text.replies import ReplyFormat, ThinkingFormat
from rekindle.text.replies.envelope import EnvelopeForm
from tests.server.test_log import report

FORM = ReplyFormat(thinking=ThinkingFormat("<think>", "</think>", "\n", "\n", "\n\n"), tools=EnvelopeForm())
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'


def read(*texts: str, opening: str = "", reason: Any = "stop", **options: Any) -> ReplyParser:
    generation = Generation()
    reading = ReplyParser(Choice(0, generation), FORM, **{"tools": True, **options})
    generation.opening = opening  # the engine sets it before the first delta
    for number, text in enumerate(texts):
        reading.take(Delta(text, (number,)))
    if reason is not None:
        reading.take(Delta("", (), reason, report(10, 0, 0, 1.0)))
    return reading


def calls(reading: ReplyParser) -> list[tuple[str, str, bool]]:
    return [(call.name, call.arguments, call.whole) for call in reading.parsed.calls]


def test_a_thought_the_prompt_has_opened_is_a_thought() -> None:
    reading = read("Hm", "m.\n</th", "ink>\n\nYes.", opening="<think>\n")
    assert (reading.parsed.reasoning, reading.parsed.text) == ("Hmm.", "Yes.")
    assert read("Hm", "m.").parsed.text == "Hmm."


def test_a_call_the_prompt_has_begun_is_told_and_ends_where_it_ends() -> None:
    reading = read(' {"a"', ": 1}}\n</tool", "_call>", "more", opening=FORM.opening("look"), parallel=False)
    assert calls(reading) == [("look", '{"a": 1}', True)]
    assert (reading.has_ended, reading.reason, reading.parsed.text) == (True, "tool_calls", "")


@pytest.mark.parametrize(
    ("text", "ended", "reason"),
    [
        (CALL, "stop", "tool_calls"),
        (CALL, "length", "length"),
        (CALL, "cancelled", "cancelled"),
        (CALL[:45], "stop", "stop"),
        ("Yes.", "stop", "stop"),
        (CALL, None, None),
    ],
)
def test_why_a_reply_ended(text: str, ended: Any, reason: str | None) -> None:
    assert read(text, reason=ended).reason == reason


def test_without_tools_a_call_is_text() -> None:
    reading = read(CALL, tools=False)
    assert (calls(reading), reading.parsed.text, reading.reason) == ([], CALL, "stop")


def test_the_only_call_that_is_wanted_ends_the_reply_however_the_engine_ended() -> None:
    reading = read(CALL, CALL, parallel=False, reason="cancelled")
    assert (len(calls(reading)), reading.reason) == (1, "tool_calls")


def test_the_stop_string_is_known() -> None:
    reading = read("Yes.", reason=None)
    reading.take(Delta("", (), "stop", report(10, 0, 0, 1.0), stop_text="END"))
    assert reading.stop_text == "END"


@pytest.mark.parametrize(
    ("texts", "opening", "num_tokens"),
    [
        (["<think>", "\n", "Hm", "m.", "\n", "</think>", "\n\n", "Yes", "."], "", 7),
        (["<think>\nHmm.\n</think>\n\nYes."], "", 1),
        (["Hm", "m.", "\n</think>", "\n\n", "Yes", "."], "<think>\n", 4),
        (["<th", "ink>\n", "Hm", "", "m", "</th", "ink>", "Yes"], "", 7),
        (["<think>", "Hm", "m"], "", 3),
        (["Yes", "."], "", 0),
        (["<", "b>", "bold"], "", 0),
        ([CALL, "\n", CALL], "", 0),
        ([], "", 0),
    ],
)
def test_tokens_of_thoughts_are_counted_with_their_marks(texts: list[str], opening: str, num_tokens: int) -> None:
    assert read(*texts, opening=opening).num_reasoning_tokens == num_tokens
