"""What layers' own code does in a step over blocks: observed once, to be held against what a device makes of them.

Knows no kernels: attention is computed as it will be in a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from rekindle.kv.attention import PagedAttention
from rekindle.kv.plan import AttentionPlan
from rekindle.kv.step_layout import StepLayout
from rekindle.model.adapter import STEP_KEYWORD, AttentionCall, StepCache, run_model
from rekindle.model.batch import ForwardBatch
from rekindle.model.check_text import check_tokens
from rekindle.model.compare import same_updates
from rekindle.model.layer_parts import layer_norms
from rekindle.model.loaded import LoadedModel
from rekindle.model.runner import PagedStep
from rekindle.model.trial import interleaved_tables, sequence_step

LENGTHS = (5, 9, 2)  # of the sequences on which a layer is compared
# As deep layers add little to large rows, rows are also compared a 64th as large: a norm makes what is added nearly
# the same.
SMALLER = 2.0**-6


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """What a layer's own code was given, did and returned; it can be given to it again."""

    module: Any
    hidden: torch.Tensor  # [1, rows, size]
    keywords: dict[str, Any]
    output: torch.Tensor
    call: AttentionCall

    def smaller(self) -> Observation:
        """The same with rows a 64th as large."""
        hidden = self.hidden * SMALLER
        return replace(self, hidden=hidden, output=self.module.forward(hidden, **self.keywords))

    def agrees(self, output: torch.Tensor | None) -> bool:
        """Whether this is the layer's own output but for roundings, in every row."""
        return self._same(output, self.output)

    def agrees_between(self, output: torch.Tensor | None) -> bool:
        """Whether this is what the layer adds its MLP to, but for roundings, and it adds that and nothing else."""
        between = self._added_to()
        return between is not None and self._same(output, between)

    def _same(self, output: torch.Tensor | None, expected: torch.Tensor) -> bool:
        rows = slice(sum(LENGTHS))  # dummies follow
        return output is not None and same_updates(output[0, rows], expected[0, rows], self.hidden[0, rows])

    def _added_to(self) -> torch.Tensor | None:
        """The rows to which the layer adds what its MLP makes of their norm; None if it does something else."""
        given, norm, mlp = list[torch.Tensor](), layer_norms(self.module)["mlp"], self.module.mlp
        handles = [
            norm.register_forward_pre_hook(lambda module, args: given.append(args[0])),
            mlp.register_forward_hook(lambda module, args, output: given.extend((args[0], _first(output)))),
        ]
        try:
            output = self.module.forward(self.hidden, **self.keywords)
        finally:
            for handle in handles:
                handle.remove()
        if len(given) != 3 or not torch.equal(given[1], norm(given[0])) or not torch.equal(output, given[0] + given[2]):
            return None
        return given[0]


def _first(output: Any) -> Any:
    """What a module returns, or the first of several things."""
    return output[0] if isinstance(output, tuple) else output


class _RecordingStep(PagedStep):
    """Keeps what each layer's attention was asked for."""

    def __init__(self, paged: PagedAttention, plan: AttentionPlan) -> None:
        super().__init__(paged, plan)
        self.calls: dict[int, AttentionCall] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls[call.layer_index] = call
        return super().attend(call)


def observed(loaded: LoadedModel, modules: list[Any]) -> dict[Any, tuple[Observation, ...]]:
    """What modules do at the first positions and at the last ones; those that did it at both."""
    last = loaded.spec.max_context - max(LENGTHS)
    first_ones, last_ones = (_observed(loaded, modules, start) for start in (0, max(last, 0)))
    return {each: (first_ones[each], last_ones[each]) for each in modules if each in first_ones and each in last_ones}


def _observed(loaded: LoadedModel, modules: list[Any], start: int) -> dict[Any, Observation]:
    """Run a few sequences through the model's own code, as if they began at position `start`.

    Layers whose K and V another layer attends to are left out: that one finds them where their own code leaves them.
    """
    layout, tokens = loaded.spec.layout, check_tokens(loaded.spec.vocab_size, sum(LENGTHS))
    tables, num_blocks = interleaved_tables(layout.block_tokens, LENGTHS)
    device = torch.device(loaded.device)
    steps = [sequence_step(x, 0, table, "last") for x, table in zip(tokens.split(LENGTHS), tables, strict=True)]
    batch = ForwardBatch.build(steps)
    plan = AttentionPlan(StepLayout(batch.spans, layout.block_tokens, batch.num_rows), device)
    step = _RecordingStep(loaded.compute.attention(loaded.compute.arena(layout, num_blocks, device)), plan)
    seen: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
    handles = [
        module.register_forward_hook(lambda *values: seen.append(values), with_kwargs=True)  # module, args, ..., output
        for module in modules
    ]
    try:
        ids, positions, logit_rows = batch.tensors(device)
        run_model(loaded.model, step, ids, positions + start, logit_rows)
    finally:
        for handle in handles:
            handle.remove()
    again = StepCache(PagedStep(step.paged, plan))
    shared = {call.kv_index for call in step.calls.values() if call.kv_index != call.layer_index}
    found = {}
    for module, args, keywords, output in seen:
        call = step.calls.get(module.self_attn.layer_idx)
        if len(args) == 1 and isinstance(output, torch.Tensor) and call is not None and call.layer_index not in shared:
            given = {**keywords, STEP_KEYWORD: again, "past_key_values": again}
            found[module] = Observation(module, args[0], given, output, call)
    return found
