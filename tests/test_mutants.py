"""Mutants fit the code as it is: what they replace occurs exactly once, and the tests that must fail on them exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import ROOT
from tools.defects import MUTANTS
from tools.defects.mutant import Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits(mutant: Mutant, tmp_path: Path) -> None:
    for edit in mutant.edits:
        (tmp_path / edit.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / edit.path, tmp_path / edit.path)
    for edit in mutant.edits:
        edit.apply(tmp_path)
    for test in mutant.tests:
        path, *names = test.partition("[")[0].split("::")
        text = (ROOT / path).read_text()
        missing = [name for name in names if not re.search(rf"^(\s*def |class |){name}\b", text, re.MULTILINE)]
        assert not missing, f"{path} has no {missing}"


def test_the_cases_that_must_fail_exist(request: pytest.FixtureRequest) -> None:
    cases = {test for mutant in MUTANTS for test in mutant.tests if "[" in test}
    collected = {item.nodeid for item in request.session.items}
    files = sorted({case.partition("::")[0] for case in cases - collected})
    if files:  # not all tests run: ask for the rest
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", "-p", "no:cacheprovider", *files]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        collected |= set(found.splitlines())
    assert cases <= collected, sorted(cases - collected)
