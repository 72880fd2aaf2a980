"""A module imports its own folder and lower floors only: the table in ARCHITECTURE.md is the law."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "rekindle"


def floors() -> dict[str, int]:
    """Folder or module directly under the package -> its floor."""
    rows = re.findall(r"^\| (\d+) \| ((?:`\w+` ?)+)\|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    return {name: int(floor) for floor, names in rows for name in re.findall(r"\w+", names)}


def imported(tree: ast.AST) -> Iterator[str]:
    """Names under `rekindle` that a module imports anywhere in its text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a module stands"
            if node.module == "rekindle":
                yield from (alias.name for alias in node.names)
            elif node.module and node.module.startswith("rekindle."):
                yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("rekindle."))


def violations(sources: dict[str, str], table: dict[str, int]) -> list[str]:
    """One line per import of a higher floor, or of another folder on the same one (floor 0 stays among itself)."""
    found = []
    for path, text in sources.items():
        home = path.split("/")[0].removesuffix(".py")
        for name in imported(ast.parse(text)):
            if name.startswith("__"):
                continue
            if table[name] > table[home] or (table[name] == table[home] > 0 and name != home and home != "cli"):
                found.append(f"{path} (floor {table[home]}) imports {name} (floor {table[name]})")
    return found


def test_imports_go_down() -> None:
    paths = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in paths}
    assert violations(sources, floors()) == []


def test_every_folder_and_module_has_a_floor() -> None:
    present = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert present - {"__init__"} <= set(floors())


def test_an_import_of_a_higher_floor_is_found() -> None:
    table = {"errors": 0, "cache": 2, "kv": 3, "cli": 9, "bench": 9}
    sources = {
        "cache/a.py": "from rekindle.kv.arena import KVArena\nfrom rekindle.errors import RekindleError",
        "kv/b.py": "def f():\n    import rekindle.cli",
        "cli.py": "from rekindle.bench import demo\nfrom rekindle import __version__",
    }
    assert violations(sources, table) == [
        "cache/a.py (floor 2) imports kv (floor 3)",
        "kv/b.py (floor 3) imports cli (floor 9)",
    ]


def test_the_cache_needs_numpy_only() -> None:
    code = (
        "import sys, rekindle.cache\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'safetensors', 'fastapi', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)
