"""The only caller of the transformers model while serving: a list of sequence steps in, logits out.

Owns the paged attention over the arena. Steps are independent: only the arena's bytes are kept between two
calls. KV that is not finite is reported per sequence step, so that one request fails and not the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from rekindle.kv.arena import KVArena
from rekindle.kv.attention import PagedAttention
from rekindle.kv.plan import AttentionPlan
from rekindle.kv.states import StepStates
from rekindle.kv.step_layout import StepLayout
from rekindle.model.adapter import AttentionCall, run_model
from rekindle.model.batch import ForwardBatch
from rekindle.model.batch import SequenceStep as SequenceStep
from rekindle.model.loaded import LoadedModel


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


class ModelRunner:
    """Runs steps of one loaded model over one arena; used by one thread. `step_type`: what carries each step."""

    def __init__(
        self,
        loaded: LoadedModel,
        arena: KVArena,
        *,
        clock: Callable[[], float] = time.perf_counter,
        step_type: Callable[[PagedAttention, AttentionPlan], PagedStep] = PagedStep,
    ) -> None:
        self.model_s = 0.0  # seconds inside the model so far; on a GPU the launch only
        self._clock = clock
        self._step_type = step_type
        self._model = loaded.model
        self._arena = arena
        self._row_multiple = loaded.row_multiple
        self._paged = loaded.compute.attention(arena)
        self._device = torch.device(loaded.device)
        self.failed_steps: tuple[int, ...] = ()  # of the last forward: steps whose KV or logits were not finite

    def forward(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        """Return logits [requested rows, vocab], fp32 (fp64 if the model is), in the order of the steps.

        K and V of all rows at positions `num_stored` and later are in the arena when this returns.
        """
        batch = ForwardBatch.build(steps, self._device, row_multiple=self._row_multiple)
        with torch.inference_mode():
            arena = self._arena
            layout = StepLayout(batch.spans, arena.layout.block_tokens, batch.num_rows, arena.rows_of)
            plan = AttentionPlan(layout, self._device)
            step = self._step_type(self._paged, plan)
            began = self._clock()
            logits = run_model(self._model, step, batch.input_ids, batch.position_ids, batch.logit_rows)
            self.model_s += self._clock() - began
            logits = logits[: batch.num_logits]
            if logits.dtype != torch.float64:
                logits = logits.float()
            failed = set(plan.failed_spans()) | (step.states.failed_spans() if step.states is not None else set())
            self.failed_steps = _failed_steps(steps, failed, logits)
            if step.states is not None:
                step.states.commit(self.failed_steps)
        return logits


def _failed_steps(steps: Sequence[SequenceStep], failed_spans: set[int], logits: torch.Tensor) -> tuple[int, ...]:
    """Indices of the steps with KV that is not finite, or with logits from which no token can be drawn."""
    failed = failed_spans.copy()
    sound, at = torch.isfinite(logits.amax(dim=-1)).tolist(), 0
    for index, step in enumerate(steps):
        asked = {"none": 0, "last": 1, "all": step.num_rows}[step.logits]
        if not all(sound[at : at + asked]):
            failed.add(index)
        at += asked
    return tuple(sorted(failed))
