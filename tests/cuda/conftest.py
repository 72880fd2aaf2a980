"""Kernels for cards, interpreted on a processor unless `make gpu` runs them on the card of this machine.

`test_card.py` and `test_real_card.py` are collected there alone, `test_interpreted.py` on a processor.
"""

from __future__ import annotations

import os

import pytest

IS_INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
collect_ignore = ["test_card.py", "test_real_card.py"] if IS_INTERPRETED else ["test_interpreted.py"]


@pytest.fixture(autouse=IS_INTERPRETED)
def many_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other, and takes as long for one of many rows."""
    monkeypatch.setattr("rekindle_cuda.attention.STORED_ROWS", 32)
    monkeypatch.setattr("rekindle_cuda.packing.ROWS", 128)
    monkeypatch.setattr("rekindle_cuda.packing.BLOCKS", 256)
