"""The bench of the cache on small figures: that it finds what it stored, and that a missed target is called so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.cache.bench import CacheBench
from benchmarks.cache.pool import Chains
from benchmarks.cache.rows import Part, counted_bytes, least, most, table
from benchmarks.cache.trie import LONG, SHAPES, Library, Shape
from benchmarks.commands import app
from rekindle.cache.blocks.hashing import block_hash
from rekindle.errors import ConfigError

SMALL = ["--sequences", "120", "--tokens", "20", "--blocks", "400", "--repeats", "2"]


def test_every_part_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "lines"
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["cache", *SMALL, "--out", str(out)])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    measures = [line["measure"] for line in lines]
    assert len(set(measures)) == len(measures) == 3 + 2 * 10 + 3 * 9
    for needed in (
        "hashing: blocks of 16",
        "pool, blocks of 64: allocate, evicting",
        "pool, blocks of 16: find_child",
        "trie, conversations: find 1,000 ids, stored",
        "trie, nine tenths: memory (121 sequences)",
    ):
        assert needed in measures
    assert all(len(line["values"]) == 2 for line in lines if line["unit"] == "µs")
    assert {line["detail"].get("target") for line in lines} == {"≥ 20", "≤ 3", "≤ 300", "≤ 50", "≤ 1000", None}
    assert "targets met" in result.output
    by_measure = {line["measure"]: line for line in lines}
    for size in (16, 64):
        without = by_measure[f"pool, blocks of {size}: block without {4 * size} bytes of ids"]
        whole = by_measure[f"pool, blocks of {size}: block with its ids"]
        assert whole["values"][0] == pytest.approx(without["values"][0] + 4 * size)
        assert {line["detail"]["target"] for line in (without, whole)} == {"≤ 300"}
    assert "…" not in result.output, "a row is wider than a terminal"


def test_one_part_alone(tmp_path: Path) -> None:
    out = tmp_path / "lines"
    result = CliRunner().invoke(app, ["cache", *SMALL, "--only", "hashing", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert {json.loads(line)["unit"] for line in out.read_text().splitlines()} == {"M tokens/s"}


def test_a_part_that_is_not_there_is_refused() -> None:
    result = CliRunner().invoke(app, ["cache", "--only", "disk"])
    assert result.exit_code == 2 and "no part disk: trie, pool, hashing" in result.output
    none: list[dict[str, Any]] = [{"sequences": 0}, {"tokens": 0}, {"blocks": 0}, {"repeats": 0}]
    for options in none:
        with pytest.raises(ConfigError, match="at least"):
            CacheBench(**options)


def test_the_median_decides_whether_a_target_is_met() -> None:
    part = Part("part")
    slow = part.row("slow", "µs", [1, 4, 5], most(3))
    fast = part.row("fast", "µs", [1, 2, 9], most(3))
    many = part.row("many", "M tokens/s", [19, 20, 21], least(20))
    few = part.row("few", "M tokens/s", [10, 19.9, 30], least(20))
    free = part.row("free", "µs", [1])
    assert [row.verdict for row in (slow, fast, many, few, free)] == ["missed", "met", "met", "missed", ""]
    console = Console(width=100, record=True, quiet=False)
    console.print(table([slow, many]))
    shown = console.export_text()
    assert "missed" in shown and "5.00" in shown, "the worst of what should be small is the largest"
    assert "19.00" in shown, "the worst of what should be large is the smallest"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_distinct_ids_are_those_that_the_trie_keeps(shape: Shape) -> None:
    library = Library(shape, 200, 40, seed=3)
    library.fill(lambda numbers, doing: numbers)
    prefixes = {
        bytes(ids[:end])
        for key, _ in library.trie.items()
        for ids in [np.asarray(key)]
        for end in range(1, len(ids) + 1)
    }
    assert library.num_distinct == len(prefixes)
    assert len(library.long) == LONG * 40
    assert all(ids in library.trie for ids in library.sample) and library.sample
    library.trie.check()


def test_chains_are_named_as_the_pool_names_them() -> None:
    chains = Chains.random(np.random.default_rng(0), 70, 4)
    for name, parent, ids in zip(chains.hashes, chains.parents, chains.ids, strict=True):
        assert block_hash(parent, ids) == name


def test_bytes_are_counted_while_they_are_held() -> None:
    """Threads that earlier tests have left in this process allocate a little meanwhile."""
    with counted_bytes() as held:
        kept = bytearray(1 << 20)
        assert 0 <= held() - (1 << 20) < 100_000
        del kept
        assert held() < 100_000
