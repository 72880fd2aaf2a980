"""Constrained replies: the text is what the constraint says, reasoning and calls stay as the model writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, Field

from rekindle.errors import BadRequest, Cancelled, RequestFailed
from rekindle.text.constraints.matcher import MOST_BYTES, ReplyConstraints, ReplyMatcher
from rekindle.text.constraints.schema import enforced, fault
from rekindle.text.constraints.types import Calls, Constraint
from rekindle.text.messages import GUARD
from rekindle.text.prompt import RenderedPrompt
from rekindle.text.replies import find_reply_format
from tests.text.families import FAMILIES, encoder_for

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
A = Constraint("json", SCHEMA, "response_format")
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


@cache
def constraints_of(name: str, kind: str = "cl100k") -> ReplyConstraints:
    """Constraints of a family of models; those of all tests share what is compiled, and the process that tries it."""
    return new_constraints(name, kind)


def new_constraints(name: str, kind: str = "cl100k", *, most_bytes: int = MOST_BYTES) -> ReplyConstraints:
    encoder = encoder_for(name, kind)
    ends = [token.id for token in encoder.controls.tokens if token.content in FAMILIES[name].ends]
    return ReplyConstraints(encoder, find_reply_format(encoder), ends=ends, most_bytes=most_bytes)


def ids_of(name: str, reply: str, kind: str = "cl100k") -> list[int]:
    encoder = encoder_for(name, kind)
    return [int(each) for each in encoder.encode(encoder.continued(RenderedPrompt(b""), reply))]


def follow(matcher: ReplyMatcher, ids: Sequence[int]) -> bool:
    for token_id in ids:
        if not matcher.allowed()[token_id]:
            return False
        matcher.take(token_id)
    return True


def accepts(name: str, reply: str, given: Constraint = A, *, opening: str = "", calls: bool = False) -> bool:
    """Whether the reply may be said and end there."""
    matcher = constraints_of(name).matcher(given, opening=opening, calls=Calls(()) if calls else None)
    encoder = encoder_for(name)
    ends = [token.id for token in encoder.controls.tokens if token.content in FAMILIES[name].ends]
    return follow(matcher, ids_of(name, reply)) and (matcher.is_over or bool(matcher.allowed()[ends].any()))


@pytest.mark.parametrize(
    "name", ["hermes", "spelled", "special", "coder", "llama", "mistral_list", "keyed", "pythonic"]
)
def test_a_reply_is_json_of_its_schema(name: str) -> None:
    for reply in ('{"a": 1}', '{"a":-12}', '{\n  "a": 3\n}'):
        assert accepts(name, reply), reply
    for reply in ("Hello", '{"a": "1"}', '{"b": 1}', "{}", "[1]", '{"a": 1} and more'):
        assert not accepts(name, reply), reply


@pytest.mark.parametrize("name", ["hermes", "spelled", "special"])
def test_reasoning_is_free_until_it_ends(name: str) -> None:
    mark = GUARD if name == "special" else ""
    thought = f'{mark}<think>\nA {{"b": 2}} or not?\n{mark}</think>\n\n'
    assert accepts(name, thought + '{"a": 1}')
    assert not accepts(name, thought + "Hello")
    assert not accepts(name, f"{mark}<think>\nHm."), "reasoning is not a reply"


def test_reasoning_that_the_prompt_begins_or_ends_is_known() -> None:
    begun = "<think>\n"
    assert accepts("opened", 'Hm, {"b"?\n</think>\n\n{"a": 1}', opening=begun)
    assert not accepts("opened", '{"a": 1}', opening=begun), "that is still reasoning"
    assert accepts("empty", '{"a": 1}', opening="<think>\n\n</think>\n\n")
    assert not accepts("empty", 'Hm.\n</think>\n\n{"a": 1}', opening="<think>\n\n</think>\n\n")


def test_replies_in_channels_are_constrained_in_the_one_for_answers() -> None:
    channel, message, end, start = (f"{GUARD}<|{name}|>" for name in ("channel", "message", "end", "start"))
    thought = f"{channel}analysis{message}Which one?{end}{start}assistant"
    answer = f"{channel}final{message}"
    assert accepts("channels", thought + answer + '{"a": 1}')
    assert accepts("channels", f'{answer}{{"a": 1}}')
    assert not accepts("channels", f"{answer}Hello")
    assert not accepts("channels", '{"a": 1}'), "without a header it is no answer"
    call = f"{channel}commentary to=functions.look {GUARD}<|constrain|>json{message}{{}}"
    assert accepts("channels", thought + call, calls=True)
    assert not accepts("channels", thought + call)


def test_a_call_may_take_the_place_of_the_text() -> None:
    assert accepts("hermes", CALL, calls=True) and accepts("hermes", '{"a": 1}', calls=True)
    assert accepts("hermes", f"<think>\nHm.\n</think>\n\n{CALL}\n{CALL}", calls=True)
    assert not accepts("hermes", CALL) and not accepts("hermes", "Hello", calls=True)
    opened, closed = f"{GUARD}<|tool_call_start|>", f"{GUARD}<|tool_call_end|>"
    assert accepts("pythonic", f"{opened}[look()]{closed}", calls=True)
    assert not accepts("pythonic", opened, calls=True) and not accepts("pythonic", opened + closed, calls=True)


@pytest.mark.parametrize(
    ("constraint", "right", "wrong"),
    [
        (Constraint("choice", ("yes", "no", "no way")), ["yes", "no", "no way"], ["maybe", "yes!", ""]),
        (Constraint("choice", ("a\x7fb", "\x01")), ["a\x7fb", "\x01"], ["ab", "a"]),
        (Constraint("regex", "[a\x7f]/b"), ["\x7f/b", "a/b"], ["x/b"]),
        (Constraint("regex", r"\d{3}-[a-f]+/x"), ["123-abc/x", "000-f/x"], ["12-a/x", "123-g/x", "123-a/x "]),
        (Constraint("grammar", 'start: "a" b\nb: "b" | "(" b ")"'), ["ab", "a((b))"], ["a(b", "b"]),
        (Constraint("grammar", 'root ::= "x" ("y" | "z")+'), ["xy", "xzzy"], ["x", "yx"]),
        (Constraint("json", True), ['{"x": [1, null]}', "3", '"s"'], ["{", "Hello"]),
    ],
)
def test_other_kinds(constraint: Constraint, right: list[str], wrong: list[str]) -> None:
    for reply in right:
        assert accepts("hermes", reply, constraint), reply
    for reply in wrong:
        assert not accepts("hermes", reply, constraint), reply


@pytest.mark.parametrize("kind", ["gpt2", "o200k", "deepseek", "prepend", "always", "first", "words"])
def test_every_kind_of_tokenizer(kind: str) -> None:
    matcher = constraints_of("hermes", kind).matcher(A, opening="")
    assert follow(matcher, ids_of("hermes", '{"a": 1}', kind)) and matcher.is_over
    matcher = constraints_of("hermes", kind).matcher(A, opening="")
    assert not follow(matcher, ids_of("hermes", '{"a": x}', kind))


def test_text_is_not_taken_for_a_token() -> None:
    """A string of JSON may hold any text, and no control token."""
    given = Constraint("json", {"type": "string"})
    constraints = constraints_of("hermes")
    control = [token.id for token in encoder_for("hermes").controls.tokens]
    matcher = constraints.matcher(given, opening="")
    matcher.take(ids_of("hermes", '"')[0])
    assert not matcher.allowed()[control].any() and matcher.allowed().sum() > 100


def test_copies_go_their_own_ways() -> None:
    first = constraints_of("hermes").matcher(Constraint("choice", ("ab", "cd")), opening="")
    second = first.copy()
    first.take(ids_of("hermes", "a")[0])
    assert follow(second, ids_of("hermes", "cd")) and second.is_over
    assert follow(first, ids_of("hermes", "b")) and first.is_over


@pytest.mark.parametrize(
    ("schema", "place", "words"),
    [
        ({"type": "strng"}, "", "strng"),
        ({"properties": {"x": {"type": "array", "items": {"uniqueItems": True}}}}, "properties.x.items", "uniqueItems"),
        ({"anyOf": [{"type": "string"}, {"not": {}}]}, "anyOf[1]", "not"),
        ({"$defs": {"p": {"type": "object", "properties": {"q": {"type": "x"}}}}, "$ref": "#/$defs/p"},
         "$defs.p.properties.q", "Invalid type: x"),
        ({"properties": {"y": {"$ref": "#/$defs/missing"}}}, "properties.y", "missing"),
        ({"properties": {"z": {"type": "string", "pattern": "(a"}}}, "properties.z", "unclosed group"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "", "minimum (5) is greater"),
        ({"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}, "properties.a", "use anyOf"),
        ({"properties": {"a": {"patternProperties": {"^[ab]$": {"const": 1}}, "additionalProperties": False,
                               "minProperties": 2}}}, "properties.a", "minProperties"),
        ({"anyOf": [{}, {"allOf": [{"required": ["a"], "minProperties": 2}]}]}, "anyOf[1].allOf[0]", "minProperties"),
        ({"items": [{"additionalProperties": {"type": "null"}, "minProperties": 2}]}, "items[0]", "minProperties"),
        ({"oneOf": [{"$ref": "#/$defs/p"}, {"type": "object"}], "$defs": {"p": {"type": "object"}}}, "", "use anyOf"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_by_its_place(schema: Any, place: str, words: str) -> None:
    given = Constraint("json", schema, "response_format.json_schema.schema")
    with pytest.raises(BadRequest) as caught:
        constraints_of("hermes").matcher(given, opening="")
    at = f"at {place}: " if place else ""
    assert str(caught.value).startswith(f"response_format.json_schema.schema: {at}") and words in str(caught.value)
    assert caught.value.param == f"response_format.json_schema.schema{f'.{place}' if place else ''}"


@pytest.mark.parametrize(
    "given",
    [
        Constraint("json", [1], "x"),
        Constraint("choice", (), "x"),
        Constraint("choice", ("",), "x"),
        Constraint("regex", "(a", "x"),
        Constraint("regex", "\ud800", "x"),
        Constraint("regex", "", "x"),
        Constraint("grammar", "start: (", "x"),
        Constraint("grammar", "root ::= (", "x"),
        Constraint("grammar", 'root ::= "a\\', "x"),  # here and below the translator fails in ways of Python's
        Constraint("grammar", "root ::= " + "(" * 20_000, "x"),
        Constraint("grammar", f'root ::= "a"{{{"9" * 5000}}}', "x"),
        Constraint("grammar", 'a ::= "b"', "x"),
        Constraint("grammar", "a" * (2 << 20), "x"),
    ],
)
def test_malformed_constraints_are_refused(given: Constraint) -> None:
    with pytest.raises(BadRequest) as caught:
        constraints_of("hermes").matcher(given, opening="")
    assert caught.value.param == "x"


def test_another_notation_is_translated_once_and_where_time_is_bounded() -> None:
    """Of a chain of rules the translator takes minutes, and nobody can interrupt it."""
    constraints = new_constraints("hermes")
    try:
        chain = "\n".join(f"a{at} ::= a{at + 1} a{at + 1}" for at in range(5000))
        with pytest.raises(BadRequest, match="too complex"):
            constraints.matcher(Constraint("grammar", f'root ::= a0\n{chain}\na5000 ::= "x"'), opening="")
        given = Constraint("grammar", 'root ::= "yes" | "no"')
        assert not constraints.is_ready(given, opening="")
        constraints.matcher(given, opening="")
        assert constraints.is_ready(given, opening="")
        for at in range(40):
            constraints.matcher(Constraint("grammar", f'root ::= "{at}"\n#{"c" * 30_000}'), opening="")
            constraints.check()
        assert not constraints.is_ready(given, opening=""), "those of long ago are left"
    finally:
        constraints.close()


def test_formats_that_nobody_knows_are_annotations_and_objects_are_closed() -> None:
    schema = {
        "properties": {"format": {"type": "string", "format": "password"}, "d": {"type": "string", "format": "date"}},
        "enum": [{"format": "x", "properties": {"a": 1}}],
    }
    assert enforced(schema) == {
        "properties": {"format": {"type": "string"}, "d": {"type": "string", "format": "date"}},
        "enum": [{"format": "x", "properties": {"a": 1}}],
        "additionalProperties": False,
    }
    part = {"properties": {"a": {}}}
    for left in (
        {**part, "additionalProperties": True},
        {**part, "patternProperties": {"b": {}}},
        {**part, "minProperties": 3},
        {**part, "$ref": "#/x"},
        {"allOf": [part, {"properties": {"b": {}}}]},
        {"type": "object"},
    ):
        assert enforced(left) == left
    assert enforced({"items": part}) == {"items": {**part, "additionalProperties": False}}


def test_properties_are_counted_where_their_names_are_known() -> None:
    named = {"properties": {"a": {}, "b": {}}, "required": ["a", "b"], "minProperties": 2}
    for schema in (named, {"minProperties": 1}, {**named, "additionalProperties": False}):
        assert accepts("hermes", '{"a": 1, "b": 2}', Constraint("json", {"type": "object", **schema})), schema
        assert not accepts("hermes", "{}", Constraint("json", {"type": "object", **schema})), schema


def test_an_object_has_the_properties_whose_only_value_is_their_default() -> None:
    kind, x = {"const": "cat", "default": "cat"}, {"const": 1}
    part = {"properties": {"kind": kind, "x": x}, "additionalProperties": False}
    assert enforced(part) == {**part, "required": ["kind"]}
    assert enforced({**part, "required": ["x"]})["required"] == ["kind", "x"]
    for left in ({**part, "required": ["kind"]}, {**part, "maxProperties": 1}, {**part, "required": "x"}):
        assert enforced(left) == left


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Box(BaseModel):
    kind: Literal["box"] = "box"
    inside: list[Cat | Box]


class Found(BaseModel):
    what: Annotated[Cat | Box, Field(discriminator="kind")]


@pytest.mark.parametrize("has_discriminator", [True, False])
def test_unions_are_enforced(has_discriminator: bool) -> None:
    """With the discriminator, which is no keyword of JSON Schema, the library follows the references by itself."""
    schema = Found.model_json_schema()
    if not has_discriminator:
        del schema["properties"]["what"]["discriminator"]
    given = Constraint("json", schema)
    cat = '{"kind": "cat", "lives": 9}'
    for what in (cat, f'{{"kind": "box", "inside": [{cat}]}}'):
        assert accepts("hermes", f'{{"what": {what}}}', given), what
    for what in ('{"lives": 9}', '{"kind": "box", "lives": 9}'):
        assert not accepts("hermes", f'{{"what": {what}}}', given), what


def test_faults_of_large_schemas_are_looked_for_within_bounds() -> None:
    checks = 0

    def check(schema: Any) -> str:
        nonlocal checks
        checks += 1
        return "wrong" if "bad" in json.dumps(schema) else ""

    wide = {"properties": {f"p{at}": {} for at in range(5000)} | {"z": {"bad": 1}}}
    path, message = fault(wide, check)
    assert message == "wrong" and checks < 1000
    assert fault({"properties": {"z": {"bad": 1}}}, check)[0] == "properties.z"
    assert path in ("", "properties.z")


def test_masks_are_of_the_whole_vocabulary() -> None:
    matcher = constraints_of("hermes").matcher(A, opening="")
    allowed = matcher.allowed()
    assert allowed.dtype == np.bool_ and len(allowed) == encoder_for("hermes").vocab_size


def patterns(num: int) -> dict[str, Any]:
    return {"type": "object", "patternProperties": {f"^a{at}[a-z]+$": {"type": "string"} for at in range(num)}}


@pytest.mark.parametrize(
    "given",
    [
        Constraint("json", {"type": "integer", "multipleOf": 99_999_989}, "x"),
        Constraint("json", patterns(500), "x"),
        Constraint(
            "json",
            {
                "properties": {f"p{at}": {"$ref": "#/$defs/d"} for at in range(100)} | {"q": {"pattern": "(?=x)y"}},
                "$defs": {"d": patterns(200)},
            },
            "x",
        ),
    ],
)
def test_what_takes_minutes_to_compile_is_refused(given: Constraint) -> None:
    """The library cannot be interrupted, and its limits do not bound these; nothing of them is kept."""
    constraints = constraints_of("hermes")
    with pytest.raises(BadRequest, match="too complex"):
        constraints.matcher(given, opening="")
    assert not constraints.is_ready(given, opening="")
    constraints.check()
    assert accepts("hermes", '{"a": 1}'), "others go on"


@pytest.mark.parametrize(
    "given",
    [
        Constraint("regex", "((a{1000}){1000}){1000}", "x"),
        Constraint("choice", tuple(f"c{at}x" for at in range(5000)), "x"),
        Constraint("json", {"properties": {f"p{at}": {"type": "integer"} for at in range(8000)}}, "x"),
        Constraint("grammar", "\n".join(["start: a0", *(f"a{n}: a{n + 1} a{n + 1}" for n in range(40)), 'a40: "x"'])),
        Constraint("grammar", "start: s\ns: " + " | ".join(f's s "a{at}"' for at in range(300)) + ' | ""', "x"),
    ],
)  # fmt: skip
def test_what_no_reply_could_follow_is_refused_before_it_begins(given: Constraint) -> None:
    with pytest.raises(BadRequest, match="too complex"):
        constraints_of("hermes").matcher(given, opening="")


@pytest.mark.parametrize(
    ("given", "place"),
    [
        (Constraint("json", False, "x"), ""),
        (Constraint("json", {"properties": {"a": False}, "required": ["a"], "type": "object"}, "x"), "properties.a"),
        (Constraint("json", {"enum": []}, "x"), ""),
        (Constraint("json", {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}, "x"), "$defs.n"),
        (
            Constraint("json", {"allOf": [{"$ref": "#/$defs/n"}], "$defs": {"n": {"$ref": "#/$defs/n"}}}, "x"),
            "allOf[0]",
        ),
        (Constraint("grammar", "start: start", "x"), ""),
    ],
)
def test_what_nothing_can_satisfy_is_refused_by_its_place(given: Constraint, place: str) -> None:
    with pytest.raises(BadRequest, match="no reply can satisfy this") as caught:
        constraints_of("hermes").matcher(given, opening="")
    assert caught.value.param == ("x" if not place else f"x.{place}")


def test_compiled_grammars_are_kept_up_to_a_size() -> None:
    def large(name: str) -> Constraint:
        return Constraint("json", {"properties": {f"{name}{at}": {"type": "integer"} for at in range(200)}})

    constraints = new_constraints("hermes", most_bytes=4 << 20)
    for name in "abcdefgh":
        constraints.matcher(large(name), opening="")
        constraints.check()
    ready = [constraints.is_ready(large(name), opening="") for name in "abcdefgh"]
    assert ready[-1] and not ready[0] and ready == sorted(ready), "the last ones are"
    constraints.close()
    constraints.close()
    assert constraints.matcher(large("h"), opening="").allowed().any()
    with pytest.raises(RequestFailed, match="closed"):
        constraints.matcher(large("a"), opening="")


def test_nothing_is_compiled_for_those_who_left() -> None:
    given = Constraint("json", {"type": "integer", "multipleOf": 7_919_193})
    with pytest.raises(Cancelled):
        constraints_of("hermes").matcher(given, opening="", is_wanted=lambda: False)
    wanted = iter([True])
    with pytest.raises(Cancelled):
        constraints_of("hermes").matcher(given, opening="", is_wanted=lambda: next(wanted, False))
