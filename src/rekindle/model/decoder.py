"""Decoder layers of Llama's form, computed by the kernels in one call each.

Owns which layers are computed so. A layer is taken for its structure, never for its model's name: the submodules that
Llama's layers have, packed linear layers, norms and a gated MLP that the kernels compute, no hooks. Its output for a
few sequences must then be that of its own code, which stays and computes whatever is no step over blocks that the
kernels know, such as the eager attention of the trial forward. Any number of rows goes the same way, so bits do not
depend on it. In layers of another form, norms and MLPs are fused by themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rekindle.kernels import decoder as kernels
from rekindle.kernels.attention import Scoring
from rekindle.kernels.decoder import DecoderKernel, DecoderLayer, Norms, Projections
from rekindle.kv.arena import KVArena
from rekindle.kv.fused import FusedAttention, attention_over
from rekindle.kv.plan import AttentionPlan
from rekindle.model.adapter import STEP_KEYWORD, AttentionCall, run_model
from rekindle.model.batch import ForwardBatch
from rekindle.model.formats import check_tokens
from rekindle.model.fused_modules import fuse_modules, is_changed, is_packed, linear, mlp_layer, norm_layer
from rekindle.model.loaded import LoadedModel
from rekindle.model.runner import PagedStep
from rekindle.model.trial import interleaved_tables, sequence_step
from rekindle.spec import LayerSpec

log = logging.getLogger(__name__)
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION, HEAD_NORMS = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"}
KEYWORDS = {
    *("attention_mask", "position_embeddings", "position_ids", "past_key_values", "use_cache", STEP_KEYWORD),
}
LENGTHS = (9, 21, 2)  # of the sequences on which a layer is compared
# How far a row may be from that of the layer's own code: a share of what the layer adds to it, and of the row itself,
# which both round. Rounding in between moves trained and random layers by less than a fifth of that.
UPDATE_SHARE, ROW_SHARE = 0.05, 2.0**-8


@dataclass(frozen=True, slots=True, eq=False)
class FusedDecoder:
    """Computes a layer by the kernels where it can, and by the layer's own code elsewhere."""

    own: Callable[..., torch.Tensor]
    kernel: DecoderKernel
    layer: DecoderLayer
    index: int
    scoring: Scoring
    sinks: torch.Tensor | None  # kept alive

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the layer's `forward`: [1, rows, size] -> the same."""
        fused = None if args or not kwargs.keys() <= KEYWORDS else self.run(hidden_states, kwargs)
        return self.own(hidden_states, *args, **kwargs) if fused is None else fused

    def run(self, hidden: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor | None:
        """Compute the layer by the kernels; None where they cannot."""
        step, positions = getattr(keywords.get(STEP_KEYWORD), "step", None), keywords.get("position_embeddings")
        if not isinstance(step, PagedStep) or not isinstance(step.paged, FusedAttention) or positions is None:
            return None
        blocks, plan, (cos, sin) = step.paged.layer_blocks(self.index), step.plan, positions
        if blocks is None or keywords.get("attention_mask") is not None:
            return None
        if any(x.dtype is not torch.bfloat16 or x.shape[:2] != (1, plan.num_rows) for x in (hidden, cos, sin)):
            return None
        hidden, cos, sin = hidden.contiguous(), cos.contiguous(), sin.contiguous()
        output = torch.empty_like(hidden)
        self.kernel.layer(
            self.layer,
            blocks,
            kernels.Step(plan.row_blocks, plan.row_offsets, plan.worst.data_ptr(), step.paged.spans_of(plan)),
            kernels.Activations(hidden.data_ptr(), output.data_ptr(), cos.data_ptr(), sin.data_ptr()),
            self.scoring,
            threads=torch.get_num_threads(),
        )
        return output


def fuse_layers(loaded: LoadedModel) -> int:
    """Let the kernels compute the layers for which they give the same outputs; return how many.

    Norms and MLPs elsewhere in the model are fused by themselves.
    """
    if loaded.kernels.library is None:
        return 0
    kernel, inside = DecoderKernel(loaded.kernels.library), set[int]()
    specs = {layer.index: layer for layer in loaded.spec.layout.layers}
    modules = [module for module in loaded.model.modules() if _has_form(module)]
    count = 0
    with torch.inference_mode():
        for seen in _observed(loaded, modules) if modules else ():
            fused = _fused(seen, specs[seen.call.layer_index], kernel)
            if fused is not None and seen.agrees(fused.run(seen.hidden, seen.keywords)):
                seen.module.forward = fused
                inside |= {id(module) for module in seen.module.modules()}
                count += 1
        fuse_modules((module for module in loaded.model.modules() if id(module) not in inside), kernel)
    log.info("%d decoder layers are computed by the kernels in one call each", count)
    return count


@dataclass(frozen=True, slots=True, eq=False)
class _Observation:
    """What a layer's own code was given, did and returned."""

    module: Any
    hidden: torch.Tensor  # [1, rows, size]
    keywords: dict[str, Any]
    output: torch.Tensor
    call: AttentionCall
    num_used: int  # rows that are no dummies

    def agrees(self, output: torch.Tensor | None) -> bool:
        """Whether an output is the layer's own but for roundings, in every row."""
        if output is None:
            return False
        rows = slice(self.num_used)
        ours, own, before = (x[0, rows].float() for x in (output, self.output, self.hidden))
        allowed = UPDATE_SHARE * (own - before).norm(dim=1) + ROW_SHARE * own.norm(dim=1)
        return bool(((ours - own).norm(dim=1) <= allowed).all())


class _RecordingStep(PagedStep):
    """Keeps what each layer's attention was asked for."""

    def __init__(self, paged: Any, plan: AttentionPlan) -> None:
        super().__init__(paged, plan)
        self.calls: dict[int, AttentionCall] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls[call.layer_index] = call
        return super().attend(call)


def _observed(loaded: LoadedModel, modules: list[Any]) -> Iterator[_Observation]:
    """Run a few sequences through the model's own code; what its layers were given can be given to them again."""
    layout, ids = loaded.spec.layout, check_tokens(loaded.spec.vocab_size, sum(LENGTHS))
    tables, num_blocks = interleaved_tables(layout.block_tokens, LENGTHS)
    arena = KVArena(layout, num_blocks, torch.device("cpu"))
    steps = [sequence_step(x, 0, table, "last") for x, table in zip(ids.split(LENGTHS), tables, strict=True)]
    batch = ForwardBatch.build(steps, torch.device("cpu"))
    plan = AttentionPlan.build(batch.spans, layout, batch.num_rows, torch.device("cpu"))
    step = _RecordingStep(attention_over(arena, loaded.kernels.library), plan)
    seen: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
    handles = [
        module.register_forward_hook(lambda *values: seen.append(values), with_kwargs=True)  # module, args, ..., output
        for module in modules
    ]
    try:
        run_model(loaded.model, step, batch.input_ids, batch.position_ids, batch.logit_rows)
    finally:
        for handle in handles:
            handle.remove()
    for module, args, keywords, output in seen:
        call = step.calls.get(module.self_attn.layer_idx)
        if len(args) == 1 and isinstance(output, torch.Tensor) and call is not None:
            yield _Observation(module, args[0], keywords, output, call, sum(LENGTHS))


def _has_form(module: Any) -> bool:
    """Whether a module has the submodules of Llama's decoder layers, and nothing else."""
    if module._modules.keys() != LAYER or any(is_changed(each) for each in module.modules()):
        return False
    attention = module.self_attn
    return (
        ATTENTION <= attention._modules.keys() <= ATTENTION | HEAD_NORMS
        and is_packed(*(attention._modules[name] for name in ATTENTION))
        and isinstance(getattr(attention, "layer_idx", None), int)
    )


def _fused(seen: _Observation, spec: LayerSpec, kernel: DecoderKernel) -> FusedDecoder | None:
    """The kernels' form of a layer; None if a part of it or their sizes are not as Llama's are."""
    module, attention, call = seen.module, seen.module.self_attn, seen.call
    projections = Projections(*(linear(attention._modules[f"{name}_proj"]) for name in "qkvo"))
    heads, size = call.q.shape[1], seen.hidden.shape[2]
    if call.kv_index != call.layer_index or not projections.fit(size, heads, spec):
        return None
    before, after = (norm_layer(x, kernel) for x in (module.input_layernorm, module.post_attention_layernorm))
    of_heads = [attention._modules.get(name) for name in ("q_norm", "k_norm")]
    q, k = (None if norm is None else norm_layer(norm, kernel) for norm in of_heads)
    mlp = mlp_layer(module.mlp, kernel)
    if before is None or after is None or mlp is None or (q is None, k is None) != tuple(x is None for x in of_heads):
        return None
    if {before.columns, after.columns, mlp.depth, mlp.columns} != {size} or any(
        norm is not None and norm.columns != spec.k_dim for norm in (q, k)
    ):
        return None
    layer = DecoderLayer(Norms(before, after, q, k), projections, mlp, heads)
    sinks = None if call.sinks is None else call.sinks.float().contiguous()
    scoring = Scoring(call.scaling, call.window, call.softcap, None if sinks is None else sinks.data_ptr())
    return FusedDecoder(module.forward, kernel, layer, spec.index, scoring, sinks)
