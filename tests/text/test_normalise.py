"""What clients change on every call is taken out, exactly that, and places in what is left are known."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.text.messages import Message
from rekindle.text.normalise import ATTRIBUTION as HEADER
from rekindle.text.normalise import Normal, attribution_end, normalise, without_dates
from rekindle.text.places import Place
from rekindle.text.tails import as_begun
from tests.text.factories import texts

SIGNED = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;"
ATTRIBUTION = frozenset(["attribution"])
DATES = frozenset(["dates"])
TOOLS = frozenset(["tools"])
USER = Message("user", "Hi")


def system(content: str, kinds: frozenset[str] = ATTRIBUTION) -> Normal:
    return normalise([Message("system", content), USER], None, kinds)


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (f"{SIGNED}\nYou are kind.", "You are kind."),
        (f"{SIGNED}\n\nYou are kind.", "You are kind."),
        (f"{SIGNED}You are kind.", "You are kind."),
        (f"{SIGNED[:-1]}\nYou are kind.", "You are kind."),
        (f"You are kind.\n{SIGNED}\nAnd brief.", "You are kind.\nAnd brief."),
        (f"  {SIGNED}  \nYou; are kind.", "You; are kind."),
        ("x-anthropic-billing-header: something new\nYou are kind.", "You are kind."),
    ],
)
def test_the_attribution_line_goes(content: str, left: str) -> None:
    found = system(content)
    assert found.messages == (Message("system", left), USER)
    (removed,) = found.removed
    assert (removed.kind, removed.message_index) == ("attribution", 0)
    assert removed.text.startswith("x-anthropic-billing-header:")


@pytest.mark.parametrize(
    "content",
    [
        "You are kind.",
        f"Clients send `{SIGNED}` at the head.",
        "You are kind.\nx-anthropic-billing-header: is a line that clients send.",
    ],
)
def test_what_only_speaks_of_it_stays(content: str) -> None:
    found = system(content)
    assert (found.messages, found.removed) == ((Message("system", content), USER), ())


def test_nobody_elses_words_are_touched() -> None:
    messages = (Message("system", "Be kind."), Message("user", SIGNED), Message("assistant", SIGNED))
    assert normalise(messages, None, ATTRIBUTION) == Normal(messages, None)
    assert normalise([Message("system", SIGNED), USER], None, frozenset()).removed == ()


def test_lines_that_differ_leave_the_same_text_and_tell_themselves_apart() -> None:
    one, other = (system(f"{SIGNED.replace('36ee5', sign)}\nYou are kind.") for sign in ("36ee5", "0aaa9"))
    assert one.messages == other.messages
    assert one.removed[0].digest != other.removed[0].digest
    assert one.removed[0].digest == system(f"{SIGNED}\nSomething else.").removed[0].digest


def test_a_message_of_nothing_else_goes_and_the_others_keep_their_names() -> None:
    messages = [Message("system", SIGNED), Message("system", "Be kind."), USER]
    found = normalise(messages, None, ATTRIBUTION)
    assert found.messages == tuple(messages[1:])
    assert [message.content for message in found.as_sent] == ["", "Be kind.", "Hi"]
    assert found.place(Place(1, 3)) == Place(0, 3)
    assert found.place(Place(0, None)) == Place(None, None)
    assert found.removed[0].place == Place(0, 0)


def test_places_move_with_the_text() -> None:
    found = system(f"{SIGNED}\nYou are kind.")
    assert found.place(Place(0, len(SIGNED) + 1 + 3)) == Place(0, 3)
    assert found.place(Place(0, 5)) == Place(0, 0)
    assert found.place(Place(0, None)) == Place(0, None)
    assert found.place(Place(1, 1)) == Place(1, 1)
    assert found.place(Place(None, None)) == Place(None, None)


@pytest.mark.parametrize(
    "line",
    [
        "Today's date is 2026-11-20.",
        "Today’s date: Fri Nov 20 2026",
        "  Today's date: Fri Nov 20 2026",
        "- Current date: November 20, 2026",
        "Current time: 2026-11-20T10:30:12Z",
        "Current date and time: 11/20/2026, 3:04:05 PM (Europe/Berlin, UTC+1:00)",
        "The current date is Friday, 20 November 2026.",
        "currentDate: 2026/11/20",
        "Today is Monday, 6 May 2024.",
        "It is 2026-11-20 10:30:12 UTC.",
        "<date>2026-11-20</date> today",
        "**Now:** 10:30",
    ],
)
def test_lines_that_say_the_date_go(line: str) -> None:
    found = system(f"You are kind.\n{line}\nBe brief.", DATES)
    assert found.messages[0].content == "You are kind.\nBe brief."
    assert [(removed.kind, removed.text) for removed in found.removed] == [("dates", line.strip())]


@pytest.mark.parametrize(
    "line",
    [
        "Knowledge cutoff: 2024-06",
        "The release of 2024-05-06 broke the date parser.",
        "Say today's date when you are asked.",
        "Today we ship on 2024-05-06.",
        "2024-05-06",
        "version 1.2.3 of 20 Nov",
        "Meetings: Mon 10:00",
    ],
)
def test_lines_that_say_more_stay(line: str) -> None:
    assert system(f"You are kind.\n{line}\nBe brief.", DATES).removed == ()


def test_a_date_under_its_heading_and_in_what_a_client_adds() -> None:
    content = (
        "Hi!\n<system-reminder>\n# currentDate\n2026-11-20\nBe kind.\n</system-reminder>\nToday's date is 2026-11-20."
    )
    (message,) = normalise([Message("user", content)], None, DATES).messages
    assert "2026-11-20\nBe" not in message.content
    assert message.content.endswith("Today's date is 2026-11-20.")


def tool(name: str, **parameters: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "description": f"It {name}s.", "parameters": parameters}}


def shuffled(value: object, rng: random.Random) -> object:
    if isinstance(value, dict):
        keys = list(value)
        rng.shuffle(keys)
        return {key: shuffled(value[key], rng) for key in keys}
    return [shuffled(item, rng) for item in value] if isinstance(value, list) else value


@given(st.randoms(use_true_random=False))
def test_tools_in_any_order_are_the_same(rng: random.Random) -> None:
    schema = {
        "type": "object",
        "properties": {"b": {"type": "string"}, "a": {"type": "number"}},
        "required": ["a", "b"],
    }
    tools = [tool("write", **schema), tool("look"), tool("ask", **schema)]
    sent = [shuffled(each, rng) for each in rng.sample(tools, 3)]
    one, other = normalise([USER], tools, TOOLS), normalise([USER], sent, TOOLS)
    assert json.dumps(one.tools) == json.dumps(other.tools)
    assert [each["function"]["name"] for each in one.tools or ()] == ["ask", "look", "write"]
    assert normalise([USER], one.tools, TOOLS).removed == ()
    for removed in other.removed:
        assert (removed.kind, removed.message_index, removed.place) == ("tools", None, Place(None, None))


@given(texts, texts, st.booleans())
def test_twice_is_once_and_only_cuts_are_missing(head: str, tail: str, is_signed: bool) -> None:
    content = f"{head}\n{SIGNED}\n{tail}" if is_signed else f"{head}\nToday's date: 2026-11-20\n{tail}"
    found = system(content, ATTRIBUTION | DATES)
    assert normalise(found.messages, found.tools, ATTRIBUTION | DATES).removed == ()
    assert len(found.removed) >= 1
    gone = sum(cut.end - cut.start for cut in found.cuts[0])
    assert len(found.as_sent[0].content) in (len(content) - gone, 0)


def test_the_elements_that_clients_add_keep_their_tags() -> None:
    content = (
        "<env>Today's date: 2026-11-20</env>\n<env>\nOS: x\nToday's date: 2026-11-20</env>\nDate: 2020-01-01\n<env>"
    )
    found = normalise([Message("user", content)], None, DATES)
    assert found.messages[0].content == "<env></env>\n<env>\nOS: x\n</env>\nDate: 2020-01-01\n<env>"
    assert normalise(found.messages, None, DATES).removed == ()


@pytest.mark.parametrize("text", ["<env>" * 40_000, "<env>\n" * 30_000 + "</system-reminder>" * 1000, "jan" * 60_000])
def test_long_texts_are_read_once(text: str) -> None:
    """Where time grew with the square of the length, this took minutes."""
    assert normalise([Message("user", text)], None, DATES).removed == ()
    assert without_dates(text) == text


def test_a_signing_line_that_is_far_too_long_stays() -> None:
    pairs = f"{HEADER} " + "a=b; " * 2_000_000
    for content in (pairs, f"Be kind.\n{pairs}", f"{HEADER} " + "x" * 100_000):
        normal = normalise([Message("system", content), Message("user", "Hi.")], None, {"attribution", "dates"})
        assert (normal.removed, normal.messages[0].content == content) == ((), True)
    many = f"{HEADER} cc_version=1.2; cch=0;\n" * 10_000 + "Be kind."
    normal = normalise([Message("system", many), Message("user", "Hi.")], None, {"attribution"})
    assert (len(normal.removed), normal.messages[0].content) == (10_000, "Be kind.")
    assert attribution_end("x" * 10_000_000) == attribution_end(pairs) == 0


TAIL = frozenset(["tail"])
STATUS = "gitStatus: This is the git status at the start.\nCurrent branch: main\n\nStatus:\n?? a.txt"
ENV = "Here is some useful information about the environment you are running in:\n<env>\n  Date: today\n</env>"
CONTEXT = '<context name="gitStatus">The status at the start.\n\n?? a.txt\n</context>'
SNAPSHOT = "Git snapshot at conversation start. It may be stale.\n```text\ngit: Status:\ngit: ?? a.txt\n```"
LOOK = [{"type": "function", "function": {"name": "look"}}]


@pytest.mark.parametrize(
    ("content", "left", "moved"),
    [
        (f"Be kind.\n\n{STATUS}", "Be kind.\n\n", STATUS),
        (f"Be kind.\n{ENV}\nFollow the rules.", "Be kind.\n\nFollow the rules.", ENV),
        (f"{ENV}\nFollow the rules.\n{STATUS}", "\nFollow the rules.\n", f"{ENV}\n\n{STATUS}"),
        (f"{CONTEXT}\nFollow the rules.", "\nFollow the rules.", CONTEXT),
        (f"{ENV}\nRules.\n{ENV}", "\nRules.\n", f"{ENV}\n\n{ENV}"),
        (f"{SNAPSHOT}\n\n---\n\n# auto memory", "\n\n---\n\n# auto memory", SNAPSHOT),
    ],
)
def test_a_changing_tail_moves_to_the_first_user_message(content: str, left: str, moved: str) -> None:
    sent = [Message("system", content), USER, Message("assistant", "Yes?"), USER]
    found = normalise(sent, LOOK, TAIL)
    assert found.messages == (Message("system", left), Message("user", f"{moved}\n\nHi"), *sent[2:])
    assert {(each.kind, each.message_index) for each in found.removed} == {("tail", 0)}
    assert "\n\n".join(each.text for each in found.removed) == moved
    assert found.place(Place(1, 1)) == Place(1, len(moved) + 3), "after the H of Hi"
    assert found.place(Place(1, None)) == Place(1, None) and found.place(Place(3, 1)) == Place(3, 1)
    again = normalise(found.messages, LOOK, TAIL)
    assert (again.messages, again.removed) == (found.messages, ()), "idempotent"


ENVIRONMENT = "# Environment\nYou have been invoked in the following environment: \n - Shell: bash"
TODAY = "Today's date is 2026-11-30."


def test_what_claude_code_says_after_the_first_words_moves_before_them() -> None:
    late = Message("system", f"{ENVIRONMENT}\n\n{TODAY}")
    system_text, answer = Message("system", f"Be kind.\n{STATUS}"), Message("assistant", "Yes?")
    found = normalise([system_text, USER, late, answer, USER, late], LOOK, TAIL)
    first = Message("user", f"{STATUS}\n\nHi")
    assert found.messages == (Message("system", "Be kind.\n"), late, first, answer, USER, late)
    assert [(each.message_index, each.text) for each in found.removed] == [(0, STATUS), (2, late.content)]
    assert found.removed[1].place == Place(2, None), "it came after the user's words"
    assert [found.place(Place(at, None)) for at in range(4)] == [Place(at, None) for at in (0, 2, 1, 3)]
    assert found.as_sent[2] == late
    again = normalise(found.messages, LOOK, TAIL)
    assert (again.messages, again.removed) == (found.messages, ())
    cut = normalise([Message("system", "Be kind."), USER, late], LOOK, TAIL, headings=["Today"])
    assert cut.messages[1:] == (Message("system", f"{ENVIRONMENT}\n\n"), Message("user", f"{TODAY}\n\nHi"))
    rules = Message("system", f"Rules. {late.content}")
    kind = Message("system", "Be kind.")
    for sent, tools in (
        ([kind, USER, rules], LOOK),
        ([kind, USER, late], []),
        ([USER, late], LOOK),
        ([kind, answer, late], LOOK),
    ):
        assert normalise(sent, tools, TAIL).messages == tuple(sent)


def test_parts_of_a_late_message_come_in_their_first_order() -> None:
    first = f"{ENVIRONMENT}\n\nThese skills are available:\n- dataviz\n\n{TODAY}"
    later = f"These skills are available:\n- dataviz\n\n{ENVIRONMENT}\n\n{TODAY}"
    assert as_begun(later) == as_begun(first) == first
    assert as_begun(f"Skills.\n\n{ENVIRONMENT}") == f"{ENVIRONMENT}\n\nSkills."
    assert as_begun("") is None and as_begun(f"See {ENVIRONMENT}") is None


def test_a_tail_stays_where_nothing_is_won_or_nobody_can_take_it() -> None:
    system_text = Message("system", f"Be kind.\n{STATUS}")
    for sent, tools, kinds in (
        ([system_text, USER], None, TAIL),
        ([system_text, USER], LOOK, ATTRIBUTION),
        ([system_text, Message("assistant", "Hm."), USER], LOOK, TAIL),
        ([system_text], LOOK, TAIL),
        ([USER, system_text, USER], LOOK, TAIL),
        ([Message("system", "See `gitStatus:` below."), USER], LOOK, TAIL),
        ([Message("system", f"Be kind.\ngitStatus: the rules are these.\n{'Never lie. ' * 2000}"), USER], LOOK, TAIL),
        ([Message("system", "Here is useful information about the environment:\n<env>\nno end"), USER], LOOK, TAIL),
    ):
        assert normalise(sent, tools, kinds).messages == tuple(sent)
