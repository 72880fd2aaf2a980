"""A module imports its own folder and lower floors only, a room of a folder lower rooms only, and files never import
each other in a circle: the tables in ARCHITECTURE.md are the law. The core imports no wheel that is built on it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest

import rekindle
from tests.needs import ROOT, SOURCES

PACKAGE = ROOT / "src" / "rekindle"
WHEELS = {path.name: path for place in SOURCES for path in place.iterdir() if path.is_dir() and path != PACKAGE}


def floors() -> dict[str, int]:
    """Folder or module directly under the package -> its floor."""
    rows = re.findall(r"^\| (\d+) \| ((?:`\w+` ?)+)\|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    return {name: int(floor) for floor, names in rows for name in re.findall(r"\w+", names)}


def rooms() -> dict[str, list[set[str]]]:
    """Package with folders inside, by its dotted name -> its rooms, the lowest first; "." is what no room names."""
    rows = re.findall(r"^\| `([\w.]+)` \| (`\S.*) \|$", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    named = ((name if name.split(".")[0] in WHEELS else f"rekindle.{name}", row) for name, row in rows)
    return {name: [set(re.findall(r"`([\w.]+)`", room)) for room in row.split(" · ")] for name, row in named}


@cache
def sources() -> dict[str, str]:
    """Path of every module of the core and of the wheels, relative to where its package lies -> text."""
    paths = ((place, path) for place in SOURCES for path in sorted(place.rglob("*.py")))
    return {path.relative_to(place).as_posix(): path.read_text() for place, path in paths}


@cache
def all_imports() -> dict[str, set[str]]:
    """`imports` of the sources."""
    return imports(sources())


def module_of(path: str) -> str:
    """The dotted name of a file; that of a package's `__init__` is the package's."""
    return ".".join(path.removesuffix(".py").removesuffix("__init__").strip("/").split("/"))


def imports(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> the modules it imports anywhere in its text, for type checkers too; a name counts as its module."""
    modules = {module_of(path): ast.parse(text) for path, text in sources.items()}
    roots = {"rekindle", *WHEELS}
    found: dict[str, set[str]] = {}
    for module, tree in modules.items():
        names = {name for name in _imported(tree) if name.split(".")[0] in roots}
        found[module] = {name if name in modules else name.rpartition(".")[0] for name in names} - {module}
    return found


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a module stands"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def violations(graph: dict[str, set[str]], table: dict[str, int]) -> list[str]:
    """One line per import of the core of a higher floor, or of another folder on the same one (floor 0 stays among
    itself)."""
    found = []
    for module, names in graph.items():
        package, home, *_ = [*module.split("."), ""]
        for name in sorted({name.split(".")[1] for name in names if name.startswith("rekindle.")}):
            if package != "rekindle" or not home:
                continue
            if table[name] > table[home] or (table[name] == table[home] > 0 and name != home):
                found.append(f"{module} (floor {table[home]}) imports {name} (floor {table[name]})")
    return found


def wheel_violations(graph: dict[str, set[str]]) -> list[str]:
    """One line per import of a wheel's package from outside of it: the core knows none, and they not each other."""
    edges = [(module, name) for module, names in graph.items() for name in sorted(names)]
    outside = [edge for edge in edges if edge[0].split(".")[0] != edge[1].split(".")[0] != "rekindle"]
    return [f"{module} imports {name}" for module, name in outside]


def room_violations(graph: dict[str, set[str]], table: dict[str, list[set[str]]]) -> list[str]:
    """One line per import of a room of the same folder that is not below the module's own."""
    found = []
    for module, names in graph.items():
        for name, folder in ((name, folder) for name in sorted(names) for folder in table):
            mine, other = _room(module, folder, table[folder]), _room(name, folder, table[folder])
            if mine and other and mine != other and other.level >= mine.level:
                found.append(f"{module} imports {name}, of a room that is not below")
    return found


class Room(NamedTuple):
    """A place in a folder that has several."""

    name: str
    level: int


def _room(module: str, folder: str, levels: list[set[str]]) -> Room | None:
    """Where a module stands in a folder; None outside of it, and for the folder's own `__init__`."""
    if not module.startswith(f"{folder}."):
        return None
    name = module.removeprefix(f"{folder}.").split(".")[0]
    named = name if any(name in room for room in levels) else "."
    return next((Room(named, level) for level, room in enumerate(levels) if named in room), None)


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
    assert violations(all_imports(), floors()) == []


def test_rooms_import_lower_rooms() -> None:
    assert room_violations(all_imports(), rooms()) == []


def test_files_import_each_other_in_no_circle() -> None:
    assert circles(all_imports()) == []


def test_the_core_imports_no_wheel_and_no_wheel_another() -> None:
    assert wheel_violations(all_imports()) == []


def test_every_folder_with_folders_inside_has_its_rooms() -> None:
    table, found = rooms(), set[str]()
    packages = [*(path for path in PACKAGE.iterdir() if path.is_dir()), *WHEELS.values()]
    for folder in [*packages, *(path for wheel in WHEELS.values() for path in wheel.iterdir() if path.is_dir())]:
        inside = {path.name for path in folder.iterdir() if any(path.glob("*.py"))}
        name = next(".".join(folder.relative_to(place).parts) for place in SOURCES if folder.is_relative_to(place))
        named = {room for level in table.get(name, []) for room in level} - {"."}
        assert inside <= named <= inside | {path.stem for path in folder.glob("*.py")}, name
        found |= {name} if inside else set()
    assert found == set(table)


def test_every_folder_and_module_has_a_floor() -> None:
    present = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert present - {"__init__"} <= set(floors())


def test_an_import_of_a_higher_floor_is_found() -> None:
    table = {"errors": 0, "cache": 2, "kv": 3, "bench": 8, "cli": 9}
    sources = {
        "rekindle/cache/a.py": "from rekindle.kv.arena import KVArena\nfrom rekindle.errors import RekindleError",
        "rekindle/kv/b.py": "def f():\n    import rekindle.cli",
        "rekindle/cli.py": "from rekindle.bench import demo\nfrom rekindle import __version__",
    }
    assert violations(imports(sources), table) == [
        "rekindle.cache.a (floor 2) imports kv (floor 3)",
        "rekindle.kv.b (floor 3) imports cli (floor 9)",
    ]


def test_an_import_of_a_room_that_is_not_below_is_found() -> None:
    table = {"rekindle.server": [{"."}, {"openai", "page"}, {"app"}]}
    sources = {
        "rekindle/server/gate.py": "from rekindle.server.page.page import shown\nfrom rekindle.cli import units",
        "rekindle/server/app.py": "from rekindle.server.openai import calls\nfrom rekindle.server.app import create",
        "rekindle/server/openai/calls.py": "from rekindle.server import gate\nfrom rekindle.server.openai import b",
        "rekindle/server/page/page.py": "from rekindle.server.openai import calls",
    }
    assert room_violations(imports(sources), table) == [
        "rekindle.server.gate imports rekindle.server.page.page, of a room that is not below",
        "rekindle.server.page.page imports rekindle.server.openai.calls, of a room that is not below",
    ]


def test_an_import_of_a_wheel_from_outside_is_found() -> None:
    graph = {
        "rekindle.cli.commands": {"rekindle_lab.cli", "rekindle.cli.why"},
        "rekindle_vllm.codec": {"rekindle_lab.bench", "rekindle_vllm.groups", "rekindle.kv.arena"},
    }
    assert wheel_violations(graph) == [
        "rekindle.cli.commands imports rekindle_lab.cli",
        "rekindle_vllm.codec imports rekindle_lab.bench",
    ]


def test_a_circle_is_found_however_it_is_imported() -> None:
    sources = {
        "rekindle/kv/a.py": "if TYPE_CHECKING:\n    from rekindle.kv.b import B",
        "rekindle/kv/b.py": "def f():\n    from rekindle.kv import c",
        "rekindle/kv/c.py": "import rekindle.kv.a",
        "rekindle/kv/d.py": "from rekindle.kv.a import A",
        "rekindle/kv/__init__.py": "from rekindle.kv.d import D",
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
    (block,) = [node for node in ast.parse(sources()["rekindle/__init__.py"]).body if isinstance(node, ast.If)]
    assert set(_imported(block)) == {f"{module}.{name}" for name, module in rekindle.LAZY.items()}
    defined = {node.name for node in ast.parse(sources()["rekindle/errors.py"]).body if isinstance(node, ast.ClassDef)}
    assert defined <= set(dir(rekindle))
    assert all(getattr(rekindle, name) is not None for name in dir(rekindle))
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        rekindle.Engin  # noqa: B018
