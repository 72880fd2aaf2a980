"""A defect: exact replacements in the code, and the tests that must notice."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Edit:
    """Replacement of `old`, which must occur in `file` exactly once.

    `file` is relative to the folder of `rekindle`; that of a wheel begins with its package, `rekindle_lab/cli/…`.
    """

    file: str
    old: str
    new: str

    @property
    def path(self) -> Path:
        """The file, relative to the tree."""
        wheel = re.match(r"rekindle_(\w+)/", self.file)
        return Path("packages", wheel[1], "src", self.file) if wheel else Path("src", "rekindle", self.file)

    def apply(self, tree: Path) -> None:
        """Change the file below `tree`; ValueError if `old` does not occur exactly once."""
        path = tree / self.path
        text = path.read_text("utf-8") if path.is_file() else ""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file}: found {text.count(self.old)} times: {self.old.strip()!r}")
        path.write_text(text.replace(self.old, self.new), "utf-8")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One defect, and the tests (pytest node ids) of which at least one must fail.

    `level`: that of the kernels without which no test can notice it, or "". `alone`: it is a race, which shows only
    while no other process needs the cores.
    """

    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    level: str = ""
    alone: bool = False

    @property
    def is_native(self) -> bool:
        """Whether kernels must be compiled for it."""
        return any(edit.file.startswith("compute/cpu/kernels/native/") for edit in self.edits)


def one(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    """Build a mutant of one replacement."""
    return Mutant(name, (Edit(file, old, new),), tests)
