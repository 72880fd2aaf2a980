"""Calls are read as they are generated: verbatim, in any pieces, without losing a character."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rekindle.pocket import MODEL_DIR
from rekindle.text.messages import Message, ToolCall, arguments_for_template
from rekindle.text.prompt import PromptEncoder
from rekindle.text.template import ChatTemplate
from rekindle.text.tools import (
    CLOSING,
    OPENING,
    ArgumentsPiece,
    Blanks,
    CallEnd,
    CallStart,
    Event,
    TextPiece,
    ToolFormat,
    ToolStream,
    find_tool_format,
    format_of,
    new_call_id,
)
from tests.text.factories import CHAT, encoder_of

POCKET = PromptEncoder.from_dir(MODEL_DIR)
PLAIN, QWEN = ToolFormat(), ToolFormat("\n")
JUNK = (
    *(
        OPENING,
        CLOSING,
        "<tool_",
        "call>",
        "</",
        "<",
        ">",
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        ",",
        ":",
        " ",
        "\n",
        "x",
        "é",
    ),
    *(
        '{"name": "f", "arguments": {',
        '"name"',
        '"arguments"',
        '"parameters"',
        "{}",
        "1",
        "null",
        "🙂",
        "\\u00e9",
        "}}",
    ),
    OPENING + '{"name": "look", "arguments": {"a": "</tool_call>"}}' + CLOSING,
)
junk = st.lists(st.sampled_from(JUNK), max_size=25).map("".join)
formats = st.sampled_from([PLAIN, QWEN])
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
    | st.sampled_from([CLOSING, OPENING, '"}', "\\", '{"', "<"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
names = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\ufdd0"), min_size=1, max_size=8)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


def read(form: ToolFormat, pieces: list[str], **options: Any) -> list[Event]:
    """All events, neighbours of one kind joined, so that two ways of cutting can be compared."""
    numbers = itertools.count()
    stream = ToolStream(form, new_id=lambda: f"call_{next(numbers)}", **options)
    joined: list[Event] = []
    for event in itertools.chain(*map(stream.push, pieces), stream.finish()):
        last = joined[-1] if joined else None
        if isinstance(event, TextPiece) and isinstance(last, TextPiece):
            joined[-1] = TextPiece(last.text + event.text)
        elif isinstance(event, ArgumentsPiece) and isinstance(last, ArgumentsPiece) and event.index == last.index:
            joined[-1] = ArgumentsPiece(event.index, last.text + event.text, last.raw + event.raw)
        else:
            joined.append(event)
    return joined


def summary(events: list[Event]) -> tuple[str, list[tuple[str, str, bool]]]:
    """The text, and name, arguments and wholeness of each call."""
    calls = []
    for start in (event for event in events if isinstance(event, CallStart)):
        mine = [event for event in events if getattr(event, "index", None) == start.index]
        arguments = "".join(event.text for event in mine if isinstance(event, ArgumentsPiece))
        (end,) = (event for event in mine if isinstance(event, CallEnd))
        assert (mine[0], mine[-1]) == (start, end)
        calls.append((start.name, arguments, end.whole))
    return "".join(event.text for event in events if isinstance(event, TextPiece)), calls


def read_whole(text: str, form: ToolFormat = PLAIN) -> tuple[str, list[tuple[str, str, bool]]]:
    return summary(read(form, [text]))


@given(junk, st.lists(st.integers(0, 1_000), max_size=12), formats)
@example('<tool_call>{"name": "f", "arguments": {"a": "\\', [], PLAIN)
@example('a\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n', [1, 2, 3], QWEN)
def test_no_character_is_lost_and_pieces_do_not_matter(text: str, cuts: list[int], form: ToolFormat) -> None:
    events = read(form, pieces_of(text, cuts))
    assert "".join(event.raw for event in events) == text
    assert events == read(form, list(text))
    summary(events)


@given(junk, formats)
def test_only_what_may_become_a_call_is_held_back(text: str, form: ToolFormat) -> None:
    stream, given_back = ToolStream(form), ""
    for at, char in enumerate(text):
        given_back += "".join(event.raw for event in stream.push(char))
        held = text[: at + 1].removeprefix(given_back)
        rest = held.lstrip(" \t\n\r")
        in_call = any(mark in held for mark in (OPENING,)) or given_back.count(OPENING)
        assert in_call or OPENING.startswith(rest) or (form.gap + OPENING).startswith(held)


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, str, str]:
    """Name, arguments and the text of a call, spelled in one of the ways that models have."""
    name = draw(names)
    value = draw(
        st.dictionaries(st.text(st.characters(exclude_categories=("Cs",)), max_size=4), json_values, max_size=3)
    )
    arguments = json.dumps(
        value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])),
        separators=draw(st.sampled_from([None, (",", ":")])),
    )  # fmt: skip
    blank = draw(st.sampled_from(["", " ", "\n", " \n\t"]))
    key = draw(st.sampled_from(["arguments", "parameters"]))
    members = [f'"name"{blank}: {json.dumps(name)}', f'{blank}"{key}":{blank}{arguments}{blank}']
    members = draw(st.permutations([*members, *draw(st.sampled_from([[], ['"id": "x"'], ['"type": {"a": ["}"]}']]))]))
    return name, arguments, f"{OPENING}{blank}{{{','.join(members)}}}{blank}{CLOSING}"


@given(
    st.lists(calls(), min_size=1, max_size=3), st.sampled_from(["", "Let me look.", "1 < 2 <tool"]),
    st.sampled_from(["", "\n"]), st.lists(st.integers(0, 1_000), max_size=12), formats,
)  # fmt: skip
def test_calls_come_out_as_they_went_in(
    made: list[tuple[str, str, str]], before: str, between: str, cuts: list[int], form: ToolFormat
) -> None:
    text = before + form.gap * bool(before) + between.join(call[2] for call in made) + between
    said, found = summary(read(form, pieces_of(text, cuts)))
    assert said == before
    assert found == [(name, arguments, True) for name, arguments, _ in made]


def test_arguments_are_streamed_while_they_are_generated() -> None:
    stream = ToolStream(PLAIN, new_id=lambda: "call_1")
    assert stream.push('Look: <tool_call>\n{"name": "look", "argu') == [TextPiece("Look: ")]
    assert stream.push('ments": ') == []
    assert stream.push('{"place"') == [
        CallStart(0, "call_1", "look", '<tool_call>\n{"name": "look", "arguments": '),
        ArgumentsPiece(0, '{"place"', '{"place"'),
    ]
    assert stream.push(': "</tool_call>') == [ArgumentsPiece(0, ': "</tool_call>', ': "</tool_call>')]
    assert stream.push('"} }') == [ArgumentsPiece(0, '"}', '"}')]
    assert stream.push("\n</tool_call>\n") == [CallEnd(0, True, " }\n</tool_call>")]
    assert stream.finish() == [Blanks("\n")]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>look()</tool_call>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": "f", "arguments": tru}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": }, "name": "f"}</tool_call>',
        '<tool_call>{"name": "f",, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments"',
        '<tool_call>{"name": "f"',
        "a <tool_call> is a mark, <tool_call>{ too",
        "\n \n",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert read_whole(text) == (text, [])


@pytest.mark.parametrize(
    ("text", "said", "found"),
    [
        # cut off, by the limit or by the model itself
        ('<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b', False)]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', "", [("f", '{"a": 1}', True)]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool', "", [("f", '{"a": 1}', True)]),
        # braces too few or too many
        ('<tool_call>{"name": "f", "arguments": {"a": {}}\n</tool_call>', "", [("f", '{"a": {}}', True)]),
        ('<tool_call>{"name": "f", "arguments": {"a": {</tool_call>ok', "ok", [("f", '{"a": {', False)]),
        ('<tool_call>{"name": "f", "arguments": {}}}}</tool_call>', "", [("f", "{}", True)]),
        # broken inside: verbatim, for the caller to judge
        ('<tool_call>{"name": "f", "arguments": {a: "\n" < 3}}</tool_call>', "", [("f", '{a: "\n" < 3}', True)]),
        # no closing mark, then text
        ('<tool_call>{"name": "f", "arguments": {}}\nDone.', "\nDone.", [("f", "{}", True)]),
        ('<tool_call>{"name": "f", "arguments": {}, oops', " oops", [("f", "{}", True)]),
        # arguments that are no object, or none at all
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}", True)]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '"{\\"a\\": 1}"', True)]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "null", True)]),
        # a mark inside a mark
        ('<tool_call><tool_call>{"name": "f"}</tool_call>', "<tool_call>", [("f", "{}", True)]),
        ('a <tool_call>{"name": "f"}</tool_call> b', "a  b", [("f", "{}", True)]),
    ],
)
def test_broken_calls_end_where_they_break(text: str, said: str, found: list[tuple[str, str, bool]]) -> None:
    assert read_whole(text) == (said, found)


@pytest.mark.parametrize("before", ['{"name": "f", "arguments": ', '{"arguments": '])
def test_empty_pieces_change_nothing(before: str) -> None:
    """Tokens may have no text: an escape stays one over them."""
    after = "}" if "name" in before else ', "name": "f"}'
    arguments = '{"a": "\\"}"}'
    text = f"{OPENING}{before}{arguments}{after}{CLOSING}"
    pieces = [piece for char in text for piece in (char, "")]
    assert summary(read(PLAIN, pieces)) == ("", [("f", arguments, True)])


def test_one_call_only_where_no_others_are_wanted() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    stream = ToolStream(PLAIN, parallel=False)
    events = stream.push(f"{call}{call} more")
    assert [type(event) for event in events] == [CallStart, ArgumentsPiece, CallEnd]
    assert stream.ended
    assert stream.push(call) == stream.finish() == []


def test_ids_are_unique() -> None:
    ids = {new_call_id() for _ in range(1_000)}
    assert len(ids) == 1_000
    assert all(each.startswith("call_") for each in ids)


QWEN_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% if (loop.first and m.content) or not loop.first %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' }}{{ c.function.name }}{{ \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}<|im_end|>\n{% endfor %}"
)
HERMES = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'arguments': c.function.arguments, 'name': c.function.name} | tojson }}\n</tool_call>{% endfor %}{% endfor %}"
)
CODER = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n<function="
    "{{ c.function.name }}>\n</function>\n</tool_call>{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (QWEN_CALLS, ToolFormat("\n")),
        (HERMES, ToolFormat("")),
        (CODER, None),
        (CHAT, None),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ("{{ raise_exception('no tools') }}", None),
    ],
)
def test_the_form_is_what_the_template_writes(source: str, form: ToolFormat | None) -> None:
    assert format_of(ChatTemplate({"default": source}, {})) == form


def test_the_bundled_model_calls_tools() -> None:
    assert find_tool_format(POCKET) == ToolFormat("")
    assert find_tool_format(encoder_of("cl100k")) is None


@given(st.dictionaries(st.text(st.characters(exclude_categories=("Cs",)), max_size=4), json_values, max_size=3))
def test_calls_rendered_by_the_bundled_template_are_read_back(value: dict[str, Any]) -> None:
    """What a template writes of a call is what the stream finds, arguments byte for byte."""
    arguments = json.dumps(value, ensure_ascii=False).replace("\ufdd0", "")
    said = [Message("assistant", "Wait.", tool_calls=(ToolCall(None, "look", arguments),))]
    text = POCKET.readable(POCKET.render_chat(said, add_generation_prompt=False).key)
    reply = text.partition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>\n")
    assert read_whole(reply) == ("Wait.", [("look", arguments, True)])


@pytest.mark.parametrize("source", [QWEN_CALLS, POCKET.template.sources["default"]])
@pytest.mark.parametrize("said", ["", "Let me look."])
@pytest.mark.parametrize("num_calls", [1, 2])
def test_what_was_read_is_rendered_as_it_was_generated(source: str, said: str, num_calls: int) -> None:
    """A reply in the template's own spelling goes out as a message and comes back as the same text."""
    template = ChatTemplate({"default": source}, {})
    form = format_of(template)
    assert form is not None

    def rendered(content: str, made: list[tuple[str, str]]) -> str:
        functions = [{"name": name, "arguments": arguments_for_template(text, str)} for name, text in made]
        message = {"role": "assistant", "content": content, "tool_calls": [{"function": each} for each in functions]}
        text = template.render([message], add_generation_prompt=False)
        return text.rpartition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>\n")

    generated = rendered(said, [("look", '{"a":1, "b" : "\\u00e9"}')] * num_calls)
    content, found = read_whole(generated, form)
    assert content == said
    assert rendered(content, [(name, arguments) for name, arguments, _ in found]) == generated
