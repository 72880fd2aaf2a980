"""Words for what the layers of a model compute, whatever computes them, and for the formats that weights are packed in.

Knows no modules and no kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

WeightFormat = Literal["bf16", "int8", "int4"]  # which bf16 weights are packed in
GridFormat = Literal["grid4", "grid8"]  # of weights that come as codes
Rounding = Literal["before the weight", "after the weight"]  # of a norm's quotient to bf16
Activation = Literal["silu", "gelu_tanh"]
GateActivation = Literal["silu", "gelu_tanh", "swish"]
ShareFormat = Literal["bf16", "fp32"]
GROUP = 32  # values of a grid with one step
ZERO = 128  # the code of 0 in grid8


class Gate(NamedTuple):
    """How the values of an expert's first projection become those of the second one.

    `silu`, `gelu_tanh`: activation(gate) * up; `swish`: gate * sigmoid(alpha * gate) * (up + 1). Gates come first, or
    in turns with the others where they are `interleaved`. With a `limit` they are at most that, the others within it.
    """

    activation: GateActivation
    interleaved: bool = False
    limit: float | None = None
    alpha: float = 1.0


class Shares(NamedTuple):
    """Shares of experts: a softmax over the logits of all or of the chosen ones only, in this format."""

    chosen_only: bool
    share_format: ShareFormat


@dataclass(frozen=True, slots=True)
class Grid:
    """Some columns of weights: codes (uint8, [columns, depth]), steps and offsets (fp16, [columns, depth / 32]).

    `offsets`: None in grid8.
    """

    codes: np.ndarray
    steps: np.ndarray
    offsets: np.ndarray | None = None

    @property
    def format(self) -> GridFormat:
        """The format that holds it."""
        return "grid8" if self.offsets is None else "grid4"

    def values(self) -> np.ndarray:
        """What the codes stand for, rounded to fp32 once or, with offsets, twice: [columns, depth]."""
        steps, zero = np.repeat(self.steps.astype(np.float32), GROUP, axis=1), ZERO if self.offsets is None else 0
        found: np.ndarray = (self.codes.astype(np.float32) - zero) * steps
        return found if self.offsets is None else found + np.repeat(self.offsets.astype(np.float32), GROUP, axis=1)
