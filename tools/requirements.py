"""Run the commands that docs/requirements.md names: what must hold is shown by what ran, not by the page.

    python -m tools.requirements              # all rows, one after the other
    python -m tools.requirements 6 13 E       # rows by number, or all of a part
    python -m tools.requirements --tests      # their tests only, without what measures

Prints a line for each command with its seconds; the output of one that fails follows. Exit code 1 if one failed.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "requirements.md"
ELSEWHERE = ("make",)  # in an environment or on a machine of their own


@dataclass(frozen=True, slots=True)
class Requirement:
    """A row of the page: its part, its number, and the commands that show it."""

    part: str
    number: int
    commands: tuple[str, ...]


def requirements(page: str) -> list[Requirement]:
    """The rows of a page in order."""
    found, part = [], ""
    for line in page.splitlines():
        if head := re.match(r"## ([A-Z])\. ", line):
            part = head[1]
        elif row := re.match(r"\| (\d+) \|", line):
            shown_by = line.split(" | ")[2]
            found.append(Requirement(part, int(row[1]), tuple(re.findall(r"`(.+?)`", shown_by))))
    return found


def is_tests(command: str) -> bool:
    return command.startswith("tests/")


def arguments(command: str) -> list[str]:
    """The program and its arguments, run by this Python and the commands next to it."""
    first, *rest = shlex.split(command)
    if is_tests(command):
        return [sys.executable, "-m", "pytest", "-q", first, *rest]
    program = {"python": sys.executable, "rekindle": str(Path(sys.executable).with_name("rekindle"))}
    return [program[first], *rest]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="numbers, or letters of parts [all]")
    parser.add_argument("--tests", action="store_true", help="without what measures")
    options = parser.parse_args()
    rows = requirements(PAGE.read_text())
    known = {str(row.number) for row in rows} | {row.part for row in rows}
    if unknown := set(options.rows) - known:
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    failed = 0
    done = dict[str, bool]()
    for row in rows:
        if options.rows and not {str(row.number), row.part} & set(options.rows):
            continue
        for command in row.commands:
            if command in done or command.startswith(ELSEWHERE) or (options.tests and not is_tests(command)):
                continue
            began = time.monotonic()
            ran = subprocess.run(arguments(command), cwd=ROOT, capture_output=True, text=True)
            done[command] = ran.returncode == 0
            failed += not done[command]
            verdict = "passed" if done[command] else "FAILED"
            print(f"{row.number:3d} {verdict} {time.monotonic() - began:6.1f} s  {command}", flush=True)
            if not done[command]:
                print(ran.stdout[-4000:], ran.stderr[-4000:], sep="\n", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
