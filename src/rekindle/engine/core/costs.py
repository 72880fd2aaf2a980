"""Step time model: a + b * rows + c * rows * context, fitted as the engine runs.

Exponentially weighted least squares over roughly the last hundred steps; a negative coefficient (noise) is held at
zero and the others fitted again. Knows no requests.
"""

from __future__ import annotations

import numpy as np

_DECAY = 0.98


class StepCosts:
    """Predicts the seconds of a step from its rows and the sum over rows of the context each attends to."""

    def __init__(self, *, base_s: float = 0.005, row_s: float = 0.001, row_context_s: float = 1e-7) -> None:
        self._coefficients = np.array([base_s, row_s, row_context_s])
        self._scale = np.array([1.0, 64.0, 64.0 * 1024.0])  # puts the three columns on one footing
        prior = 1e-3
        self._gram = np.eye(3) * prior
        self._moment = self._gram @ (self._coefficients * self._scale)

    def observe(self, *, rows: int, row_contexts: int, seconds: float) -> None:
        """Learn from one finished step."""
        # Relative errors count: a decode step of 30 ms must not be drowned out by a chunk of 1 s.
        weight = 1.0 / max(seconds, 1e-4)
        x = np.array([1.0, rows, row_contexts]) / self._scale * weight
        self._gram = self._gram * _DECAY + np.outer(x, x)
        self._moment = self._moment * _DECAY + x
        self._coefficients = self._solve() / self._scale

    def _solve(self) -> np.ndarray:
        active = [0, 1, 2]
        solution = np.zeros(3)
        while active:
            gram = self._gram[np.ix_(active, active)]
            # relative to the entries: steps of equally many rows make the columns collinear to the last bit
            gram = gram + np.eye(len(active)) * 1e-9 * max(1.0, float(np.trace(gram)))
            solved = np.linalg.solve(gram, self._moment[active])
            if (solved >= 0).all():
                solution[active] = solved
                break
            active = [index for index, value in zip(active, solved, strict=True) if value > 0]
        return solution

    def predict(self, *, rows: int, row_contexts: int) -> float:
        """Return the expected seconds of a step; zero rows cost the base."""
        a, b, c = self._coefficients
        return float(a + b * rows + c * row_contexts)

    def predict_each(self, *, rows: np.ndarray, row_contexts: int) -> np.ndarray:
        """Return the expected seconds of a step for each number of rows; float64 [len(rows)]."""
        a, b, c = self._coefficients
        seconds: np.ndarray = a + b * rows + c * row_contexts
        return seconds

    def prefill(self, num_tokens: int, start: int) -> float:
        """Return the expected seconds of computing `num_tokens` of a prompt from position `start` on, alone."""
        contexts = num_tokens * start + num_tokens * num_tokens // 2
        return self.predict(rows=num_tokens, row_contexts=contexts) if num_tokens > 0 else 0.0

    def rows_within(self, *, seconds: float, rows: int, row_contexts: int, start: int) -> int:
        """Return how many rows of a sequence, from position `start`, fit next to the given ones; may be negative.

        n rows at context start..start+n cost b*n + c*(n*start + n*n/2).
        """
        _, b, c = (float(x) for x in self._coefficients)
        left = seconds - self.predict(rows=rows, row_contexts=row_contexts)
        linear, square = b + c * start, c / 2
        if left <= 0:
            return -1
        if square < 1e-15:
            return int(left / max(linear, 1e-9))
        return int((-linear + (linear * linear + 4 * square * left) ** 0.5) / (2 * square))
