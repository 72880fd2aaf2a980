"""Where two versions of a system text part, if a heading can name the place."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.text.messages import Message
from rekindle.text.normalise import normalise
from rekindle.text.tails import LONGEST_LABEL, changing_tail, volatile_spans

RULES = "You are kind.\n# Rules\n- Be brief: always.\n- Never lie.\n\n"


@pytest.mark.parametrize(
    ("before", "now", "heading"),
    [
        ("Build: 17\nHost: a", "Build: 18\nHost: a", "Build:"),
        ("Build: 17\nHost: a", "Build: 17\nHost: b", "Host:"),
        ("  - Working directory: /a", "  - Working directory: /b", "- Working directory:"),
        ("branch=main", "branch=dev", "branch="),
        ("Status:\n?? a\n?? b", "Status:\n?? a\n?? c", "Status:"),
        ("Status:\n?? a", "Status:\n?? a\n?? b", "Status:"),
        ("## Files\na.py", "## Files\nb.py", "## Files"),
        ("<files>\na.py\n</files>", "<files>\nb.py\n</files>", "<files>"),
        ("Files, of this project:\na.py", "Files, of this project:\nb.py", "Files"),
        # Inside a sentence, without a title in the section, or without a place of its own:
        ("You work in /a", "You work in /b", None),
        ("Files:\nYou work in /a", "Files:\nYou work in /b", None),
        (f"{'A long note' * 4}: x", f"{'A long note' * 4}: y", None),
        ("Names\na.py", "Names\nb.py", None),
        ("Status:\n\n?? a", "Status:\n\n?? b", None),
        ("Never lie: a\n- Never lie: b", "Never lie: a\n- Never lie: c", "- Never lie:"),
        ("Host: a\nHost: b", "Host: a\nHost: c", None),
        ("Build 17", "Built 18", None),
    ],
)  # fmt: skip
def test_a_heading_names_the_place(before: str, now: str, heading: str | None) -> None:
    found = changing_tail(RULES + before, RULES + now)
    assert (found and found.heading) == heading


def test_most_of_a_text_is_no_tail() -> None:
    assert changing_tail(f"You help.\nBuild: 1\n{RULES}", f"You help.\nBuild: 2\n{RULES}") is None
    assert changing_tail(f"Build: 1\n{RULES}", f"Build: 2\n{RULES}") is None
    assert changing_tail(RULES, RULES) is None


PARTS = [
    *("gitStatus:", '<context name="gitStatus">', "</context>", "Git snapshot at conversation start.", "\n```text"),
    *("Here is ", "some ", "useful information about the environment", "\n<env>", "</env>", "\n```", "```text\n"),
    *("\n", "\n\n", " ", "words", "Build: 1", "Host"),
]
KNOWN = [
    (r"^gitStatus:", None),
    (r'^<context name="gitStatus">', "</context>"),
    (r"^Git snapshot at conversation start\.[^\n]*\n```text$", "\n```"),
    (r"^Here is (?:some )?useful information about the environment[^\n]*\n<env>", "</env>"),
]


@settings(max_examples=500, deadline=None)
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=14),
    headings=st.lists(st.sampled_from(["Build:", "Host", "words", "", "a b"]), max_size=2),
)
def test_changing_parts_are_what_their_patterns_find(parts: list[str], headings: list[str]) -> None:
    content = "".join(parts)
    found: list[tuple[int, int]] = []
    for pattern, end in (*KNOWN, *((rf"^[ \t]*{re.escape(heading)}", None) for heading in headings)):
        at = 0
        while (begun := re.compile(pattern, re.MULTILINE).search(content, at)) is not None:
            stop = len(content) if end is None else content.find(end, begun.end())
            if stop < 0:
                break
            at = stop + len(end or "")
            found.append((begun.start(), at))
            if end is None:
                break
    spans: list[tuple[int, int]] = []
    for start, stop in sorted(found):
        if not spans or start >= spans[-1][1]:
            spans.append((start, stop))
    assert volatile_spans(content, headings) == spans


def test_lines_are_counted_from_one() -> None:
    found = changing_tail(f"{RULES}Build: 1", f"{RULES}Build: 2")
    assert found is not None and found.line_in(f"{RULES}Build: 2") == 6
    assert found.line_in(RULES) is None


def test_a_heading_moves_all_from_its_line_on() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    sent = [Message("system", f"{RULES} Build: 1\n<env>x</env>\ngitStatus: clean"), Message("user", "Hi")]
    found = normalise(sent, tools, {"tail"}, headings=("Host:", "Build:"))
    assert found.messages[0].content == RULES
    assert found.messages[1].content == "Build: 1\n<env>x</env>\ngitStatus: clean\n\nHi"
    assert normalise(sent, tools, {"tail"}).messages[1].content == "gitStatus: clean\n\nHi"
    assert volatile_spans("See Build: below.", ("Build:",)) == []


LINES = st.lists(st.sampled_from(["", "Build: 1", "Build: 2", "# Rules", "- a", "- b", "Host: a, b", "words"]))


@given(LINES, LINES, LINES)
def test_what_parts_comes_after_the_heading(head: list[str], one: list[str], other: list[str]) -> None:
    before, now = ("\n".join([*head, *rest]) for rest in (one, other))
    found = changing_tail(before, now)
    if found is not None:
        spans = [volatile_spans(text, (found.heading,)) for text in (before, now)]
        ((start, end),), ((other_start, _),) = spans
        assert start == other_start and before[:start] == now[:start] and end == len(before)
        assert len(found.heading) <= max(LONGEST_LABEL, 60) and "," not in found.heading
