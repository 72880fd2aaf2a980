"""Tests reach what is public: a name with a leading underscore may change on any day, and no test has a say in it.

What a test needs is public on its owner, or a part that the test builds by its constructor. Counted is every underscore
name of something else than a class's own `self`, and every one that is imported, patched or asked for by its name.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
FOREIGN = {"_attn_implementation", "_request_id"}  # of transformers and the official clients, who document them so
OUTSIDE, INSIDE = frozenset[str](), frozenset({"self", "cls"})  # of a class: what is its own
BY_NAME = {"getattr", "setattr", "delattr", "hasattr"}

# Uses that are left in a file: a number may only shrink, and goes with its last use. Careless stores are the code with
# a step left out, as mutants are.
LEFT: dict[str, int] = {
    "store/careless.py": 9,
}


def private_names(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, name) of every private name of somebody else in a file."""
    found, left = [], [(tree, OUTSIDE)]
    while left:
        node, own = left.pop()
        if isinstance(node, ast.ClassDef):
            own = INSIDE
        found += [(node.lineno, name) for name in _names(node, own) if _is_private(name)]
        left += [(child, own) for child in ast.iter_child_nodes(node)]
    return sorted(found)


def _is_private(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last.startswith("_") and not last.startswith("__") and last not in FOREIGN


def _names(node: ast.AST, own: frozenset[str]) -> Sequence[str]:
    """The names that a node uses of something else, public ones too."""
    if isinstance(node, ast.Attribute):
        is_own = isinstance(node.value, ast.Name) and node.value.id in own
        return () if is_own else (node.attr,)
    if isinstance(node, ast.ImportFrom):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in BY_NAME:
            return [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    return ()


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def test_tests_reach_nothing_private() -> None:
    found = {path: private_names(ast.parse(path.read_text())) for path in files()}
    counts = {str(path.relative_to(ROOT)): len(names) for path, names in found.items() if names}
    new = {name: found[ROOT / name] for name, count in counts.items() if count > LEFT.get(name, 0)}
    assert not new, f"make what they need public, or build it: {new}"
    assert counts == LEFT, "a number in LEFT is too large: take it down"


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("engine._running.loop", ["_running"]),
        ("engine.start()._running._core", ["_core", "_running"]),
        ("class A:\n    def f(self, other): self._own, other._own", ["_own"]),
        ("def f(self): self._patched", ["_patched"]),
        ("from rekindle.worker import _run, Worker", ["_run"]),
        ("patch.setattr(Writer, '_save', save)", ["_save"]),
        (
            "patch.setattr('rekindle.store.threads.writer.Writer._save', save)",
            ["rekindle.store.threads.writer.Writer._save"],
        ),
        ("x.__class__, message._request_id, getattr(x, '__name__')", []),
    ],
)
def test_private_names_are_found(code: str, names: list[str]) -> None:
    assert sorted(name for _, name in private_names(ast.parse(code))) == names
