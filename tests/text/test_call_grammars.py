"""Grammars of calls: as each template writes them, of tools that there are, with arguments of their schemas."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rekindle.errors import BadRequest
from rekindle.text.constraints.matcher import ReplyConstraints
from rekindle.text.constraints.types import CalledTool, Calls, Constraint
from rekindle.text.messages import GUARD, Message, ToolCall
from rekindle.text.replies import CallEnd, ParsedReply, ReplyFormat, ReplyStream, begin_reply, find_reply_format
from rekindle.text.replies.keyed import KeyedForm
from rekindle.text.replies.reader import CallMarks
from tests.text.families import FAMILIES, SILENT, encoder_for, read_reply
from tests.text.test_constraints import constraints_of, follow, ids_of
from tests.text.test_reply_formats import ASKED, HOLDS_ONE, id_for, reply_of, structured, until_end

LOOK = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "floor": {"type": "integer"}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOLS = (
    CalledTool("look", LOOK, is_strict=True, param="tools[0]"),
    CalledTool("add", None, is_strict=False, param="tools"),
)
FREE = Calls(TOOLS)
OFFERED = [{"type": "function", "function": {"name": "look", "parameters": LOOK}}]
WRITTEN = [
    name
    for name in FAMILIES
    if name not in ("opened", "empty", "stripped", "actions", *SILENT)
    and (form := find_reply_format(encoder_for(name)).tools) is not None
    and form.layout is not None
]


TAGGED = ("coder", "glm", "glm_dense", "invoked", "dsml", "seed")


def ends_of(name: str) -> list[int]:
    return [token.id for token in encoder_for(name).controls.tokens if token.content in FAMILIES[name].ends]


def takes(name: str, ids: list[int], calls: Calls, *, opening: str = "", given: Constraint | None = None) -> bool:
    """Whether a reply of these ids may be said and end there."""
    matcher = constraints_of(name).matcher(given, opening=opening, calls=calls)
    return follow(matcher, ids) and (matcher.is_over or bool(matcher.allowed()[ends_of(name)].any()))


def reply_with(name: str, *arguments: dict[str, Any], tool: str = "look", text: str = "") -> list[int]:
    """A reply with calls as the template writes it."""
    encoder = encoder_for(name)
    form = find_reply_format(encoder)
    calls = tuple(
        ToolCall(id_for(name, form, at).replace("look", tool), tool, json.dumps(each))
        for at, each in enumerate(arguments)
    )
    ids, _ = reply_of(encoder, Message("assistant", text, tool_calls=calls))
    return [int(each) for each in until_end(encoder, ids, name)]


def test_most_formats_can_be_enforced() -> None:
    assert {"hermes", "special", "llama", "mistral_list", "mistral_args", "kimi", "channels", *TAGGED} <= set(WRITTEN)
    assert "pythonic" not in WRITTEN and "keyed" not in WRITTEN


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_taken_as_the_template_writes_them(name: str) -> None:
    assert takes(name, reply_with(name, {"place": "attic", "floor": 2}), FREE)
    assert takes(name, reply_with(name, {"x": [1]}, tool="add"), FREE)
    if name not in HOLDS_ONE:
        assert takes(name, reply_with(name, {"place": "attic"}, {"place": "cellar"}), FREE)
    if name not in ("llama", "mistral_list", "channels"):  # these write no text next to a call
        assert takes(name, reply_with(name, {"place": "attic"}, text="Let me see."), FREE)


@pytest.mark.parametrize("name", WRITTEN)
def test_wrong_arguments_and_unknown_tools_are_not(name: str) -> None:
    assert not takes(name, reply_with(name, {"floor": 2}), FREE)
    assert not takes(name, reply_with(name, {"place": "attic", "floor": "high"}), FREE)
    is_text = name in TAGGED and name != "dsml"  # whose tags say what is no string
    assert takes(name, reply_with(name, {"place": 7}), FREE) == is_text
    assert not takes(name, reply_with(name, {"place": "attic", "by": "night"}), FREE)
    assert not takes(name, reply_with(name, {}, tool="listen"), FREE)


@pytest.mark.parametrize("name", WRITTEN)
def test_text_stays_free(name: str) -> None:
    encoder = encoder_for(name)
    ids, _ = reply_of(encoder, Message("assistant", 'Look at {"this": 1} < 3, <tool or not.'))
    assert takes(name, [int(each) for each in until_end(encoder, ids, name)], FREE)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("tool", ["look", None])
def test_a_forced_call_continues_its_beginning(name: str, tool: str | None) -> None:
    encoder = encoder_for(name)
    form = find_reply_format(encoder)
    calls = replace(FREE, is_forced=True, name=tool)
    prefix = form.opening(tool) or ""
    _, opening = begin_reply(form, encoder, prompt=encoder.render_chat([ASKED]), prefix=prefix)
    for arguments, is_right in (({"place": "attic"}, True), ({"floor": 1}, False)):
        whole = structured(encoder, np.array(reply_with(name, arguments), np.uint32))
        _, begun, rest = whole.partition(prefix)
        if name == "mistral_id" and tool is not None:  # its model writes an id, a forced call has none
            begun, rest = whole.partition(f"{GUARD}[ARGS]")[1:]
        if name == "glm_dense" and tool is not None:  # the opening ends the name's line, the template does not
            begun, rest = whole.partition(tool)[1:]
        assert begun
        for section in ("<|tool_calls_section_end|>", "<|tool▁calls▁end|>"):
            rest = rest.removesuffix(GUARD + section)
        assert takes(name, ids_of(name, rest), calls, opening=opening) == is_right
    assert not takes(name, ids_of(name, "Hello"), calls, opening=opening)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_forced_call_that_is_cut_inside_its_name_is_no_text(name: str) -> None:
    encoder = encoder_for(name)
    form = find_reply_format(encoder)
    prefix = form.opening(None) or ""
    _, opening = begin_reply(form, encoder, prompt=encoder.render_chat([ASKED]), prefix=prefix)
    rest = structured(encoder, np.array(reply_with(name, {"place": "attic"}), np.uint32)).partition(prefix)[2]
    reply, at = ParsedReply(), rest.index("look")
    while not reply.message().tool_calls:
        reader, reply = ReplyStream(form, tools=OFFERED, opening=opening), ParsedReply()
        events = reader.push(rest[:at]) + reader.finish()
        for event in events:
            reply.take(event)
        assert not reply.message().content and "".join(event.raw for event in events) == rest[:at]
        at += 1
    assert at > rest.index("look") + len("look")


@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in (*TAGGED, "kimi")])
def test_a_forced_call_may_have_its_arguments_alone(name: str) -> None:
    """As another server writes it that is asked for JSON of a schema: nothing closes the call then."""
    encoder = encoder_for(name)
    form = find_reply_format(encoder)
    _, opening = begin_reply(form, encoder, prompt=encoder.render_chat([ASKED]), prefix=form.opening("look") or "")
    reader, reply = ReplyStream(form, tools=OFFERED, opening=opening, parallel=False), ParsedReply()
    events = reader.push('{"place": "attic"}') + reader.finish()
    for event in events:
        reply.take(event)
    (call,) = reply.message().tool_calls
    assert (call.name, call.arguments, reply.message().content) == ("look", '{"place": "attic"}', "")
    assert [event.whole for event in events if isinstance(event, CallEnd)] == [True]


def test_only_one_call_where_one_is_wanted() -> None:
    two = reply_with("hermes", {"place": "attic"}, {"place": "cellar"})
    first = structured(encoder_for("hermes"), np.array(two, np.uint32)).removeprefix('<tool_call>\n{"name": "')
    for parallel in (True, False):
        calls = Calls(TOOLS, parallel=parallel, is_forced=True)
        assert takes("hermes", ids_of("hermes", first), calls) == parallel


def test_reasoning_comes_first_and_is_free() -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"place": "attic"}}\n</tool_call>'
    wrong = call.replace('"attic"', "7")
    for name, mark in (("hermes", ""), ("special", GUARD)):
        thought = f"{mark}<think>\nA {{call}} of look?\n{mark}</think>\n\n"
        assert takes(name, ids_of(name, thought + call.replace("<t", f"{mark}<t").replace("</t", f"{mark}</t")), FREE)
        assert takes(name, ids_of(name, f"{thought}Hello."), FREE)
        other = wrong.replace("<t", f"{mark}<t").replace("</t", f"{mark}</t")
        assert not takes(name, ids_of(name, thought + other), FREE)


def test_text_of_a_form_or_calls() -> None:
    given = Constraint("json", {"type": "integer"})
    call = reply_with("hermes", {"place": "attic"})
    assert takes("hermes", ids_of("hermes", "7"), FREE, given=given)
    assert takes("hermes", call, FREE, given=given)
    for neither in ("<tool_call>", "<tool_call>\n</tool_call>", "<tool_call>Hello"):
        assert not takes("hermes", ids_of("hermes", neither), FREE, given=given)
    assert not takes("hermes", reply_with("hermes", {"place": 7}), FREE, given=given)
    assert not takes("hermes", reply_with("hermes", {"place": "attic"}, text="Hm."), FREE, given=given)


def test_a_strict_schema_that_cannot_be_enforced_is_refused_by_its_place() -> None:
    schema = {"type": "object", "properties": {"all": {"type": "array", "uniqueItems": True}}}
    strict = Calls((CalledTool("look", schema, is_strict=True, param="tools[3].function.parameters"),))
    with pytest.raises(BadRequest) as caught:
        constraints_of("hermes").matcher(None, opening="", calls=strict)
    assert caught.value.param == "tools[3].function.parameters.properties.all"
    assert "uniqueItems" in str(caught.value)


def test_what_calls_in_tags_cannot_say_is_refused_by_its_place_where_it_is_strict() -> None:
    schema = {"type": "object", "properties": {"place": {"type": "string"}}, "minProperties": 1}
    loose = CalledTool("look", schema, is_strict=False, param="tools[3].function.parameters")
    assert constraints_of("coder").matcher(None, opening="", calls=Calls((loose,))) is not None
    with pytest.raises(BadRequest, match="minProperties cannot be enforced in this model's calls") as caught:
        constraints_of("coder").matcher(None, opening="", calls=Calls((replace(loose, is_strict=True),)))
    assert caught.value.param == "tools[3].function.parameters"


def test_a_strict_tool_is_not_taken_for_the_loose_one_before_it() -> None:
    schema = {"type": "object", "properties": {"all": {"type": "array", "uniqueItems": True}}}
    loose = Calls((CalledTool("look", schema, is_strict=False, param="tools"),))
    constraints_of("hermes").matcher(None, opening="", calls=loose)
    with pytest.raises(BadRequest, match="uniqueItems"):
        constraints_of("hermes").matcher(None, opening="", calls=Calls((replace(loose.tools[0], is_strict=True),)))


def test_one_that_need_not_be_enforced_becomes_any_object() -> None:
    schema = {"type": "object", "properties": {"all": {"type": "array", "uniqueItems": True}}}
    loose = Calls((*TOOLS[:1], CalledTool("add", schema, is_strict=False, param="tools")))
    assert takes("hermes", reply_with("hermes", {"x": 1}, tool="add"), loose)
    assert not takes("hermes", reply_with("hermes", {"place": 1}), loose), "the other one is as strict as before"


def test_schemas_that_may_overlap_are_alternatives_unless_they_are_strict() -> None:
    schema = {"type": "object", "properties": {"x": {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}}}
    loose = CalledTool("add", schema, is_strict=False, param="tools")
    for value, is_right in ((7, True), (3.5, True), (2.5, False)):
        assert takes("hermes", reply_with("hermes", {"x": value}, tool="add"), Calls((loose,))) == is_right, value
    with pytest.raises(BadRequest, match="use anyOf") as caught:
        constraints_of("hermes").matcher(None, opening="", calls=Calls((replace(loose, is_strict=True),)))
    assert caught.value.param == "tools.properties.x"


@pytest.mark.parametrize("name", ["hermes", "coder"])
def test_a_schema_that_is_none_is_named_where_it_is_strict(name: str) -> None:
    for is_strict in (True, False):
        calls = Calls((CalledTool("look", [1], is_strict=is_strict, param="tools[0].parameters"),), is_forced=True)
        if not is_strict:
            assert constraints_of(name).matcher(None, opening="", calls=calls).allowed().any()
            continue
        with pytest.raises(BadRequest) as caught:
            constraints_of(name).matcher(None, opening="", calls=calls)
        assert caught.value.param == "tools[0].parameters"


def test_other_formats_have_free_calls() -> None:
    assert not constraints_of("pythonic").enforces(FREE)
    assert constraints_of("hermes").enforces(FREE)
    assert not constraints_of("hermes").enforces(Calls(()))


LOOSE = ("pythonic", "python_lines", "keyed")
ANYTHING = {
    "place": 'it\'s "so"',
    "floors": [1, -2.5e3],
    "deep": {"on": True, "none": None, "of": [{}]},
    "text": "a\nb",
}


@pytest.mark.parametrize("name", LOOSE)
def test_next_to_a_form_a_call_of_every_notation_is_whole_and_of_a_tool(name: str) -> None:
    """Also where arguments are neither JSON nor in tags, so that no schema is enforced in them."""
    given = Constraint("json", {"type": "integer"})
    assert takes(name, ids_of(name, "7"), FREE, given=given)
    for arguments in ({"place": "attic"}, {"floor": 2, "place": "attic"}, {}):
        assert takes(name, reply_with(name, arguments), FREE, given=given), arguments
        assert takes(name, reply_with(name, arguments, tool="add"), FREE, given=given)
        assert not takes(name, reply_with(name, arguments, tool="listen"), FREE, given=given)
    assert takes(name, reply_with(name, ANYTHING), FREE, given=given)
    two = reply_with(name, {"place": "attic"}, {"place": "cellar"})
    assert takes(name, two, FREE, given=given)
    assert not takes(name, two, replace(FREE, parallel=False), given=given)
    whole = structured(encoder_for(name), np.array(reply_with(name, {"place": "attic"}), np.uint32))
    assert takes(name, ids_of(name, whole), FREE, given=given)
    for end in range(1, len(whole.rstrip()) - 1):
        assert not takes(name, ids_of(name, whole[:end]), FREE, given=given), "a part of a call is none"
    at = whole.index("look") + len("look")
    for inside in (
        "",
        "look",
        " Hello there",
        "(Hello there)",
        "{Hello there}",
        "(place=)",
        "{place:}",
        "(place=attic)",
    ):
        wrong = whole[:at] + inside + whole[whole.rindex("\ufdd0") if "\ufdd0" in whole else whole.rindex("<") :]
        assert not takes(name, ids_of(name, wrong), FREE, given=given), wrong


def test_special_quotes_that_are_text_end_a_string_too() -> None:
    form = ReplyFormat(tools=KeyedForm(CallMarks("<call>", "</call>"), "<q>"))
    constraints = ReplyConstraints(encoder_for("hermes"), form, ends=ends_of("hermes"))
    try:
        for inside, is_right in (
            ("call:look{place:<q>the {attic}<q>,floor:2}", True),
            ("call:look{place:<q>the attic,floor:2}", False),
            ("call:look{place:<q>the<q>attic<q>}", False),
        ):
            matcher = constraints.matcher(Constraint("json", {"type": "integer"}), opening="", calls=FREE)
            ids = ids_of("hermes", f"<call>{inside}</call>")
            assert (follow(matcher, ids) and bool(matcher.allowed()[ends_of("hermes")].any())) == is_right, inside
    finally:
        constraints.close()


def test_names_are_those_of_tools_in_any_order_of_signs() -> None:
    tools = tuple(CalledTool(name, None, is_strict=False, param="tools") for name in ("look", "look_up", 'say "hi"'))
    for name, is_right in (("look_up", True), ("look", True), ("look_", False), ('say "hi"', True)):
        reply = f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {{}}}}\n</tool_call>'
        assert takes("hermes", ids_of("hermes", reply), Calls(tools)) == is_right, name


@pytest.mark.parametrize("name", TAGGED)
def test_values_in_tags_are_of_their_types(name: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "kind": {"$ref": "#/$defs/kind"},
            "note": {"type": "string", **({} if name == "dsml" else {"maxLength": 6})},
            "sizes": {"type": "array", "items": {"$ref": "#/$defs/size"}, "maxItems": 2},
            "box": {"$ref": "#/$defs/box"},
            "on": {"enum": [True, False]},
            "by": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "grade": {"enum": ["a", None]},
        },
        "required": ["kind"],
        "additionalProperties": False,
        "$defs": {
            "size": {"type": "integer", "minimum": 1},
            "kind": {"type": "string", "enum": ["lamp", "stone"]},
            "box": {"type": "object", "properties": {"a": {"$ref": "#/$defs/size"}}, "required": ["a"]},
        },
    }
    calls = Calls((CalledTool("look", schema, is_strict=True, param="tools[0]"),))
    for arguments, is_right in (
        ({"kind": "lamp"}, True),
        ({"kind": "lamp", "note": "a < b", "sizes": [1, 2]}, True),
        ({"kind": "stone", "sizes": [3], "box": {"a": 2}, "by": "me"}, True),
        ({"kind": "feather"}, False),
        ({"note": "abc"}, False),
        ({"kind": "lamp", "note": "too long"}, name == "dsml"),  # whose tags end in the middle of a mark
        ({"kind": "lamp", "sizes": [0]}, False),
        ({"kind": "lamp", "sizes": "many"}, False),
        ({"kind": "lamp", "box": {"a": 0}}, False),
        ({"kind": "lamp", "box": "none"}, False),
        ({"kind": "lamp", "grade": "a"}, True),
        ({"kind": "lamp", "grade": "b"}, False),
    ):
        assert takes(name, reply_with(name, arguments), calls) == is_right, arguments


def test_booleans_that_are_listed_are_no_texts() -> None:
    schema = {"type": "object", "properties": {"on": {"enum": [True, False]}, "kind": {"$ref": "#/$defs/k"}}}
    tools = [
        {"type": "function", "function": {"name": "look", "parameters": {**schema, "$defs": {"k": {"type": "string"}}}}}
    ]
    encoder = encoder_for("coder")
    form = find_reply_format(encoder)
    ids = np.array(reply_with("coder", {"on": True, "kind": "7"}), np.uint32)
    said = read_reply(form, encoder, ids, tools=tools)
    assert json.loads(said.calls[0].arguments) == {"on": True, "kind": "7"}


DAY = {"type": "string", "format": "date"}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"day": DAY}}, "properties.day"),
        ({"properties": {"day": {"anyOf": [{"type": "null"}, DAY]}}}, "properties.day"),
        ({"properties": {"day": {"$ref": "#/$defs/day"}}, "$defs": {"day": DAY}}, "properties.day"),
        ({"properties": {"day": {"enum": ["a", 5]}}}, "properties.day"),
        ({"properties": {"day": {"enum": ["a</parameter>"]}}}, "properties.day"),
        ({"properties": {"day": {"type": "string", "minLength": 5, "maxLength": 2}}}, "properties.day"),
        ({"properties": {"day": {"type": "string", "maxLength": 1 << 32}}}, "properties.day"),
        ({"properties": {"day": {"properties": {"a": {}}}}}, "properties.day"),
        ({"properties": {"a<b>": {"type": "string"}}}, "properties.a<b>"),
        ({"properties": {}, "required": ["day"]}, "required"),
        ({"additionalProperties": {"type": "integer"}}, "additionalProperties"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "object"}}}, ""),
        ({"anyOf": [{"type": "object"}]}, ""),
        ({"type": "array"}, ""),
        ({"properties": {}, "minProperties": 1}, ""),
    ],
)
def test_what_tags_cannot_enforce_is_refused_where_it_is_strict(schema: dict[str, Any], place: str) -> None:
    param = "tools[0].function.parameters"
    strict = Calls((CalledTool("look", schema, is_strict=True, param=param),))
    with pytest.raises(BadRequest) as caught:
        constraints_of("coder").matcher(None, opening="", calls=strict)
    assert caught.value.param == f"{param}.{place}".removesuffix(".")
    loose = replace(strict, tools=(replace(strict.tools[0], is_strict=False),), is_forced=True)
    assert constraints_of("coder").matcher(None, opening="", calls=loose).allowed().any()


@pytest.mark.parametrize("name", TAGGED)
def test_no_value_in_tags_ends_the_reply(name: str) -> None:
    schema = {"type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"]}
    calls = Calls((CalledTool("look", schema, is_strict=True, param="tools[0]"),))
    matcher, ids = constraints_of(name).matcher(None, opening="", calls=calls), reply_with(name, {"note": "a b"})
    for at, token_id in enumerate(ids):
        matcher.take(token_id)
        if "a b" in structured(encoder_for(name), np.array(ids[: at + 1], np.uint32)):
            break
    assert not matcher.allowed()[ends_of(name)].any()


def test_a_name_ends_before_its_fence() -> None:
    for name in ("distilled", "name_then_fence"):
        whole = structured(encoder_for(name), np.array(reply_with(name, {"place": "attic"}), np.uint32))
        assert takes(name, ids_of(name, whole), FREE)
        assert not takes(name, ids_of(name, whole.replace("look\n```", "look```")), FREE)
