"""Every kernel is compiled for the kinds of cards that people own, and fits on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

CARDS = ("86", "80", "89", "90", "120")
MOST_SHARED = 99 << 10  # of a program, in bytes: what 86, 89 and 120 have
MOST_SPILLED = 16  # bytes of a thread
KERNELS = {
    *("store_kernel", "rotate_kernel", "attend_kernel", "join_kernel", "widen_kernel"),
    *("add_norm_kernel", "gate_kernel", "place_kernel"),
    *("round_kernel", "group_kernel", "multiply_kernel"),
}


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    """What the compiler makes, in a process of its own: in this one Triton interprets."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda.compiled", *CARDS],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_is_compiled_for_every_kind_of_card(lines: list[dict[str, Any]]) -> None:
    assert {line["sm"] for line in lines} == set(map(int, CARDS))
    for card in map(int, CARDS):
        assert {line["kernel"] for line in lines if line["sm"] == card} == KERNELS


def test_registers_and_shared_memory_are_enough(lines: list[dict[str, Any]]) -> None:
    assert max(line["shared"] for line in lines) <= MOST_SHARED
    assert [line for line in lines if line["spilled"] > MOST_SPILLED] == []


def test_stored_values_are_read_many_bytes_at_a_time(lines: list[dict[str, Any]]) -> None:
    """A tile has 4096 bytes or more of codes; single bytes are scales of a few."""
    assert max(line["bytewise"] for line in lines if line["kernel"] == "attend_kernel") <= 32


def test_rows_are_read_many_numbers_at_a_time(lines: list[dict[str, Any]]) -> None:
    assert {line["narrow"] for line in lines if line["kernel"] in ("add_norm_kernel", "gate_kernel")} == {0}


def test_weights_are_copied_sixteen_bytes_at_a_time(lines: list[dict[str, Any]]) -> None:
    """In tiles for few rows and for many, of int8 and int4; what is fetched byte by byte are a few multipliers."""
    products = [line for line in lines if line["kernel"] == "multiply_kernel" and line["layer"].startswith("4096")]
    assert {line["rows"] for line in products} == {16, 32, 64, 128}
    assert {line["scattered"] for line in products} == {0} and max(line["bytewise"] for line in products) <= 2
