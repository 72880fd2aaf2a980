"""The tests that fail on mutants: those which `pytest --gate` runs beside the quick ones."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.needs import ROOT
from tools.defects import MUTANTS

NAMED = frozenset(test for mutant in MUTANTS for test in mutant.tests)


@cache
def _places() -> frozenset[Path]:
    files = {ROOT / test.partition("::")[0] for test in NAMED}
    return frozenset(files.union(*(file.parents for file in files)))


def has_killers(path: Path) -> bool:
    """Whether a file, or a folder, has a test that a mutant names."""
    return path in _places()


def is_killer(nodeid: str) -> bool:
    """Whether a mutant names a test: this case of it, all cases, its class, or its whole file."""
    test = nodeid.partition("[")[0]
    return not NAMED.isdisjoint((nodeid, test, test.rpartition("::")[0], test.partition("::")[0]))
