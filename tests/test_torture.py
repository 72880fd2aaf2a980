"""`make torture` runs every test whose length its variables set: a file or a name that it leaves out runs as briefly
as in every other run, which nobody sees."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
COMMAND = MAKEFILE[MAKEFILE.index("torture: ") : MAKEFILE.index("tools/soak.py")].replace("\\\n", " ")
WORDS = re.findall(r"-k '([^']+)'", COMMAND)[0].lower().split(" or ")
PLACES = re.findall(r"tests/\S+", COMMAND)
VARIABLES = re.findall(r"(\w+)=\$\(\1\)", COMMAND)


def scaled(path: Path) -> set[str]:
    """The tests of a file that one of the variables makes longer."""
    text = path.read_text()
    if not any(variable in text for variable in VARIABLES):
        return set()
    tree = ast.parse(text)
    names = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and any(f"'{variable}'" in ast.dump(node.value) for variable in VARIABLES)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]
    used = {each.name: {node.id for node in ast.walk(each) if isinstance(node, ast.Name)} for each in functions}
    return {test for test, ids in used.items() if names & ids}


ALL = {path.relative_to(ROOT).as_posix(): scaled(path) for path in sorted(ROOT.glob("tests/**/test_*.py"))}
FILES = {path: names for path, names in ALL.items() if names}


def test_there_are_such_tests() -> None:
    assert {"KILLS", "HURTS", "CRASH_RUNS"} <= set(VARIABLES) and len(FILES) > 5


@pytest.mark.parametrize("path", FILES)
def test_each_of_them_is_run(path: str) -> None:
    assert any(path == place or path.startswith(f"{place}/") for place in PLACES), f"{path} is not run"
    keywords = {name: f"{path} {name}".lower() for name in FILES[path]}
    assert [name for name, text in keywords.items() if not any(word in text for word in WORDS)] == []
