"""The states of recurrent layers in one step: read before a group of rows, kept after it, written when all went well.

Nothing is written while the model runs: a pass that fails, or a sequence whose numbers are not finite, leaves the state
before it. Knows neither what a state means nor who may use it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from rekindle.kv.arena import KVArena
from rekindle.kv.step_layout import Group, StatePlan


class StepStates:
    """The states of one step over an arena. Used by the thread that runs it."""

    def __init__(self, arena: KVArena, plan: StatePlan) -> None:
        self.plan = plan
        self._arena = arena
        self._kept: list[tuple[int, Group, tuple[Tensor, ...]]] = []
        self._last: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # of single segments, by layer and target
        self._are_finite: list[tuple[Group, Tensor]] = []

    def load(self, layer_index: int, group: Group) -> tuple[Tensor, ...]:
        """Copy the tensors of a layer's state before a group, each [segments, *shape]."""
        sources = [segment.source for segment in group.segments]
        kept = self._last.get((layer_index, sources[0])) if len(sources) == 1 and sources[0] is not None else None
        if kept is not None:
            return tuple(tensor.clone() for tensor in kept)
        rows = torch.tensor(sources, device=self._arena.device)
        return tuple(tensor.index_select(0, rows) for tensor in self._arena.states(layer_index))

    def keep(self, layer_index: int, group: Group, tensors: tuple[Tensor, ...]) -> None:
        """Take over the tensors of a layer's state after a group, each [segments, *shape]; `commit` writes them."""
        self._kept.append((layer_index, group, tensors))
        if len(group.segments) == 1:
            self._last[layer_index, group.segments[0].target] = tensors
        self._are_finite += [
            (group, tensor.flatten(1).sum(1, dtype=_sum_dtype(tensor)).isfinite()) for tensor in tensors
        ]

    @property
    def are_finite(self) -> list[Tensor]:
        """Whether the states are finite that were kept so far, bool [segments] for each tensor."""
        return [are_finite for _, are_finite in self._are_finite]

    def failed_spans(self, read: Sequence[np.ndarray]) -> set[int]:
        """Spans with a state that is not finite, by `are_finite` as read."""
        return {
            segment.span
            for (group, _), are_finite in zip(self._are_finite, read, strict=True)
            for segment, is_finite in zip(group.segments, are_finite, strict=True)
            if not is_finite
        }

    def commit(self, failed: Collection[int]) -> None:
        """Write what was kept, but for spans that failed: all of it, or nothing if memory for that is short."""
        ready: list[tuple[Tensor, Tensor, Tensor]] = []
        for layer_index, group, tensors in self._kept:
            good = [at for at, segment in enumerate(group.segments) if segment.span not in failed]
            targets = [group.segments[at].target for at in good]
            at = torch.tensor(targets, dtype=torch.int64, device=self._arena.device)
            chosen = tensors if len(good) == len(group.segments) else tuple(tensor[good] for tensor in tensors)
            ready += ((rows, at, new) for rows, new in zip(self._arena.states(layer_index), chosen, strict=True))
        for rows, at, new in ready:
            rows.index_copy_(0, at, new)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    """A dtype in which sums of finite values stay finite."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
