"""What tests need beyond Python's packages, each with what installs it: where one is missing, its tests are skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.needs import ROOT

# Of each the names that it goes by, and what installs it.
PROGRAMS: Mapping[tuple[str, ...], str] = {
    ("chromium", "chromium-browser", "google-chrome", "chrome"): "apt-get install chromium",
    ("nginx",): "apt-get install nginx-light",
    ("caddy",): "apt-get install caddy",
}
MORE_PLACES = ("/usr/sbin", "/opt/homebrew/bin")
KERNELS = ROOT / "src" / "rekindle" / "compute" / "cpu" / "kernels"


def find(*names: str) -> str | None:
    """The first of these programs that is there."""
    places = os.pathsep.join([os.environ.get("PATH", ""), *MORE_PLACES])
    return next((found for name in names if (found := shutil.which(name, path=places))), None)


def program(name: str) -> str:
    """A program of the table; the test is skipped without it."""
    names, way = next((names, way) for names, way in PROGRAMS.items() if name in names)
    found = find(*names)
    if found is None:
        pytest.skip(f"no {name}: {way}, as .ci/run does")
    return found


def has_kernels(folder: Path = KERNELS) -> bool:
    """Whether kernels of this tree are compiled."""
    return any(folder.glob("librekindle-*"))


def missing() -> list[str]:
    """What is not there, each with what to do about it."""
    lacking = [f"{names[0]} ({way})" for names, way in PROGRAMS.items() if find(*names) is None]
    return lacking + ([] if has_kernels() else ["compiled kernels (make kernels)"])
