"""A module imports its own folder and lower floors only, a room of a folder lower rooms only, and files never import
each other in a circle: the tables in ARCHITECTURE.md are the law."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import rekindle

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "rekindle"


def floors() -> dict[str, int]:
    """Folder or module directly under the package -> its floor."""
    rows = re.findall(r"^\| (\d+) \| ((?:`\w+` ?)+)\|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    return {name: int(floor) for floor, names in rows for name in re.findall(r"\w+", names)}


def rooms() -> dict[str, list[set[str]]]:
    """Folder with folders inside -> its rooms, the lowest first; "." is every file that no room names."""
    rows = re.findall(r"^\| `(\w+)` \| (`\S.*) \|$", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    return {name: [set(re.findall(r"`([\w.]+)`", room)) for room in row.split(" · ")] for name, row in rows}


def sources() -> dict[str, str]:
    """Path under the package -> text, of every module."""
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def module_of(path: str) -> str:
    """The dotted name of a file under the package; the package's own is "rekindle"."""
    return ".".join(["rekindle", *path.removesuffix(".py").removesuffix("__init__").strip("/").split("/")]).rstrip(".")


def imports(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> the modules it imports anywhere in its text, for type checkers too; a name counts as its module."""
    modules = {module_of(path): ast.parse(text) for path, text in sources.items()}
    found: dict[str, set[str]] = {}
    for module, tree in modules.items():
        names = set(_imported(tree))
        found[module] = {name if name in modules else name.rpartition(".")[0] for name in names} - {module}
    return found


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a module stands"
            if (node.module or "").split(".")[0] == "rekindle":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "rekindle")


def violations(sources: dict[str, str], table: dict[str, int]) -> list[str]:
    """One line per import of a higher floor, or of another folder on the same one (floor 0 stays among itself)."""
    found = []
    for module, names in imports(sources).items():
        home = module.split(".")[1] if module != "rekindle" else None
        for name in sorted({name.split(".")[1] for name in names if name != "rekindle"}) if home else ():
            if table[name] > table[home] or (table[name] == table[home] > 0 and name != home):
                found.append(f"{module} (floor {table[home]}) imports {name} (floor {table[name]})")
    return found


def room_violations(sources: dict[str, str], table: dict[str, list[set[str]]]) -> list[str]:
    """One line per import of a room of the same folder that is not below the module's own."""
    found = []
    for module, names in imports(sources).items():
        for name in sorted(names):
            mine, other = _room(module, table), _room(name, table)
            if mine and other and mine.folder == other.folder and mine != other and other.level >= mine.level:
                found.append(f"{module} imports {name}, of a room that is not below")
    return found


class Room(NamedTuple):
    """A place in a folder that has several."""

    folder: str
    name: str
    level: int


def _room(module: str, table: dict[str, list[set[str]]]) -> Room | None:
    """Where a module stands in its folder; None where that has no rooms, and for the folder's own `__init__`."""
    _, folder, name, *_ = [*module.split("."), "", ""]
    levels = table.get(folder, [])
    named = name if any(name in room for room in levels) else "."
    return next((Room(folder, named, level) for level, room in enumerate(levels) if name and named in room), None)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, directly or through others; each circle in order of names."""
    reach = {module: _reachable(graph, module) for module in graph}
    rings = {frozenset({module, *(name for name in reach[module] if module in reach[name])}) for module in graph}
    return sorted(sorted(ring) for ring in rings if len(ring) > 1)


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        new = graph.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def test_imports_go_down() -> None:
    assert violations(sources(), floors()) == []


def test_rooms_import_lower_rooms() -> None:
    assert room_violations(sources(), rooms()) == []


def test_files_import_each_other_in_no_circle() -> None:
    assert circles(imports(sources())) == []


def test_every_folder_with_folders_inside_has_its_rooms() -> None:
    inside = {
        folder.name: {path.name for path in folder.iterdir() if any(path.glob("*.py"))}
        for folder in PACKAGE.iterdir()
        if folder.is_dir()
    }
    table = rooms()
    assert {name for name, folders in inside.items() if folders} == set(table)
    for name, folders in inside.items():
        named = {room for level in table.get(name, []) for room in level} - {"."}
        files = {path.stem for path in (PACKAGE / name).glob("*.py")}
        assert folders <= named <= folders | files, name


def test_every_folder_and_module_has_a_floor() -> None:
    present = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert present - {"__init__"} <= set(floors())


def test_an_import_of_a_higher_floor_is_found() -> None:
    table = {"errors": 0, "cache": 2, "kv": 3, "bench": 8, "cli": 9}
    sources = {
        "cache/a.py": "from rekindle.kv.arena import KVArena\nfrom rekindle.errors import RekindleError",
        "kv/b.py": "def f():\n    import rekindle.cli",
        "cli.py": "from rekindle.bench import demo\nfrom rekindle import __version__",
    }
    assert violations(sources, table) == [
        "rekindle.cache.a (floor 2) imports kv (floor 3)",
        "rekindle.kv.b (floor 3) imports cli (floor 9)",
    ]


def test_an_import_of_a_room_that_is_not_below_is_found() -> None:
    table = {"server": [{"."}, {"openai", "page"}, {"app"}]}
    sources = {
        "server/gate.py": "from rekindle.server.page.page import shown\nfrom rekindle.cli import units",
        "server/app.py": "from rekindle.server.openai import calls\nfrom rekindle.server.app import create",
        "server/openai/calls.py": "from rekindle.server import gate\nfrom rekindle.server.openai import bodies",
        "server/page/page.py": "from rekindle.server.openai import calls",
    }
    assert room_violations(sources, table) == [
        "rekindle.server.gate imports rekindle.server.page.page, of a room that is not below",
        "rekindle.server.page.page imports rekindle.server.openai.calls, of a room that is not below",
    ]


def test_a_circle_is_found_however_it_is_imported() -> None:
    sources = {
        "kv/a.py": "if TYPE_CHECKING:\n    from rekindle.kv.b import B",
        "kv/b.py": "def f():\n    from rekindle.kv import c",
        "kv/c.py": "import rekindle.kv.a",
        "kv/d.py": "from rekindle.kv.a import A",
        "kv/__init__.py": "from rekindle.kv.d import D",
    }
    assert circles(imports(sources)) == [["rekindle.kv.a", "rekindle.kv.b", "rekindle.kv.c"]]


def test_the_cache_needs_numpy_only() -> None:
    code = (
        "import sys, rekindle.cache\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'safetensors', 'fastapi', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_the_package_shows_its_names_and_imports_none_of_them() -> None:
    code = (
        "import sys, rekindle\n"
        "shown = {'Engine', 'SamplingParams', 'Settings', 'Report', 'RekindleError', 'BadRequest', 'NotFound'}\n"
        "assert shown <= set(dir(rekindle)), dir(rekindle)\n"
        "import rekindle.cache\n"
        "loaded = {'rekindle.engine', 'rekindle.config', 'rekindle.errors', 'difflib'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_the_names_of_the_package_are_those_for_type_checkers_with_every_error() -> None:
    (block,) = [node for node in ast.parse(sources()["__init__.py"]).body if isinstance(node, ast.If)]
    assert set(_imported(block)) == {f"{module}.{name}" for name, module in rekindle.LAZY.items()}
    defined = {node.name for node in ast.parse(sources()["errors.py"]).body if isinstance(node, ast.ClassDef)}
    assert defined <= set(dir(rekindle))
    assert all(getattr(rekindle, name) is not None for name in dir(rekindle))
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        rekindle.Engin  # noqa: B018
