"""A model's own attention, in a precision above its own: what the trial compares with.

Owns how it is called: by a name of transformers that gets the masks of its eager attention, and calls the function that
the model's own module has for that. Each call computes twice: in fp32, whose result the layer gets, and in the model's
dtype, which shows how much this attention rounds. The second is of the last rows alone, as torch may take ten times as
long for it. So one pass gives, layer by layer, queries, keys and values with the right result, and no rounding of an
earlier layer is in it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from rekindle.errors import ModelRefused
from rekindle.model.adapter import STEP_KEYWORD, passed_step

OWN_NAME = "rekindle-own"
LAST_ROWS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """What one attention call gives: `exact` [rows, heads, v_dim], and how far from it the model's dtype is."""

    exact: torch.Tensor
    rounding: torch.Tensor  # [last rows, heads], as `distances` gives it


@dataclass(slots=True)
class OwnPass:
    """The attention calls of one pass over one sequence, in their order."""

    calls: list[Attended] = field(default_factory=list)

    def attend(
        self, module: Any, states: Sequence[torch.Tensor], mask: torch.Tensor | None, keywords: dict[str, Any]
    ) -> torch.Tensor:
        """Compute one call over query, key and value [1, heads, rows, size], and keep it: [1, rows, heads, v_dim]."""
        own = vars(sys.modules[type(module).__module__]).get("eager_attention_forward")
        if own is None:
            raise ModelRefused(f"{type(module).__name__} has no eager attention of its own to compare with")
        exact = own(module, *map(_wide, states), None if mask is None else _wide(mask), **keywords)[0]
        last, (query, key, value) = slice(-LAST_ROWS, None), states
        last_mask = None if mask is None else mask[..., last, :]
        rounded = own(module, query[..., last, :], key, value, last_mask, **keywords)[0]
        self.calls.append(Attended(exact[0], distances(rounded[0], exact[0, last])))
        passed_on: torch.Tensor = exact.to(rounded.dtype)
        return passed_on


def own_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as the model's own code does, for the `OwnPass` in `kwargs`."""
    recorded: OwnPass = passed_step(kwargs)
    return recorded.attend(module, (query, key, value), attention_mask, kwargs), None


def own_logits(model: Any, ids: torch.Tensor, num_rows: int, recorded: OwnPass | None = None) -> torch.Tensor:
    """The logits [num_rows, vocab] of the last rows of `ids`, by the implementation of attention that is set."""
    keywords = {} if recorded is None else {STEP_KEYWORD: recorded}
    kept = torch.arange(len(ids) - num_rows, len(ids), device=model.device)  # for a number Gemma 4 drops other rows
    with torch.inference_mode():
        output = model(input_ids=ids[None].to(model.device), use_cache=False, logits_to_keep=kept, **keywords)
    logits: torch.Tensor = output.logits[0]
    return logits[-num_rows:]  # a head without `logits_to_keep` returns every row


def register_own_attention() -> None:
    """Register it with transformers. Safe to repeat."""
    AttentionInterface.register(OWN_NAME, own_attention)
    AttentionMaskInterface.register(OWN_NAME, eager_mask)


def distances(ours: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Of vectors [..., size], the norm of the difference over that of `exact`."""
    wide = torch.float64 if exact.dtype == torch.float64 else torch.float32
    exact = exact.to(wide)
    return (ours.to(wide) - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-30)


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.float()
