"""Schemas that some value satisfies, and those that none does."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.text.constraints.satisfiable import is_satisfiable

N = {"$ref": "#/$defs/n"}


def with_n(n: Any, schema: Any = N) -> dict[str, Any]:
    return {**schema, "$defs": {"n": n}}


def node(following: Any, *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"next": following}, "required": [*required]}


@pytest.mark.parametrize(
    "schema",
    [
        False,
        with_n(N),
        with_n({"allOf": [N]}),
        with_n({"oneOf": [N, False]}),
        with_n(node(N, "next")),
        with_n({"type": "array", "items": N, "minItems": 1}),
        with_n({"type": "array", "prefixItems": [True, N], "minItems": 2}),
        {"type": "object", "properties": {"a": True, "b": {"$ref": "#"}}, "required": ["a", "b"]},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"$ref": "#/$defs/c%20d"}, "c d": {"$ref": "#/$defs/a~1b"}}},
        {"anyOf": [{"type": "object", "properties": {"a": False}, "required": ["a"]}]},
    ],
)
def test_none_satisfies(schema: Any) -> None:
    assert not is_satisfiable(schema)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        [1],
        with_n(node(N)),
        with_n(node({"anyOf": [{"type": "null"}, N]}, "next")),
        with_n({"oneOf": [N, {"type": "string"}]}),
        with_n({"type": "array", "items": N}),
        with_n({"type": "array", "prefixItems": [True], "items": N, "minItems": 1}),
        with_n(N, {"type": "object", "properties": {"a": N}}),
        {"properties": {"a": False}, "required": ["a"]},  # a number does
        {"type": "object", "required": ["a"]},
        {"$ref": "#/$defs/missing"},
        {"$ref": "https://example.org/schema"},
        {"$defs": {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(50)} | {"d50": {}}, "$ref": "#/$defs/d0"},
    ],
)
def test_some_value_satisfies(schema: Any) -> None:
    assert is_satisfiable(schema)
