"""A call in reasoning that was never closed is a call; one that closed reasoning mentions is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.text.replies import ParsedReply, ReplyFormat, ReplyStream, TextDelta, ThinkingFormat
from rekindle.text.replies.envelope import EnvelopeForm
from rekindle.text.replies.reader import CallMarks
from rekindle.text.replies.tagged import TaggedForm

MARKS = CallMarks("<tool_call>", "</tool_call>", "\n")
THINK = ThinkingFormat("<think>", "</think>", "\n", "\n", "\n\n")
HERMES, CODER = (ReplyFormat(THINK, form) for form in (EnvelopeForm(MARKS), TaggedForm(MARKS)))
CALLS = {
    "hermes": (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'),
    "coder": (CODER, "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"),
}


def read(form: ReplyFormat, text: str, size: int = 1000, *, parallel: bool = True) -> ParsedReply:
    stream, said = ReplyStream(form, tools=True, parallel=parallel), ParsedReply()
    raw = ""
    for event in [each for at in range(0, len(text), size) for each in stream.push(text[at : at + size])]:
        said.take(event)
        raw += event.raw
    for event in stream.finish():
        said.take(event)
        raw += event.raw
    assert raw == text or not parallel or form.one_call
    return said


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_call_that_nothing_follows_ends_reasoning(family: str, size: int) -> None:
    form, call = CALLS[family]
    for end in ("", "\n", f"\n{call}"):
        said = read(form, f"<think>\nHm, <tool_call> is how.\n{call}{end}", size)
        assert (said.reasoning, said.text) == ("Hm, <tool_call> is how.\n", "")
        assert [(each.name, each.whole) for each in said.calls] == [("f", True)] * (2 if "f" in end else 1)


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_call_that_reasoning_mentions_is_none(family: str, size: int) -> None:
    form, call = CALLS[family]
    for more in ("\n</think>\n\nDone.", " or so.\n</think>\n\nDone.", " and more"):
        said = read(form, f"<think>\nLike {call}{more}", size)
        assert (said.calls, said.text) == ([], "Done." if "Done" in more else "")
        assert said.reasoning == f"Like {call}{more}".partition("\n</think>")[0]
    assert not read(form, f"<think>\nHm.\n{call[: len(call) // 2]}", size).calls, "cut off before it was whole"
    cut = read(form, f"<think>\nHm.\n{call}\n{call[: len(call) // 2]}", size)
    assert (cut.reasoning, [each.whole for each in cut.calls][:1]) == ("Hm.\n", [True])
    said = read(form, f"<think>\nLike {call}.\n</think>\n\n{call}", size)
    assert (said.reasoning, len(said.calls)) == (f"Like {call}.", 1)


@pytest.mark.parametrize("family", CALLS)
def test_only_the_first_counts_where_one_is_allowed(family: str) -> None:
    form, call = CALLS[family]
    assert len(read(form, f"<think>\nHm.\n{call}\n{call}", parallel=False).calls) == 1
    assert len(read(replace(form, one_call=True), f"<think>\nHm.\n{call}\n{call}").calls) == 1


@given(
    st.lists(st.sampled_from(["<tool_call>", CALLS["hermes"][1], "</think>", "a", "\n", "{", "<", "</tool_call>"])),
    st.integers(1, 9),
)
def test_pieces_change_nothing_and_nothing_is_lost(parts: list[str], size: int) -> None:
    text = "<think>\n" + "".join(parts)
    one, other = read(HERMES, text), read(HERMES, text, size)
    calls = [[(each.name, each.arguments, each.whole) for each in said.calls] for said in (one, other)]
    assert (one.reasoning, one.text, calls[0]) == (other.reasoning, other.text, calls[1])


def test_reasoning_that_mentions_no_whole_call_streams_on() -> None:
    stream = ReplyStream(HERMES, tools=True)
    shown = "".join(event.raw for event in stream.push("<think>\nThe mark <tool_call> is followed by words, then"))
    assert shown.endswith("words, then")
    assert not any(isinstance(event, TextDelta) for event in stream.finish())
