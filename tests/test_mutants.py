"""Mutants fit the code as it is: what they replace occurs exactly once, and the tests that must fail on them exist."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.needs import ROOT
from tools.defects import MUTANTS
from tools.defects.mutant import Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits(mutant: Mutant, tmp_path: Path) -> None:
    for edit in mutant.edits:
        source = Path("src", "rekindle", edit.file)
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / source, tmp_path / source)
    for edit in mutant.edits:
        edit.apply(tmp_path)
    for test in mutant.tests:
        path, *names = test.partition("[")[0].split("::")
        text = (ROOT / path).read_text()
        missing = [name for name in names if not re.search(rf"^(\s*def |class |){name}\b", text, re.MULTILINE)]
        assert not missing, f"{path} has no {missing}"
