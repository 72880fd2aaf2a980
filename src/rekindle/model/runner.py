"""The only caller of the transformers model while serving: a list of sequence steps in, a launched step out.

Owns the paged attention over the arena. Steps are independent: only the arena's bytes are kept between two
calls. KV that is not finite is reported per sequence step, so that one request fails and not the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from rekindle.kv.arena import KVArena
from rekindle.kv.attention import PagedAttention
from rekindle.kv.plan import AttentionPlan
from rekindle.kv.states import StepStates
from rekindle.kv.step_layout import StepLayout
from rekindle.model.adapter import AttentionCall, run_model
from rekindle.model.batch import ForwardBatch, filled_up
from rekindle.model.batch import SequenceStep as SequenceStep
from rekindle.model.drawing import Drawing
from rekindle.model.loaded import LoadedModel
from rekindle.model.sampler import Draw
from rekindle.model.transfer import Readback


class PagedStep:
    """Writes each layer's K and V to the arena, then attends to what is stored there."""

    recurrent = None

    def __init__(self, paged: PagedAttention, plan: AttentionPlan) -> None:
        self.paged, self.plan = paged, plan
        self.states = StepStates(paged.arena, plan.layout.states) if paged.arena.layout.states else None

    def write(self, layer_index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Encode and scatter K and V [rows, kv_heads, dim]."""
        self.paged.write(layer_index, k, v, self.plan)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attend to stored KV: [rows, heads, v_dim]. fp16, which only quantised checkpoints keep, attends in fp32."""
        attended = self.paged.attend(
            call.kv_index,
            call.q.float() if call.q.dtype == torch.float16 else call.q,
            self.plan,
            scaling=call.scaling,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )
        return call.expanded(attended.to(call.q.dtype))


class LaunchedStep:
    """A step of torch's; `carrier` has its plan and its states, and the `runner` gets the seconds of waiting."""

    def __init__(
        self, runner: ModelRunner, steps: Sequence[SequenceStep], carrier: PagedStep, logits: torch.Tensor
    ) -> None:
        self.logits = logits
        self._drawing: Drawing | None = None  # the first, which takes along what `wait` wants
        self._runner, self._steps, self._carrier = runner, steps, carrier

    def wait(self) -> frozenset[int]:
        """As `Step.wait`: states are written now, but for steps that failed."""
        return self._failed

    @cached_property
    def _failed(self) -> frozenset[int]:
        began = self._runner.clock()
        states = self._carrier.states
        with torch.inference_mode():
            read = Readback(self._judged).arrays() if self._drawing is None else self._drawing.along()
            worst, largest, *are_finite = read
            spans = set(self._carrier.plan.failed_spans(worst))
            if states is not None:
                spans |= states.failed_spans(are_finite)
            failed = _failed_steps(self._steps, spans, largest)
            if states is not None:
                states.commit(failed)
        self._runner.model_s += self._runner.clock() - began
        return failed

    def draw(self, draws: Sequence[Draw]) -> Drawing:
        """As `Step.draw`."""
        with torch.inference_mode():
            if self._drawing is not None:
                return Drawing(self.logits, draws)
            self._drawing = Drawing(self.logits, draws, along=self._judged)
        return self._drawing

    @property
    def _judged(self) -> list[torch.Tensor]:
        """What shows which steps failed: the largest magnitudes in K and V of each row, and of logits and states."""
        states = self._carrier.states
        return [self._carrier.plan.worst, self.logits.amax(dim=-1), *([] if states is None else states.are_finite)]


class ModelRunner:
    """Runs steps of one loaded model over one arena, as `Runner`. `step_type`: what carries each step."""

    def __init__(
        self,
        loaded: LoadedModel,
        arena: KVArena,
        *,
        clock: Callable[[], float] = time.perf_counter,
        step_type: Callable[[PagedAttention, AttentionPlan], PagedStep] = PagedStep,
    ) -> None:
        self.model_s = 0.0  # of launching and waiting: a card computes between the two
        self.clock = clock
        self._step_type = step_type
        self._model = loaded.model
        self._arena = arena
        self._row_multiple = loaded.row_multiple
        self._compute = loaded.compute
        self._vision = loaded.vision
        self._paged = loaded.compute.attention(arena)
        self._device = torch.device(loaded.device)

    @property
    def computes_ahead(self) -> bool:
        """As `Runner.computes_ahead`. Not with recurrent states, which are written once a step was waited for."""
        return self._compute.computes_ahead and not self._arena.layout.states

    def launch_after(self, steps: Sequence[SequenceStep], drawing: Drawing, places: Sequence[int]) -> LaunchedStep:
        """As `Runner.launch_after`."""
        return self.launch(steps, drawing.tokens(places))

    def launch(self, steps: Sequence[SequenceStep], ids: torch.Tensor | None = None) -> LaunchedStep:
        """As `Runner.launch`. `ids` int64 [rows] on the device: in place of the steps' own."""
        batch = replace(ForwardBatch.build(steps, self._filled), drawn=ids)
        with torch.inference_mode():
            arena = self._arena
            layout = StepLayout(batch.spans, arena.layout.block_tokens, batch.num_rows, arena.rows_of)
            began = self.clock()
            step, logits = self._compute_batch(batch, layout)
            self.model_s += self.clock() - began
            logits = logits[: batch.num_logits]
            if logits.dtype != torch.float64:
                logits = logits.float()
        return LaunchedStep(self, steps, step, logits)

    def _filled(self, count: int) -> int:
        """With how many rows so many are computed."""
        return filled_up(count, self._row_multiple)

    def _compute_batch(self, batch: ForwardBatch, layout: StepLayout) -> tuple[PagedStep, torch.Tensor]:
        """Launch all that computes a step; what carries it, and logits, of which the first are the requested ones."""
        step = self._step_type(self._paged, AttentionPlan(layout, self._device))
        inputs = batch.tensors(self._device)
        return step, run_model(self._model, step, *inputs, self._embedded(batch, inputs[0]))

    def _embedded(self, batch: ForwardBatch, ids: torch.Tensor) -> torch.Tensor | None:
        """The inputs of the first layer [1, rows, hidden] for a batch with rows of pictures; None for others."""
        if not batch.pictures:
            return None
        assert self._vision is not None, "a picture for a model that does not see"
        embedded: torch.Tensor = self._model.get_input_embeddings()(ids).clone()
        for span in batch.pictures:
            embedded[0, span.at : span.at + span.count] = self._vision.rows(span).to(embedded)
        return embedded

    def forward(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        """As `Runner.forward`."""
        launched = self.launch(steps)
        launched.wait()
        return launched.logits

    def rest(self) -> None:
        """As `Compute.rest`."""
        self._compute.rest()


def _failed_steps(steps: Sequence[SequenceStep], failed_spans: Collection[int], largest: np.ndarray) -> frozenset[int]:
    """Indices of the steps with KV that is not finite, or with logits that are not: `largest` are those of each row."""
    failed = set(failed_spans)
    sound, at = np.isfinite(largest), 0
    for index, step in enumerate(steps):
        asked = {"none": 0, "last": 1, "all": step.num_rows}[step.logits]
        if not all(sound[at : at + asked]):
            failed.add(index)
        at += asked
    return frozenset(failed)
