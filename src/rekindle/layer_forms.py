"""Words for what the layers of a model compute, whatever computes them, and for the formats that weights are packed in.

Knows no tensors, modules or kernels.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

WeightFormat = Literal["bf16", "int8", "int4"]  # which bf16 weights are packed in
GridFormat = Literal["grid4", "grid8"]  # of weights that come as codes
Rounding = Literal["before the weight", "after the weight"]  # of a norm's quotient to bf16
Activation = Literal["silu", "gelu_tanh"]
GateActivation = Literal["silu", "gelu_tanh", "swish"]
ShareFormat = Literal["bf16", "fp32"]


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
