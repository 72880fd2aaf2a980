"""A step-time model that learns nothing: what a test says a row costs, it costs."""

from __future__ import annotations

from rekindle.engine.core.costs import StepCosts


class FixedCosts(StepCosts):
    """Keeps its coefficients whatever was measured."""

    def observe(self, *, rows: int, row_contexts: int, seconds: float) -> None:
        """Learn nothing."""
