"""Ceilings of size, and no waivers: where something does not fit, a noun is missing."""

from __future__ import annotations

import ast
import re

from tests.needs import ROOT, SOURCES

PLACES = (*SOURCES, ROOT / "benchmarks")
MODULE_LINES, FUNCTION_LINES = 400, 50
WAIVERS = re.compile(r"#\s*(type:\s*ignore|noqa|pragma: no cover|mypy:|ruff:)")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|raise NotImplementedError)\b")


def long_functions(text: str) -> list[tuple[str, int]]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    sizes = [(node.name, (node.end_lineno or 0) - node.lineno + 1) for node in functions]
    return [(name, size) for name, size in sizes if size > FUNCTION_LINES]


def modules() -> dict[str, str]:
    paths = sorted(path for place in PLACES for path in place.rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def test_modules_are_short() -> None:
    sizes = {path: text.count("\n") for path, text in modules().items()}
    assert {path: size for path, size in sizes.items() if size > MODULE_LINES} == {}


def test_functions_are_short() -> None:
    found = {path: long_functions(text) for path, text in modules().items()}
    assert {path: rows for path, rows in found.items() if rows} == {}


def test_nothing_is_waived_or_left_for_later() -> None:
    lines = [(path, line.strip()) for path, text in modules().items() for line in text.splitlines()]
    assert [row for row in lines if WAIVERS.search(row[1]) or UNFINISHED.search(row[1])] == []


def test_modules_say_what_they_own() -> None:
    bare = [path for path, text in modules().items() if text.strip() and not ast.get_docstring(ast.parse(text))]
    assert bare == []


def test_a_long_function_is_seen() -> None:
    assert long_functions("def f():\n" + "    pass\n" * 50) == [("f", 51)]
    assert long_functions("def f():\n" + "    pass\n" * 49) == []
