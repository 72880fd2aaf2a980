"""Introduce plausible defects into the code and check that the tests catch them: `make mutants`.

    python -m tools.mutants                # all, two at a time, then races one by one
    python -m tools.mutants --only rope    # those with the word in their name

Each mutant is a few exact replacements in a copy of the tree and the narrowest tests that must fail on it, or hang.
First the same tests run on an unchanged copy and must pass, else failures would prove nothing. Exit code 1 if a mutant
survives, if the text it replaces does not occur exactly once, if kernels do not compile with it, or if its tests do not
run. Left out is what needs kernels that this processor does not run. The working tree is never touched.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rekindle.compute.cpu.kernels import build
from rekindle.compute.cpu.kernels.levels import LEVELS
from rekindle.compute.cpu.kernels.library import CPUINFO, instructions
from tools.defects import MUTANTS
from tools.defects.mutant import Mutant

ROOT = Path(__file__).parents[1]
COPIED = (
    "src",
    "packages",
    "benchmarks",
    "docs",
    "examples",
    "pocket",
    "tests",
    "tools",
    "pyproject.toml",
    "ARCHITECTURE.md",
    "README.md",
    "Makefile",
    "constraints.txt",
)
TIMEOUT_S = 280  # of a mutant's tests: what hangs is noticed, too
UNCHANGED_S = 3600  # of all of them together
Verdict = Literal["killed", "SURVIVED", "BROKEN"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a mutant; `detail` names the first failed test, or the problem."""

    name: str
    verdict: Verdict
    seconds: float
    detail: str


def copy_tree(target: Path) -> None:
    """Copy what the tests need, including the bundled model's weights."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name)
        elif source.is_file():
            shutil.copy2(source, target / name)


def compile_kernels(tree: Path) -> None:
    """Compile the kernels of a copy; ValueError if that fails."""
    kernels = tree / "src" / "rekindle" / "compute" / "cpu" / "kernels"
    for built in build.build(kernels, kernels / "native"):
        if built.path is None:
            raise ValueError(f"no kernels for {built.level}: {built.said}")


def run_tests(tree: Path, tests: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """Run pytest on the code below `tree` only, up to the first failure; return exit code (None: late) and output."""
    paths = (tree / "src", *tree.glob("packages/*/src"), tree / "pocket" / "src", tree)
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *dict.fromkeys(tests)]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"not finished after {timeout_s} s"
    return done.returncode, done.stdout + done.stderr


def first_red(output: str) -> str:
    """Return the first failed or broken test in pytest's summary."""
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return found[1].removeprefix("tests/") if found else output.strip()[-300:]


def try_mutant(mutant: Mutant) -> Outcome:
    """Apply a mutant to a copy and run its tests there."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rekindle-mutant-") as name:
        tree = Path(name)
        copy_tree(tree)
        try:
            for edit in mutant.edits:
                edit.apply(tree)
            if mutant.is_native:
                compile_kernels(tree)
        except ValueError as error:
            return Outcome(mutant.name, "BROKEN", time.monotonic() - began, str(error))
        code, output = run_tests(tree, mutant.tests, TIMEOUT_S)
    verdicts: dict[int, Verdict] = {0: "SURVIVED", 1: "killed"}
    verdict = "killed" if code is None or code < 0 else verdicts.get(code, "BROKEN")  # None: it hung; < 0: by a signal
    return Outcome(mutant.name, verdict, time.monotonic() - began, "" if code == 0 else first_red(output))


def unchanged_is_green(mutants: Sequence[Mutant]) -> bool:
    """Run every test named by a mutant on an unchanged copy; return whether all pass."""
    with tempfile.TemporaryDirectory(prefix="rekindle-mutant-") as name:
        copy_tree(Path(name))
        code, output = run_tests(Path(name), [test for mutant in mutants for test in mutant.tests], UNCHANGED_S)
    if code != 0:
        print(output[-3000:])
        print(f"the unchanged code fails its tests (pytest exit code {code}): mutants cannot be judged")
    return code == 0


def main() -> int:
    """Parse arguments, run the mutants, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run mutants with this in their name")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if given.only.lower() in mutant.name.lower()]
    if not chosen:
        parser.error(f"no mutant has {given.only!r} in its name")
    present = instructions(CPUINFO)
    mutants = [mutant for mutant in chosen if present.issuperset(LEVELS.get(mutant.level, ()))]
    if len(mutants) < len(chosen):
        print(f"{len(chosen) - len(mutants)} left out: this processor does not run their kernels")
    began = time.monotonic()
    if not unchanged_is_green(mutants):
        return 1
    outcomes = []
    for alone, jobs in ((False, given.jobs), (True, 1)):
        with ThreadPoolExecutor(jobs) as pool:
            for outcome in pool.map(try_mutant, [mutant for mutant in mutants if mutant.alone is alone]):
                outcomes.append(outcome)
                print(f"{outcome.verdict:<9}{outcome.seconds:5.0f} s  {outcome.name:<64} {outcome.detail}", flush=True)
    killed = sum(outcome.verdict == "killed" for outcome in outcomes)
    print(f"{killed} of {len(outcomes)} mutants killed in {time.monotonic() - began:.0f} s")
    return 0 if killed == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
