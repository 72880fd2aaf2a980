"""`python -m benchmarks`: its commands, and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from benchmarks.commands import app

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **env: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", **env}).invoke(app, arguments)


def test_it_runs_from_the_root_of_the_repository() -> None:
    command = [sys.executable, "-m", "benchmarks", "match", "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "python -m benchmarks match" in result.stdout and "--hot-bytes" in result.stdout


def test_flags_that_mean_nothing_to_a_command_are_refused() -> None:
    result = run("match", "--hot-bytes", "1GiB", "--threads", "2")
    assert (result.exit_code, "--threads, --hot-bytes" in result.output) == (2, True), result.output


def test_matching_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "lines"
    # a variable is written for all commands: it is no reason to refuse one
    result = run("match", "--short", "3", "--long", "1", "--repeats", "1", "--out", str(out), REKINDLE_PORT="1")
    assert result.exit_code == 0, result.output
    assert all(json.loads(line)["measure"].startswith("match") for line in out.read_text().splitlines())


def test_vllm_is_measured_in_an_environment_of_its_own() -> None:
    result = run("vllm", "--python", "/nowhere/python")
    assert result.exit_code != 0 and "make fleet-env" in result.output, result.output
