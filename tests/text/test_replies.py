"""Replies are read as they are generated: in any pieces, without losing a character, whatever a model writes."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rekindle.text.messages import Message, ToolCall
from rekindle.text.replies import (
    ArgumentsDelta,
    Blanks,
    CallEnd,
    CallStart,
    Event,
    ParsedReply,
    ReasoningDelta,
    ReplyFormat,
    ReplyStream,
    SentCall,
    TextDelta,
    ThinkingFormat,
    find_reply_format,
    new_call_id,
)
from rekindle.text.replies.envelope import EnvelopeForm
from rekindle.text.replies.reader import CallMarks
from rekindle.text.replies.tagged import TaggedForm
from rekindle.text.stream import structured
from tests.text.families import FAMILIES, SILENT, encoder_for, read_reply

G = "\ufdd0"
AS_FOUND = {name: find_reply_format(encoder_for(name)) for name in FAMILIES}
FORMS = {name: replace(form, one_call=False) for name, form in AS_FOUND.items()}
PLAIN = ReplyFormat(tools=EnvelopeForm())
HERMES, CODER, LLAMA, KEYED, CHANNELS = (FORMS[name] for name in ("hermes", "coder", "llama", "keyed", "channels"))
LISTED, NAMED = FORMS["mistral_list"], FORMS["mistral_args"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALLS, ARGS, QUOTE = G + "[TOOL_CALLS]", G + "[ARGS]", G + '<|"|>'
K_OPEN, K_CLOSE = G + "<|tool_call>call:", G + "<tool_call|>"
HEAD = f"{G}<|channel|>%s{G}<|message|>"
START, END, CALL = f"{G}<|start|>assistant", G + "<|end|>", G + "<|call|>"
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    for properties in [{
        "s": {"type": "string"}, "n": {"type": "integer"}, "x": {"type": "number"}, "b": {"type": "boolean"},
        "o": {"type": "object"}, "l": {"type": ["array", "null"]}, "e": {"enum": ["1", "2"]},
        "m": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "u": {"type": ["string", "integer"]},
    }]
]  # fmt: skip

SIGNS = [*'{}[]"\\,:;< >\n\tx1', "é", "null", "true", "{}", "}}", '{"name": "f", "arguments": {', '"name"', "</", "to="]
TAGS = [
    "<function=f>",
    "<parameter=s>",
    "<parameter=n>\n",
    "</parameter>",
    "</function>",
    "call:",
    "call:f{",
    "assistant",
]


def alphabet(form: ReplyFormat) -> list[str]:
    """Marks of a form, whole and in halves, and everything that is near to them."""
    marks = {*form.specials, OPEN, CLOSE, "<think>", "</think>", "```tool_code", "```"}
    if form.thinking:
        marks |= {form.thinking.open, form.thinking.close}
    if form.tools:
        marks |= {opening for name in (None, "f", "look") if (opening := form.opening(name))}
    return sorted({*SIGNS, *TAGS, *marks, *(mark[: len(mark) // 2] for mark in marks), *(m[1:] for m in marks), G})


@st.composite
def junk(draw: st.DrawFn) -> tuple[str, str]:
    """A family and what its model may write on a bad day."""
    name = draw(st.sampled_from(sorted(FORMS)))
    return name, "".join(draw(st.lists(st.sampled_from(alphabet(FORMS[name])), max_size=25)))


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


def read(form: ReplyFormat, pieces: list[str], *, tools: Any = True, **options: Any) -> list[Event]:
    """All events, neighbours of one kind joined, so that two ways of cutting can be compared."""
    numbers = itertools.count()
    stream = ReplyStream(form, tools=tools, new_id=lambda: f"call_{next(numbers)}", **options)
    joined: list[Event] = []
    for event in itertools.chain(*map(stream.push, pieces), stream.finish()):
        last = joined[-1] if joined else None
        raw = (last.raw if last else "") + event.raw
        match event, last:
            case (TextDelta(), TextDelta()) | (ReasoningDelta(), ReasoningDelta()):
                joined[-1] = type(event)(last.text + event.text, raw)
            case ArgumentsDelta(), ArgumentsDelta() if event.index == last.index:
                joined[-1] = ArgumentsDelta(event.index, last.text + event.text, raw)
            case Blanks(), Blanks():
                joined[-1] = Blanks(raw)
            case TextDelta(), _:
                joined.append(TextDelta(event.text, event.raw))
            case ReasoningDelta(), _:
                joined.append(ReasoningDelta(event.text, event.raw))
            case _:
                joined.append(event)
    return joined


def said_in(text: str, form: ReplyFormat = PLAIN, **options: Any) -> tuple[str, str, list[tuple[str, str, bool]]]:
    """Thought, text, and name, arguments and wholeness of each call."""
    said = ParsedReply()
    events = read(form, [text], **options)
    assert events == read(form, list(text), **options)
    for event in events:
        said.take(event)
    return said.reasoning, said.text, [(call.name, call.arguments, call.whole) for call in said.calls]


def check_order(events: list[Event]) -> None:
    """Every call begins, has its arguments and ends, one after the other."""
    running: int | None = None
    counted = 0
    for event in events:
        match event:
            case CallStart():
                assert (running, event.index) == (None, counted)
                running, counted = event.index, counted + 1
            case ArgumentsDelta():
                assert running == event.index
            case CallEnd():
                assert running == event.index
                running = None
            case Blanks():
                pass
            case _:
                assert running is None
    assert running is None


@given(junk(), st.lists(st.integers(0, 1_000), max_size=12), st.sampled_from([True, False, TOOLS]))
@example(("keyed", f"{K_OPEN}f{{a:{QUOTE}x"), [3, 20], True)
@example(("channels", f"{G}<|cons{G}<|call|>"), [], True)
@example(("coder", f"{OPEN}<function=f><parameter=s>\n\n</para"), [3, 20], TOOLS)
@example(("mistral_args", f'{CALLS}f{ARGS}{{"a": "\\{G}[ARGS]'), [20], True)
def test_no_character_is_lost_and_pieces_do_not_matter(case: tuple[str, str], cuts: list[int], tools: Any) -> None:
    name, text = case
    events = read(FORMS[name], pieces_of(text, cuts), tools=tools)
    assert "".join(event.raw for event in events) == text
    assert events == read(FORMS[name], list(text), tools=tools)
    assert events == read(FORMS[name], [piece for char in text for piece in (char, "")], tools=tools)
    check_order(events)
    shown = [event.text for event in events if isinstance(event, TextDelta | ReasoningDelta | ArgumentsDelta)]
    assert G not in "".join(shown)
    assert tools or not any(isinstance(event, CallStart) for event in events)


@given(junk(), junk(), st.integers(0, 9))
def test_what_was_begun_is_not_said_again(begun: tuple[str, str], more: tuple[str, str], cut: int) -> None:
    """Behind an opening only what follows is told, and all of it; calls that it has begun are."""
    name, opening, text = begun[0], begun[1], more[1]
    whole = read(FORMS[name], [opening + text])
    events = read(FORMS[name], pieces_of(text, [cut]), opening=opening)
    assert "".join(event.raw for event in events) == text
    kinds = (CallStart, ArgumentsDelta, CallEnd)
    said = [[(type(e), getattr(e, "text", None)) for e in each if isinstance(e, kinds)] for each in (whole, events)]
    assert said[0] == said[1]
    check_order(events)


@given(junk())
def test_one_call_only_where_no_others_are_wanted(case: tuple[str, str]) -> None:
    name, text = case
    stream = ReplyStream(FORMS[name], tools=True, parallel=False)
    events = stream.push(text) + stream.finish()
    calls = sum(isinstance(event, CallStart) for event in events)
    assert calls <= 1
    assert text.startswith("".join(event.raw for event in events))
    assert stream.ended == any(isinstance(event, CallEnd) for event in events) or not stream.ended
    if stream.ended:
        assert isinstance(events[-1], CallEnd)
        assert stream.push("more") == stream.finish() == []


@pytest.mark.parametrize("name", FORMS)
def test_a_whole_call_is_read_in_every_form(name: str) -> None:
    form, arguments = FORMS[name], '{"s": "a, \\"b\\"\\n}", "n": 7}'
    text = {
        "coder": f'{OPEN}\n<function=f>\n<parameter=s>\na, "b"\n}}\n</parameter>\n<parameter=n>\n7\n</parameter>\n'
        f"</function>\n{CLOSE}",
        "actions": f'{G}<|START_ACTION|>[\n  {{"tool_call_id": "0", "tool_name": "f", "parameters": {arguments}}}\n]'
        f"{G}<|END_ACTION|>",
        "functions": f"<function=f>{arguments}</function>",
        "kimi": f"{G}<|tool_call_begin|>functions.f:0{G}<|tool_call_argument_begin|>{arguments}{G}<|tool_call_end|>",
        "distilled": f"{G}<|tool▁call▁begin|>function{G}<|tool▁sep|>f\n```json\n{arguments}\n```{G}<|tool▁call▁end|>",
        "name_then_fence": f"<tool_call>f\n```json\n{arguments}\n```</tool_call>",
        "name_keys": f'{G}<|tools_prefix|>[{{"f": {arguments}}}]{G}<|tools_suffix|>',
        "silent_list": f'{G}<|tool_call|>[{{"name": "f", "arguments": {arguments}}}]',
        "silent_pythonic": f"""{G}<|tool_call_start|>[f(s='a, "b"\\n}}', n=7)]{G}<|tool_call_end|>""",
        "pythonic": f"""{G}<|tool_call_start|>[f(s='a, "b"\\n}}', n=7)]{G}<|tool_call_end|>""",
        "python_lines": """<function_calls>\nf(s="a, \\"b\\"\n}", n=7)\n</function_calls>""",
        "seed": f'{G}<seed:tool_call>\n<function=f>\n<parameter=s>a, "b"\n}}</parameter>\n<parameter=n>'
        f"\n7\n</parameter>\n</function>\n{G}</seed:tool_call>",
        "glm": f'{OPEN}f\n<arg_key>s</arg_key>\n<arg_value>a, "b"\n}}</arg_value>\n<arg_key>n</arg_key>\n<arg_value>'
        f"\n7\n</arg_value>\n{CLOSE}",
        "glm_dense": f'{G}{OPEN}f{G}<arg_key>s{G}</arg_key><arg_value>a, "b"\n}}</arg_value>{G}<arg_key>n{G}</arg_key>'
        f"<arg_value>\n7\n</arg_value>{G}{CLOSE}",
        "invoked": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">a, "b"\n}</parameter>\n'
        '<parameter name="n">\n7\n</parameter>\n</invoke>\n</minimax:tool_call>',
        "dsml": f'<{G}|DSML|function_calls>\n<{G}|DSML|invoke name="f">\n<{G}|DSML|parameter name="s" string="true">'
        f'a, "b"\n}}</{G}|DSML|parameter>\n<{G}|DSML|parameter name="n" string="false">\n7\n</{G}|DSML|parameter>\n'
        f"</{G}|DSML|invoke>\n</{G}|DSML|function_calls>",
        "keyed_first": f'{K_OPEN}f{{s:{QUOTE}a, "b"\n}}{QUOTE},n:7}}{K_CLOSE}',
        "keyed": f'{K_OPEN}f{{s:{QUOTE}a, "b"\n}}{QUOTE},n:7}}{K_CLOSE}',
        "llama": f'{{"name": "f", "parameters": {arguments}}}',
        "mistral_list": f'{CALLS}[{{"name": "f", "arguments": {arguments}, "id": "123456789"}}]',
        "mistral_args": f"{CALLS}f{ARGS}{arguments}",
        "mistral_id": f"{CALLS}f{G}[CALL_ID]123456789{ARGS}{arguments}",
        "fenced": f'```tool_code\n{{"name": "f", "parameters": {arguments}}}\n```',
        "channels": f"{HEAD % f'commentary to=functions.f {G}<|constrain|>json'}{arguments}{CALL}",
        "special": f'{G}{OPEN}\n{{"name": "f", "arguments": {arguments}}}\n{G}{CLOSE}',
        "stripped": "",
    }.get(name, f'{OPEN}\n{{"name": "f", "arguments": {arguments}}}\n{CLOSE}')
    if text:
        assert said_in(text, form, tools=TOOLS) == ("", "", [("f", arguments, True)])
        cut_off = said_in(text.partition("7}")[0].partition("\n7\n")[0].partition("7)")[0], form, tools=TOOLS)
        assert [(each[0], each[2]) for each in cut_off[2]] == [("f", False)]
        assert cut_off[1] == ""


TAGGED = ("coder", "glm", "glm_dense", "invoked", "dsml", "seed")
NO_JSON = (*TAGGED, "pythonic", "python_lines")
OTHER_CUES = ("opened", "empty", "keyed_first", *SILENT, *NO_JSON)  # or arguments that are no JSON
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
words = st.text(st.characters(exclude_categories=("Cs",), exclude_characters=G), max_size=8)
spelled = st.sampled_from(
    [CLOSE, OPEN, '"}', "\\", '{"', "<", "</parameter", '<|"|>', "[ARGS]", "```", "<|call|>", "\n"]
)
json_values: st.SearchStrategy[Any] = st.recursive(
    scalars | words | spelled,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from([name for name in sorted(FORMS) if FORMS[name].tools and name not in OTHER_CUES]),
    st.dictionaries(st.sampled_from(["floor", "a-b", "é"]), json_values, max_size=3),
    st.sampled_from([1, 2]),
    st.booleans(),
)
def test_calls_come_out_as_they_went_in(name: str, value: dict[str, Any], num_calls: int, to_ascii: bool) -> None:
    """What a template writes of calls is read back: byte for byte where it is JSON, else the same values."""
    encoder, form = encoder_for(name), FORMS[name]
    arguments = json.dumps(value, ensure_ascii=to_ascii)
    calls = tuple(
        ToolCall(f"functions.look:{number}" if name == "kimi" else form.new_id(), "look", arguments)
        for number in range(1 if AS_FOUND[name].one_call else num_calls)
    )
    asked = Message("user", "?")
    prompt = encoder.render_chat([asked])
    whole = encoder.render_chat([asked, Message("assistant", "", tool_calls=calls)], add_generation_prompt=False)
    ids = encoder.encode_rest(whole, len(prompt.key))
    ends = [token.id for token in encoder.controls.tokens if token.content in FAMILIES[name].ends]
    last = min(list(ids).index(end) for end in ends if end in list(ids))
    said = read_reply(form, encoder, ids[:last], tools=True)
    assert (said.reasoning, said.text, len(said.calls)) == ("", "", len(calls))
    for call in said.calls:
        assert call.whole
        assert json.loads(call.arguments) == value
        assert name.startswith("keyed") or call.arguments == arguments


@given(
    st.sampled_from(NO_JSON),
    st.dictionaries(
        st.sampled_from(["s", "n", "o", "é"]),
        st.lists(words | spelled | st.sampled_from(["\n", "'", "\\n", ")", ","]), max_size=4).map("".join)
        | st.integers()
        | st.just({"a": [1, "b"], "c": [None, True]}),
        max_size=3,
    ),
    st.integers(1, 2),
    st.lists(st.integers(0, 99), max_size=4),
)
def test_values_that_are_no_json_come_out_as_they_went_in(
    name: str, values: dict[str, Any], num_calls: int, cuts: list[int]
) -> None:
    """With the types that the tool declares; a template does not guard the tags in a value."""
    form = FORMS[name]
    value_end = form.tools.tags.value[1].removeprefix(G) if isinstance(form.tools, TaggedForm) else ""
    if value_end and any(isinstance(value, str) and value_end in value for value in values.values()):
        return
    types = {int: "integer", dict: "object", str: "string"}
    properties = {key: {"type": types[type(value)]} for key, value in values.items()}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    encoder, asked = encoder_for(name), Message("user", "?")
    calls = tuple(ToolCall(f"call_{at}", "f", json.dumps(values)) for at in range(num_calls))
    prompt = encoder.render_chat([asked])
    whole = encoder.render_chat([asked, Message("assistant", "", tool_calls=calls)], add_generation_prompt=False)
    text = structured(encoder, encoder.encode_rest(whole, len(prompt.key))).partition(f"{G}<|im_end|>")[0]
    said = ParsedReply()
    for event in read(form, pieces_of(text, cuts), tools=tools):
        said.take(event)
    assert [(call.whole, json.loads(call.arguments)) for call in said.calls] == [(True, values)] * num_calls
    assert (said.text, said.reasoning) == ("", "")


@pytest.mark.parametrize(
    ("stated", "value", "expected"), [("true", "7", '"7"'), ("false", "7", "7"), ("false", "null", "null")]
)
@pytest.mark.parametrize("tools", [True, TOOLS], ids=["unknown tools", "known"])
def test_a_type_that_the_tag_states_needs_no_definition(
    stated: str, value: str, expected: str, tools: bool | list[Any]
) -> None:
    tag = f"{G}|DSML|"
    text = (
        f'<{tag}function_calls>\n<{tag}invoke name="f">\n<{tag}parameter name="new" string="{stated}">{value}'
        f"</{tag}parameter>\n</{tag}invoke>\n</{tag}function_calls>"
    )
    assert said_in(text, FORMS["dsml"], tools=tools) == ("", "", [("f", f'{{"new": {expected}}}', True)])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("'a\\x41\\u00e9\\U0001F600'", "aAé😀"),
        ("'\\ud83d\\ude00'", "😀"),
        ("'\\ud83d'", "\ufffd"),
        ("'\\d+ \\\\d'", "\\d+ \\d"),
        ("''", ""),
        ("'line\none'", "line\none"),
        ("[1, 2.5, 'x', None]", [1, 2.5, "x", None]),
        ('{"a": true, "b": [null]}', {"a": True, "b": [None]}),
        ("{'a': True}", {"a": True}),
        ("-3", -3),
        ("True", True),
        ("attic", "attic"),
        ("{1, 2}", "{1, 2}"),
        ("1e999", "1e999"),
        ("f(1, 2)", "f(1, 2)"),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_literals_of_python_are_read_as_json(source: str, expected: object, size: int) -> None:
    text = f"{G}<|tool_call_start|>[f(s={source}), f(s={source},)]{G}<|tool_call_end|>"
    said = ParsedReply()
    for event in read(FORMS["pythonic"], [text[at : at + size] for at in range(0, len(text), size)], tools=TOOLS):
        said.take(event)
    assert [json.loads(call.arguments) for call in said.calls] == [{"s": expected}] * 2
    assert all(call.whole for call in said.calls) and said.text == ""


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("[f(s='a", ""),
        ("[f(s=[1, 2", ""),
        ("[f(s='a' n=2)]", " n=2)]"),
        ("[f(1)]", "1)]"),
        ("[f(s=)]", ")]"),
    ],
)
def test_a_call_in_python_that_breaks_off_is_not_whole(text: str, left: str) -> None:
    _, said, calls = said_in(f"{G}<|tool_call_start|>{text}", FORMS["pythonic"], tools=TOOLS)
    assert [(name, whole) for name, _, whole in calls] == [("f", False)] and said == left


@pytest.mark.parametrize(
    "text",
    [
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">a',
        '<minimax:tool_call>\n<invoke name="f">\n<parameter nam',
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">a</parameter>\n</inv',
        f"{OPEN}f\n<arg_key>s</arg_key>\n<arg_val",
        f"{OPEN}f\n<arg_key>s</arg_key>\nno value",
    ],
)
def test_a_call_in_tags_that_breaks_off_is_not_whole(text: str) -> None:
    form = FORMS["invoked" if text.startswith("<minimax") else "glm"]
    _, said, calls = said_in(text, form, tools=TOOLS)
    assert [(name, whole) for name, _, whole in calls] == [("f", False)] and said.strip() in ("", "no value")


@given(junk())
def test_only_what_may_become_a_call_is_held_back(case: tuple[str, str]) -> None:
    stream, given_back = ReplyStream(PLAIN, tools=True), ""
    for at, char in enumerate(case[1]):
        given_back += "".join(event.raw for event in stream.push(char))
        held = case[1][: at + 1].removeprefix(given_back)
        is_in_call = OPEN in held or OPEN in given_back
        assert is_in_call or OPEN.startswith(held.lstrip(" \t\n\r")) or held == G


def test_arguments_are_streamed_while_they_are_generated() -> None:
    stream = ReplyStream(PLAIN, tools=True, new_id=lambda: "call_1")
    assert stream.push('Look: <tool_call>\n{"name": "look", "argu') == [TextDelta("Look: ")]
    assert stream.push('ments": ') == []
    assert stream.push('{"place"') == [
        CallStart(0, "call_1", "look", '<tool_call>\n{"name": "look", "arguments": '),
        ArgumentsDelta(0, '{"place"', '{"place"'),
    ]
    assert stream.push(': "</tool_call>') == [ArgumentsDelta(0, ': "</tool_call>', ': "</tool_call>')]
    assert stream.push('"} }') == [ArgumentsDelta(0, '"}', '"}')]
    assert stream.push("\n</tool_call>\n") == [CallEnd(0, True, " }\n</tool_call>")]
    assert stream.finish() == [Blanks("\n")]


@pytest.mark.parametrize(
    ("form", "before", "pieces"),
    [
        (CODER, f"{OPEN}\n<function=f>\n<parameter=s>\n", ["on", 'e "t"', "wo\nthree"]),
        (KEYED, f"{K_OPEN}f{{s:{QUOTE}", ["on", 'e "t"', "wo\nthree"]),
        (CHANNELS, HEAD % "commentary to=functions.f" + '{"s": "', ["on", "e two", ' three"']),
        (NAMED, f'{CALLS}f{ARGS}{{"s": "', ["on", "e two", ' three"']),
    ],
)
def test_long_strings_do_not_wait_for_their_end(form: ReplyFormat, before: str, pieces: list[str]) -> None:
    stream = ReplyStream(form, tools=TOOLS)
    stream.push(before)
    for piece in pieces:
        (event,) = stream.push(piece)
        assert isinstance(event, ArgumentsDelta)
        assert event.raw == piece


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
    assert said_in(text) == ("", text, [])


@pytest.mark.parametrize(
    ("form", "text", "shown"),
    [
        (CODER, f"{OPEN}\n<function=>", None),
        (CODER, f"{OPEN}<function=f<", None),
        (CODER, "A <function=> or <function=f and", None),
        (CODER, f"{OPEN}\nlook", None),
        (LLAMA, '{"name": "f"}', None),
        (LLAMA, '{"name": "g", "parameters": {}}', None),
        (LLAMA, '{"parameters": {}, "type": "f"}', None),
        (LLAMA, 'Sure: {"name": "f", "parameters": {}}', None),
        (LLAMA, '{"floors": 3}', None),
        (LLAMA, "{", None),
        (LLAMA, f"{G}<|python_tag|>print(1)", "print(1)"),
        (LISTED, f"{CALLS} look", " look"),
        (LISTED, f"{CALLS}[", "["),
        (LISTED, f'{CALLS}[{{"f": 1}}]', '[{"f": 1}]'),
        (LISTED, '[TOOL_CALLS][{"name": "f", "arguments": {}}]', None),
        (NAMED, f"{CALLS}f(1)", "f(1)"),
        (NAMED, f"{CALLS}f", "f"),
        (NAMED, f"{CALLS}{ARGS}{{}}", "{}"),
        (NAMED, f"a{ARGS}b", "ab"),
        (KEYED, f"{K_OPEN[: -len('call:')]}f{{}}", "f{}"),
        (KEYED, f"{K_OPEN}{{}}", "call:{}"),
        (KEYED, f"{K_OPEN}f", "call:f"),
        (CHANNELS, "Hello there.", None),
        (CHANNELS, "assist", ""),
        (CHANNELS, f"{HEAD % 'final'}Hello{G}<|constrain|>{END}", "Hello"),
        (CHANNELS, f"{HEAD % 'commentary to=python'}print(1){CALL}", "print(1)"),
        (CHANNELS, f"{HEAD % 'commentary'}First.{END}{START}{HEAD % 'final'}Then.", "First.\n\nThen."),
    ],
)
def test_what_is_no_call_is_text_in_every_form(form: ReplyFormat, text: str, shown: str | None) -> None:
    assert said_in(text, form, tools=TOOLS) == ("", text if shown is None else shown, [])


@pytest.mark.parametrize(
    ("text", "said", "found"),
    [
        # cut off, by the limit or by the model itself
        ('<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b', False)]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', "", [("f", '{"a": 1}', True)]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool', "", [("f", '{"a": 1}', True)]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool', "", [("f", '{"a": 1</tool', False)]),
        # braces too few or too many
        ('<tool_call>{"name": "f", "arguments": {"a": {}}\n</tool_call>', "", [("f", '{"a": {}}', True)]),
        ('<tool_call>{"name": "f", "arguments": {"a": {</tool_call>ok', "ok", [("f", '{"a": {', False)]),
        ('<tool_call>{"name": "f", "arguments": {}}}}</tool_call>', "", [("f", "{}", True)]),
        # broken inside: verbatim, for the caller to judge
        ('<tool_call>{"name": "f", "arguments": {a: "\n" < 3}}</tool_call>', "", [("f", '{a: "\\n" < 3}', False)]),
        # no closing mark, then text
        ('<tool_call>{"name": "f", "arguments": {}}\nDone.', "\nDone.", [("f", "{}", True)]),
        ('<tool_call>{"name": "f", "arguments": {}, oops', " oops", [("f", "{}", True)]),
        # arguments that are no object, or none at all
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}", True)]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}', True)]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}", True)]),
        # a mark inside a mark
        ('<tool_call><tool_call>{"name": "f"}</tool_call>', "<tool_call>", [("f", "{}", True)]),
        ('a <tool_call>{"name": "f"}</tool_call> b', "a  b", [("f", "{}", True)]),
    ],
)
def test_broken_calls_end_where_they_break(text: str, said: str, found: list[tuple[str, str, bool]]) -> None:
    assert said_in(text) == ("", said, found)


@pytest.mark.parametrize(
    ("form", "text", "said", "found"),
    [
        # several calls
        (LLAMA, '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {"n": 1}}', "",
         [("f", "{}", True), ("f", '{"n": 1}', True)]),
        (LLAMA, f'{G}<|python_tag|>{{"name": "f", "parameters": {{}}}}\n{{"name": "f", "parameters": {{}}}}', "",
         [("f", "{}", True)] * 2),
        (LLAMA, '{"name": "f", "parameters": {}}; and then', "; and then", [("f", "{}", True)]),
        (LISTED, f'Wait.{CALLS}[{{"name": "f", "arguments": {{}}}}, {{"name": "f", "arguments": {{}}}}]', "Wait.",
         [("f", "{}", True)] * 2),
        (LISTED, f'{CALLS}[{{"name": "f", "arguments": {{}}}}', "", [("f", "{}", True)]),
        (LISTED, f'{CALLS}{{"name": "f", "arguments": {{}}}}', "", [("f", "{}", True)]),
        (LISTED, f'{CALLS}[{{"name": "f", "arguments": {{}}}}, oops', ", oops", [("f", "{}", True)]),
        (NAMED, f'{CALLS}f{ARGS}{{}}{CALLS}f{{"n": 1}} ok', " ok", [("f", "{}", True), ("f", '{"n": 1}', True)]),
        (NAMED, f'{CALLS}f{ARGS}{{"s": "a{CALLS}f{ARGS}{{}}', "", [("f", '{"s": "a', False), ("f", "{}", True)]),
        # tags: values by type, sloppy line breaks, no end of the function, a value without its end
        (CODER, f"{OPEN}<function=f><parameter=s>1</parameter> <parameter=b>True</parameter></function>{CLOSE}", "",
         [("f", '{"s": "1", "b": true}', True)]),
        (CODER, f"So:\n<function=f>\n<parameter=n>1</parameter></function>\n{CLOSE}", "So:", [("f", '{"n": 1}', True)]),
        (CODER, "<function=f></function>\n<function=f></function>", "", [("f", "{}", True)] * 2),
        (CODER, f"{OPEN}<function=f>{CLOSE}", "", [("f", "{}", True)]),
        (CODER, f"{OPEN}<function=f></function>ok", "ok", [("f", "{}", True)]),
        (CODER, f"{OPEN}<function=f>\n<parameter=s>\n\n a\n\n</parameter>\noops", "",
         [("f", '{"s": "\\n a\\n\\n</parameter>\\noops', False)]),
        (CODER, f'{OPEN}<function=f><parameter=o>{{"a": [1, "<"]}}</parameter></function>{CLOSE}', "",
         [("f", '{"o": {"a": [1, "<"]}}', True)]),
        (CODER, f"{OPEN}<function=f><parameter=n>12", "", [("f", '{"n": ', False)]),
        # keyed: nesting, bare words, quoted keys
        (KEYED, f"{K_OPEN}f{{}}{K_CLOSE}{K_OPEN}f{{a:[],o:{{b:[1,{QUOTE}{{{QUOTE}]}}}}{K_CLOSE}", "",
         [("f", "{}", True), ("f", '{"a": [], "o": {"b": [1, "{"]}}', True)]),
        (KEYED, f"{K_OPEN}f{{ {QUOTE}a b{QUOTE} : big , c:null, d:-1.5}}", "",
         [("f", '{"a b": "big", "c": null, "d": -1.5}', True)]),
        (KEYED, f"{K_OPEN}f{{a:}}{K_CLOSE}", "}", [("f", '{"a": ', False)]),
        (KEYED, f"{K_OPEN}f{{a:1]{K_CLOSE}", "]", [("f", '{"a": 1', False)]),
        (KEYED, f"{K_OPEN}f{{a:{QUOTE}x{K_CLOSE}ok", "ok", [("f", '{"a": "x', False)]),
        # channels: recipient before the channel, text beside calls, no end
        (CHANNELS, f" to=functions.f{HEAD % 'commentary json'}{{}}", "", [("f", "{}", True)]),
        (CHANNELS, f"{HEAD % 'commentary to=functions.f'}{{\"n\": 1{START}{HEAD % 'final'}ok", "ok",
         [("f", '{"n": 1', False)]),
        (CHANNELS, f"{HEAD % 'final'}First.{END}{START} to=functions.f{HEAD % 'commentary'}{{}}{CALL}", "First.",
         [("f", "{}", True)]),
    ],
)  # fmt: skip
def test_every_form_forgives_what_it_can(
    form: ReplyFormat, text: str, said: str, found: list[tuple[str, str, bool]]
) -> None:
    assert said_in(text, form, tools=TOOLS) == ("", said, found)


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (HERMES, "<think>\nHm.\n</think>\n\nYes.", ("Hm.", "Yes.", [])),
        (HERMES, " \n<think>Hm.</think>Yes.", ("Hm.", "Yes.", [])),
        (HERMES, "<think>\n\n</think>\n\nYes.", ("", "Yes.", [])),
        (HERMES, "<think>\nHm.\n\n", ("Hm.\n\n", "", [])),
        (HERMES, "<think>\nHm.\n</thi", ("Hm.\n</thi", "", [])),
        (HERMES, "Yes. <think>No.</think>", ("", "Yes. <think>No.</think>", [])),
        (HERMES, "<thinks", ("", "<thinks", [])),
        (HERMES, f'<think>{OPEN}{{"name": "f"}}{CLOSE}</think>', (f'{OPEN}{{"name": "f"}}{CLOSE}', "", [])),
        (HERMES, f'<think>\nHm.\n</think>\n\n{OPEN}{{"name": "f"}}{CLOSE}', ("Hm.", "", [("f", "{}", True)])),
        (NAMED, f"{G}[THINK]Hm.{CALLS}f{ARGS}{{}}", ("Hm.", "", [("f", "{}", True)])),
        (NAMED, f"{G}[THINK]Hm.{ARGS}{G}[/THINK]Yes.", ("Hm.", "Yes.", [])),
        (NAMED, "[THINK]Hm.[/THINK]", ("", "[THINK]Hm.[/THINK]", [])),
        (KEYED, f"{G}<|channel>thought\nHm.\n{G}<channel|>Yes.", ("Hm.", "Yes.", [])),
        (CHANNELS, f"{HEAD % 'analysis'}Hm.{END}{START}{HEAD % 'final'}Yes.", ("Hm.", "Yes.", [])),
        (CHANNELS, f"{HEAD % 'analysis'}A{END}{START}{HEAD % 'analysis'}B", ("A\n\nB", "", [])),
        (PLAIN, "<think>Hm.</think>", ("", "<think>Hm.</think>", [])),
    ],
)
def test_thoughts_are_told_apart(form: ReplyFormat, text: str, expected: object) -> None:
    assert said_in(text, form) == expected


def test_thoughts_are_streamed() -> None:
    stream = ReplyStream(HERMES, tools=True)
    assert stream.push("<think>") == [Blanks("<think>")]
    assert stream.push("\nSo ") == [Blanks("\n"), ReasoningDelta("So ")]
    assert stream.push("it is\n") == [ReasoningDelta("it is")]
    assert stream.push("so.\n</think>\n\nIt") == [
        ReasoningDelta("\nso."),
        Blanks("\n</think>"),
        Blanks("\n\n"),
        TextDelta("It"),
    ]


@pytest.mark.parametrize(
    ("opening", "text", "expected"),
    [
        ("<think>\n", "Hm.\n</think>\n\nYes.", ("Hm.", "Yes.", [])),
        ("<think>\n\n</think>\n\n", "Yes.", ("", "Yes.", [])),
        ("<think>\nThe", "y.\n</think>", ("y.", "", [])),
        ("The answer", " is", ("", " is", [])),
        ("The <tool_", "box", ("", "box", [])),
        ('<tool_call>\n{"name": "f", "arguments":', ' {"a": 1}}', ("", "", [("f", '{"a": 1}', True)])),
        ('<tool_call>\n{"name": "', 'f", "arguments": {}}', ("", "", [("f", "{}", True)])),
        ('<tool_call>\n{"name": "f", "arguments": {"a"', ": 1}}", ("", "", [("f", '{"a": 1}', True)])),
    ],
)
def test_what_the_prompt_has_begun_is_gone_on_with(opening: str, text: str, expected: object) -> None:
    assert said_in(text, HERMES, opening=opening) == expected


def test_a_call_begun_by_the_prompt_is_told_first() -> None:
    stream = ReplyStream(NAMED, tools=True, opening=f"{CALLS}f{ARGS}", new_id=lambda: "1")
    assert stream.push("") == []
    assert stream.push("{") == [CallStart(0, "1", "f", ""), ArgumentsDelta(0, "{", "{")]


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("s", "7", "7"), ("s", "null", "null"), ("n", "7", 7), ("n", "seven", "seven"), ("n", " 7 ", 7), ("x", "7", 7),
        ("x", "1.5", 1.5), ("x", "NaN", "NaN"),
        ("b", "True", True), ("b", "false", False), ("b", "1", "1"),
        ("o", '{"a": 1}', {"a": 1}), ("o", "{a}", "{a}"), ("l", "[1]", [1]), ("l", "None", None),
        ("u", "7", "7"),
        ("m", "null", None), ("m", "7", "7"),
        ("e", "1", "1"), ("other", "7", 7), ("other", "seven", "seven"), ("other", "[1", "[1"),
        ("s", "é\t\"\\", 'é\t"\\'),
    ],
)  # fmt: skip
def test_bare_values_are_of_the_type_that_is_wanted(key: str, written: str, value: Any) -> None:
    text = f"{OPEN}<function=f><parameter={key}>\n{written}\n</parameter></function>{CLOSE}"
    _, _, calls = said_in(text, CODER, tools=TOOLS)
    assert calls[0][2]
    assert json.loads(calls[0][1]) == {key: value}


def test_what_was_said_is_a_message() -> None:
    said = ParsedReply()
    assert (said.message(), said.has_whole_call) == (Message("assistant", ""), False)
    text = f'<think>\nHm.\n</think>\n\nWait.\n{OPEN}{{"name": "f", "arguments": {{"a"'
    for event in read(HERMES, list(text)):
        said.take(event)
    call = SentCall("call_0", "f", '{"a"', False)
    assert (said.calls, said.has_whole_call) == ([call], False)
    expected = Message("assistant", "Wait.", tool_calls=(ToolCall("call_0", "f", '{"a"'),), reasoning="Hm.")
    assert said.message() == expected


@pytest.mark.parametrize("family", ["llama", "channels"])
def test_a_reply_has_one_call_where_the_template_takes_one(family: str) -> None:
    first = {"llama": '{"name": "f", "parameters": {}}', "channels": f"{HEAD % 'commentary to=functions.f'}{{}}{CALL}"}
    stream = ReplyStream(AS_FOUND[family], tools=TOOLS)
    events = stream.push(first[family] * 2)
    assert (stream.ended, sum(isinstance(event, CallStart) for event in events)) == (True, 1)


def test_ids_are_unique() -> None:
    ids = {new_call_id() for _ in range(1_000)}
    assert len(ids) == 1_000
    assert all(each.startswith("call_") for each in ids)


def test_a_bare_call_needs_no_names_where_none_are_known() -> None:
    bare = ReplyFormat(ThinkingFormat("<think>", "</think>"), EnvelopeForm(CallMarks(""), "parameters", ""))
    assert said_in('<think>a</think>\n{"name": "g", "parameters": {}}', bare) == ("a", "", [("g", "{}", True)])
