"""What a file of tests needs beyond Python and numpy, read from its imports and those of the conftests above it.

    torch      torch or transformers are imported with it
    process    other processes are started
    browser    Chromium is driven
    campaign   minutes: how much is killed, crashed or hurt is set by a variable of `make torture`

Each need is a mark of its tests (`pytest -m "not process"`). `pytest --quick` does not even import files that have one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = (ROOT / "src", *sorted(ROOT.glob("packages/*/src")))  # the core, and the wheels built on it
LAZY = tuple(f"rekindle.{name}" for name in ("Agent", "ChatResult", "Delta", "Engine", "Generation", "Report"))
NEEDS = {
    "torch": ("torch", "transformers", "safetensors.torch", *LAZY),
    "process": ("subprocess", "multiprocessing", "rekindle.harness.client.ServerProcess"),
    "browser": ("playwright",),
}
CAMPAIGN = re.compile(r'environ\.get\("(\w*KILLS|\w*RUNS|HURTS)"')
NO_IMPORTS = ast.expr, ast.expr_context, ast.arguments, ast.keyword, ast.alias, ast.withitem
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
OURS = {path.name: path.parent for place in SOURCES for path in place.iterdir() if path.is_dir()}
OURS |= dict.fromkeys(("benchmarks", "tests", "tools"), ROOT)


@cache
def needs_of(path: Path) -> frozenset[str]:
    """The needs of a file of tests, or of a folder; those of the conftests it is collected with are its own."""
    conftests = [folder / "conftest.py" for folder in (path, *path.parents) if folder.is_relative_to(ROOT / "tests")]
    needs = [_needs(_name(file)) for file in (path, *conftests) if file.is_file()]
    is_campaign = path.suffix == ".py" and CAMPAIGN.search(path.read_text()) is not None
    return frozenset({"campaign"} if is_campaign else ()).union(*needs)


def _name(path: Path) -> str:
    return ".".join(path.with_suffix("").relative_to(ROOT).parts)


@cache
def _needs(module: str) -> frozenset[str]:
    """What is needed by all that is imported with a module."""
    names = imported_with(module)
    return frozenset(
        need for need, packages in NEEDS.items() if any(_is_in(name, each) for name in names for each in packages)
    )


@cache
def imported_with(module: str) -> frozenset[str]:
    """Dotted names that are imported with a module, its own included: of ours, and of others by ours."""
    seen, left = set[str](), [module]
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        path = _path(name)
        left += () if path is None else imported(path, at_import=any(map(path.is_relative_to, SOURCES)))
    return frozenset(seen)


def _is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _path(name: str) -> Path | None:
    """The file of a module of ours, or of the one that has this name in it."""
    place = OURS.get(name.split(".")[0])
    if place is None:
        return None
    for module in (name, name.rpartition(".")[0]):
        base = place / module.replace(".", "/")
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.exists():
                return path
    return None


@cache
def imported(path: Path, *, at_import: bool) -> tuple[str, ...]:
    """Dotted names that a file imports, names inside of modules too; `at_import`: without those inside of functions."""
    return tuple(_imported(ast.parse(path.read_text()), at_import=at_import))


def _imported(node: ast.AST, *, at_import: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom) and child.module:
            yield child.module
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        elif not isinstance(child, NO_IMPORTS) and not (at_import and isinstance(child, FUNCTIONS)):
            yield from _imported(child, at_import=at_import)
