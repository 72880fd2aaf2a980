"""What files of tests need, that `pytest --quick` imports nothing of it, and a server in front of another no models."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.needs import ROOT, imported_with, needs_of


@pytest.mark.parametrize(
    ("path", "needs"),
    [
        ("cache/test_pool.py", set()),
        ("text/test_normalise.py", set()),
        ("sessions/test_coordination_machine.py", set()),
        ("kv/test_q4h.py", {"torch"}),
        ("engine/test_scheduler.py", {"torch"}),  # its folder's conftest loads models
        ("test_package.py", {"process"}),
        ("server/test_kills.py", {"torch", "process", "campaign"}),
        ("store/test_crash.py", {"campaign"}),
        ("page", {"process", "browser"}),
    ],
)
def test_imports_say_what_is_needed(path: str, needs: set[str]) -> None:
    assert needs_of(ROOT / "tests" / path) == needs


@pytest.mark.parametrize("module", ["rekindle.server.serve", "rekindle_backends.assembly"])
def test_a_front_imports_no_code_of_models(module: str) -> None:
    names = imported_with(module)
    assert "rekindle.engine.components" in names and "torch" in names
    assert not [name for name in names if name.partition(".")[0] == "transformers"]


def test_the_quick_tests_import_none_of_it() -> None:
    code = (
        "import sys, pytest\n"
        "code = pytest.main(['--quick', '--collect-only', '-q', '-p', 'no:xdist', '-p', 'no:cacheprovider'])\n"
        "assert code == 0 and not {'torch', 'transformers', 'playwright'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
