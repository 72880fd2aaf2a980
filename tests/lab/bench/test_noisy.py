"""`rekindle bench noisy`: what a tenant waits alone, and while another sends the worst bodies."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from rekindle.config import Settings
from rekindle.errors import ConfigError
from rekindle_lab.bench.server.attacks import attacks
from rekindle_lab.bench.server.noisy import NoisyBench, Noticed, lines, run_noisy, table

FILL = 1 << 12


def test_the_table_compares_the_waits_with_those_before_the_noise() -> None:
    noticed = Noticed(alone=[0.1, 0.2, 0.3], waits=[0.5, 0.7, 0.9], work=[0.2, 0.4], signs=[0.01], refused=4)
    shown = io.StringIO()
    Console(width=200, file=shown).print(table({"words": noticed}))
    row = next(line for line in shown.getvalue().splitlines() if "words" in line)
    assert [cell.strip() for cell in row.strip("│ ").split("│")][1:8] == [
        *("0.200 s", "0.30 s", "0.700 s", "0.90 s"),
        *("+0.500 s", "0.40 s", "4"),
    ]
    found = {line.arm: line for line in lines("words", noticed)}
    assert (found["wait alone"].median, found["wait"].median, found["wait"].detail["refused"]) == (0.2, 0.7, 4)


def test_every_attack_is_a_body_of_about_the_asked_size() -> None:
    large = {name for name, attack in attacks(FILL).items() if FILL <= len(attack.body) < 2 * FILL}
    assert {"words", "spaces", "nested lists", "picture", "agent's file", "api/chat"} <= {
        name.lstrip("/") for name in large
    }
    *chunks, last, _, _ = attacks(FILL)["one-byte chunks"].body.split(b"\r\n")
    sizes, parts = chunks[::2], chunks[1::2]
    assert last == b"0" and {*sizes} == {b"1"} and json.loads(b"".join(parts))["messages"]
    with pytest.raises(ConfigError, match="no arm 'wrods'; there are words, "):
        NoisyBench(only=("wrods",))


@pytest.mark.long
def test_the_whole_command_on_one_attack(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    options = NoisyBench(seconds=1.0, mebibytes=0.5, only=("GBNF that doubles",), out=out)
    assert run_noisy(Settings(), options, Console(quiet=True)) == 0
    found = {line["arm"]: line for line in map(json.loads, out.read_text().splitlines())}
    work = {"of it the server, alone", "of it the server"} if Path("/proc/self/stat").exists() else set[str]()
    assert set(found) == {"wait alone", "wait", "sign of life", "more memory", *work}
    assert found["wait"]["detail"]["refused"] == 0 and found["wait"]["detail"]["answers"].keys() <= {"400"}
