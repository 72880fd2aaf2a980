"""A runner whose steps are computed in order on a thread of their own, as those of a card are on its stream."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from rekindle.kv.arena import KVArena
from rekindle.model.batch import SequenceStep
from rekindle.model.drawing import Drawing, Drawn
from rekindle.model.loaded import LoadedModel
from rekindle.model.runner import LaunchedStep, ModelRunner
from rekindle.model.sampler import Draw


class DrawingElsewhere(Drawing):
    """A drawing that the thread makes."""

    def __init__(self, made: Future[Drawing]) -> None:
        self.made = made

    def results(self) -> list[Drawn | None]:
        return self.made.result().results()

    @property
    def is_redrawn(self) -> bool:
        return self.made.result().is_redrawn


class StepElsewhere:
    """A step that the thread launches."""

    def __init__(self, thread: ThreadPoolExecutor, launched: Future[LaunchedStep]) -> None:
        self.was_waited_for = False
        self._thread, self._launched = thread, launched

    def wait(self) -> frozenset[int]:
        self.was_waited_for = True
        return self._launched.result().wait()

    @property
    def logits(self) -> torch.Tensor:
        return self._launched.result().logits

    def draw(self, draws: Sequence[Draw]) -> Drawing:
        return DrawingElsewhere(self._thread.submit(lambda: self._launched.result().draw(draws)))


class RunnerElsewhere:
    """As `ModelRunner`. `num_ahead` counts the steps that were launched before the last was waited for; `last`: of all
    steps."""

    computes_ahead = True

    def __init__(self, loaded: LoadedModel, arena: KVArena) -> None:
        self.num_ahead = 0
        self.last: StepElsewhere | None = None
        self._runner = ModelRunner(loaded, arena)
        self._thread = ThreadPoolExecutor(1)

    @property
    def model_s(self) -> float:
        return self._runner.model_s

    def launch(self, steps: Sequence[SequenceStep]) -> StepElsewhere:
        self.last = StepElsewhere(self._thread, self._thread.submit(self._runner.launch, _kept(steps)))
        return self.last

    def launch_after(self, steps: Sequence[SequenceStep], drawing: Drawing, places: Sequence[int]) -> StepElsewhere:
        assert isinstance(drawing, DrawingElsewhere)
        self.num_ahead += 1
        kept, made = _kept(steps), drawing.made
        launched = self._thread.submit(lambda: self._runner.launch_after(kept, made.result(), places))
        self.last = StepElsewhere(self._thread, launched)
        return self.last

    def forward(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        launched = self.launch(steps)
        launched.wait()
        return launched.logits

    def rest(self) -> None:
        self._runner.rest()


def _kept(steps: Sequence[SequenceStep]) -> list[SequenceStep]:
    """The steps as they are now: the host goes on while the thread computes."""
    return [replace(step, token_ids=np.array(step.token_ids), blocks=list(step.blocks)) for step in steps]
