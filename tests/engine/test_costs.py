"""The step-time model learns what it is shown and never predicts less time for more work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.engine.core.costs import StepCosts


def trained(base_s: float, row_s: float, row_context_s: float) -> StepCosts:
    costs = StepCosts()
    for turn in range(200):
        rows = (1, 4, 16, 64, 512)[turn % 5]
        contexts = rows * (100, 1000, 4000)[turn % 3]
        costs.observe(rows=rows, row_contexts=contexts, seconds=base_s + row_s * rows + row_context_s * contexts)
    return costs


@given(
    base_s=st.floats(0.001, 0.05),
    row_s=st.floats(1e-4, 5e-3),
    row_context_s=st.floats(0, 1e-6),
    start=st.integers(0, 4000),
)
def test_rows_within_fill_the_bound(base_s: float, row_s: float, row_context_s: float, start: int) -> None:
    costs = trained(base_s, row_s, row_context_s)
    rows = costs.rows_within(seconds=0.25, rows=3, row_contexts=300, start=start)
    assert rows >= 0

    def predicted(count: int) -> float:
        return costs.predict(rows=3 + count, row_contexts=300 + count * start + count * count // 2)

    assert predicted(rows) <= 0.25 + 1e-6 < predicted(rows + 2) + 2e-6


def test_it_learns_a_machine_that_is_ten_times_slower_than_the_prior() -> None:
    costs = trained(0.03, 0.01, 2e-7)
    assert costs.predict(rows=64, row_contexts=64_000) == pytest.approx(0.03 + 0.64 + 0.0128, rel=0.02)


def test_noise_never_makes_a_coefficient_negative() -> None:
    costs = StepCosts()
    for rows, seconds in ((1, 0.05), (512, 0.04), (1, 0.06), (256, 0.03)) * 20:
        costs.observe(rows=rows, row_contexts=rows * 10, seconds=seconds)
    assert costs.predict(rows=1000, row_contexts=10_000) >= costs.predict(rows=1, row_contexts=10) >= 0


def test_no_room_left_is_negative() -> None:
    assert trained(0.03, 0.001, 0).rows_within(seconds=0.02, rows=0, row_contexts=0, start=0) < 0
