"""Schemas in `oneOf` that exclude each other, and those that may not."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.text.constraints.alternatives import MOST_NAMES, exclusive

TEXT, NULL, NUMBER = {"type": "string"}, {"type": "null"}, {"type": "number"}
A, B = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}


def thing(*kinds: Any, required: Any = ("kind",), **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"enum": [*kinds]}, **more}, "required": [*required]}


def pydantic(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": kind, "default": kind}}, **more}


ROOT = {"$defs": {"a": thing("a"), "b": thing("b", "c", x={"const": "1"})}}


@pytest.mark.parametrize(
    "schemas",
    [
        [TEXT, NULL, NUMBER],
        [{"type": ["string", "null"]}, {"type": "integer"}],
        [{"const": True}, {"enum": ["a", None]}],
        [A, B, NULL],
        [thing("a", v={"const": "1"}), thing("b", v={"const": "1"})],
        [pydantic("a"), pydantic("b"), A | {"description": "not looked at"} | TEXT | {"$ref": "#/$defs/c"}],
        [A, TEXT],
    ],
)
def test_they_exclude_each_other(schemas: list[Any]) -> None:
    assert exclusive(schemas, {"$defs": {**ROOT["$defs"], "c": thing("c")}})


@pytest.mark.parametrize(
    "schemas",
    [
        [{"type": "integer"}, NUMBER],
        [{"type": ["string", "null"]}, NULL],
        [{"enum": [1, "a"]}, TEXT],
        [A, A],
        [A, {"type": "object"}],
        [A, {"type": ["object", "null"]}],
        [thing("a", "b"), B],
        [A, thing("b", required=())],
        [A, thing()],
        [A, thing(2)],
        [A, thing("b") | {"required": "kind"}],
        [A, thing("b") | {"required": [["kind"]]}],
        [A, thing("b") | {"properties": []}],
        [pydantic("a"), pydantic("b", maxProperties=0)],
        [thing("b", required=[str(at) for at in range(MOST_NAMES)] + ["kind"]), A],
        [thing(*map(str, range(MOST_NAMES + 1))), A],
        [{"type": ["string"] * MOST_NAMES + ["null"]}, NULL],
        [A, {"$ref": "#/$defs/missing"}],
        [A, {"$ref": 1}],
        [TEXT, {"type": 1}],
        [TEXT, True],
        [TEXT, {}],
        [TEXT, 1],
    ],
)
def test_they_may_overlap(schemas: list[Any]) -> None:
    assert not exclusive(schemas, ROOT)
