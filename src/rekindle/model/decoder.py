"""Decoder layers of Llama's form, and of Gemma's, computed by the kernels in one call each.

Owns which layers are computed so. A layer is taken for its structure, never for its model's name: the submodules that
layers of a form have, packed linear layers, norms and a gated MLP that the kernels compute, no hooks. Its output for a
few sequences, at the first positions and at the last ones, must then be that of its own code, which stays and computes
whatever is no step over blocks that the kernels know, such as the eager attention of the trial forward. Any number of
rows goes the same way, so bits do not depend on it. In layers of another form, norms and MLPs are fused by themselves.
Hooks that are registered later, on parts of a fused layer, are not called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from rekindle.kernels import decoder as kernels
from rekindle.kernels.attention import Scoring
from rekindle.kernels.decoder import DecoderKernel, DecoderLayer, Norms, Projections
from rekindle.kernels.experts import ExpertsKernel, MixtureLayer
from rekindle.kv.arena import KVArena
from rekindle.kv.attention import PagedAttention
from rekindle.kv.fused import FusedAttention, attention_over
from rekindle.kv.plan import AttentionPlan
from rekindle.model.adapter import STEP_KEYWORD, AttentionCall, StepCache, run_model
from rekindle.model.batch import ForwardBatch
from rekindle.model.check_text import check_tokens
from rekindle.model.compare import same_updates
from rekindle.model.fused_modules import fuse_modules, is_changed, is_packed, linear, mlp_layer, norm_layer
from rekindle.model.loaded import LoadedModel
from rekindle.model.mixtures import fuse_experts, mixture_layer
from rekindle.model.runner import PagedStep
from rekindle.model.trial import interleaved_tables, sequence_step
from rekindle.spec import LayerSpec

log = logging.getLogger(__name__)
LAYER = {"self_attn", "mlp"}
NORMS: tuple[dict[str, str], ...] = (  # names of a layer's norms by what they are to the kernels: in Llama, in Gemma
    {"input": "input_layernorm", "mlp": "post_attention_layernorm"},
    {
        "input": "input_layernorm",
        "attention_output": "post_attention_layernorm",
        "mlp": "pre_feedforward_layernorm",
        "mlp_output": "post_feedforward_layernorm",
    },
)
ATTENTION, HEAD_NORMS = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"}
KEYWORDS = {
    *("attention_mask", "position_embeddings", "position_ids", "past_key_values", "use_cache", STEP_KEYWORD),
}
ROUTED = "output_router_logits"  # asks for what a router gives; not where it is false
LENGTHS = (5, 9, 2)  # of the sequences on which a layer is compared
# As deep layers add little to large rows, rows are also compared a 64th as large: a norm makes what is added nearly
# the same.
SMALLER = 2.0**-6


@dataclass(frozen=True, slots=True, eq=False)
class FusedDecoder:
    """Computes a layer by the kernels where it can, and by the layer's own code elsewhere."""

    own: Callable[..., torch.Tensor]
    kernel: DecoderKernel
    layer: DecoderLayer
    spec: LayerSpec
    size: int  # of a row
    scoring: Scoring
    sinks: torch.Tensor | None  # kept alive
    attention: DecoderLayer | None = None  # of a mixture: the layer up to its second norm, by which it is compared

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the layer's `forward`: [1, rows, size] -> the same."""
        others = {name for name, value in kwargs.items() if name not in KEYWORDS and not (name == ROUTED and not value)}
        fused = None if args or others else self.run(hidden_states, kwargs)
        return self.own(hidden_states, *args, **kwargs) if fused is None else fused

    def run(
        self, hidden: torch.Tensor, keywords: dict[str, Any], layer: DecoderLayer | None = None
    ) -> torch.Tensor | None:
        """Compute the layer, or another form of it, by the kernels; None where they cannot."""
        step, positions = getattr(keywords.get(STEP_KEYWORD), "step", None), keywords.get("position_embeddings")
        if (
            type(step) is not PagedStep
            or not isinstance(step.paged, FusedAttention)
            or not isinstance(positions, tuple)
        ):
            return None
        blocks, plan, window = step.paged.layer_blocks(self.spec.index), step.plan, self.spec.window
        if all(isinstance(x, torch.Tensor) and 2 * x.shape[-1] == self.spec.k_dim for x in positions):
            positions = tuple(torch.cat((x, x), -1) for x in positions)  # both halves of a head have the same
        shapes = [(1, plan.num_rows, size) for size in (self.size, self.spec.k_dim, self.spec.k_dim)]
        values = (hidden, *positions)
        if blocks is None or keywords.get("attention_mask") is not None or [x.shape for x in values] != shapes:
            return None
        if any(x.dtype is not torch.bfloat16 for x in values):
            return None
        cos, sin = positions
        hidden, cos, sin = hidden.contiguous(), cos.contiguous(), sin.contiguous()
        output = torch.empty_like(hidden)
        self.kernel.layer(
            self.layer if layer is None else layer,
            blocks,
            kernels.Step(
                plan.row_blocks(window), plan.row_offsets, plan.worst.data_ptr(), step.paged.spans_of(plan, window)
            ),
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
    kernel, fused = DecoderKernel(loaded.kernels.library), list[FusedDecoder]()
    fuse_experts(loaded.model, ExpertsKernel(loaded.kernels.library))
    modules = [module for module in loaded.model.modules() if _has_form(module)]
    inside = set[int]()
    with torch.inference_mode():
        last = loaded.spec.max_context - max(LENGTHS)
        first_ones, last_ones = (_observed(loaded, modules, start) for start in (0, max(last, 0)))
        for module in modules:
            found = _agreeing(first_ones.get(module), last_ones.get(module), loaded, kernel)
            if found is not None:
                fused.append(found)
                inside |= {id(each) for each in module.modules()}
                module.forward = found
        fuse_modules((module for module in loaded.model.modules() if id(module) not in inside), kernel)
    log.info("%d decoder layers are computed by the kernels in one call each", len(fused))
    return len(fused)


@dataclass(frozen=True, slots=True, eq=False)
class _Observation:
    """What a layer's own code was given, did and returned; it can be given to it again."""

    module: Any
    hidden: torch.Tensor  # [1, rows, size]
    keywords: dict[str, Any]
    output: torch.Tensor
    call: AttentionCall

    def smaller(self) -> _Observation:
        """The same with rows a 64th as large."""
        hidden = self.hidden * SMALLER
        return replace(self, hidden=hidden, output=self.module.forward(hidden, **self.keywords))

    def agrees(self, fused: FusedDecoder) -> bool:
        """Whether the kernels give the layer's own output but for roundings, in every row.

        Of a mixture, whether they give what it adds its experts to, as a rounding may send a row to another expert;
        router and experts were compared by themselves.
        """
        if fused.attention is None:
            return self._near(fused.run(self.hidden, self.keywords), self.output)
        between = self._added_to()
        return between is not None and self._near(fused.run(self.hidden, self.keywords, fused.attention), between)

    def _near(self, output: torch.Tensor | None, expected: torch.Tensor) -> bool:
        if output is None:
            return False
        rows = slice(sum(LENGTHS))  # dummies follow
        return same_updates(output[0, rows], expected[0, rows], self.hidden[0, rows])

    def _added_to(self) -> torch.Tensor | None:
        """The rows to which the layer adds what its MLP makes of their norm; None if it does something else."""
        given, norm, mlp = list[torch.Tensor](), _norms(self.module)["mlp"], self.module.mlp
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


def _agreeing(
    first: _Observation | None, last: _Observation | None, loaded: LoadedModel, kernel: DecoderKernel
) -> FusedDecoder | None:
    """The kernels' form of a layer, if it gives the outputs that were observed, and with smaller rows, too."""
    if first is None or last is None:
        return None
    specs = {layer.index: layer for layer in loaded.spec.layout.layers}
    spec = specs.get(first.call.layer_index)
    fused = None if spec is None else _fused(first, spec, kernel)
    if fused is None or not all(each.agrees(fused) for each in (first, last, first.smaller(), last.smaller())):
        return None
    return fused


class _RecordingStep(PagedStep):
    """Keeps what each layer's attention was asked for."""

    def __init__(self, paged: PagedAttention, plan: AttentionPlan) -> None:
        super().__init__(paged, plan)
        self.calls: dict[int, AttentionCall] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls[call.layer_index] = call
        return super().attend(call)


def _observed(loaded: LoadedModel, modules: list[Any], start: int) -> dict[Any, _Observation]:
    """Run a few sequences through the model's own code, as if they began at position `start`.

    Layers whose K and V another layer attends to are left out: that one finds them where their own code leaves them.
    """
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
        run_model(loaded.model, step, batch.input_ids, batch.position_ids + start, batch.logit_rows)
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
            found[module] = _Observation(module, args[0], given, output, call)
    return found


def _norms(module: Any) -> dict[str, Any]:
    """The norms of a layer that has the submodules of one of the forms, and nothing else; of any other module none."""
    children = module._modules
    names = next((names for names in NORMS if children.keys() == LAYER | {*names.values()}), {})
    return {part: children[name] for part, name in names.items()}


def _has_form(module: Any) -> bool:
    """Whether a module may be a decoder layer that the kernels know."""
    if not _norms(module) or any(is_changed(each) for each in module.modules()):
        return False
    attention = module.self_attn
    return (
        ATTENTION <= attention._modules.keys() <= ATTENTION | HEAD_NORMS
        and is_packed(*(attention._modules[name] for name in ATTENTION))
        and isinstance(getattr(attention, "layer_idx", None), int)
    )


def _fused(seen: _Observation, spec: LayerSpec, kernel: DecoderKernel) -> FusedDecoder | None:
    """The kernels' form of a layer; None if a part of it or their sizes are not of one of the forms."""
    module, attention, call = seen.module, seen.module.self_attn, seen.call
    projections = Projections(*(linear(attention._modules[f"{name}_proj"]) for name in "qkvo"))
    heads, size = call.q.shape[1], seen.hidden.shape[2]
    if call.kv_index != call.layer_index or not projections.fit(size, heads, spec):
        return None
    of_heads = {name[0]: attention._modules[name] for name in HEAD_NORMS & attention._modules.keys()}
    norms = {part: norm_layer(norm, kernel) for part, norm in {**_norms(module), **of_heads}.items()}
    known = {part: norm for part, norm in norms.items() if norm is not None}
    mlp = mlp_layer(module.mlp, kernel) or mixture_layer(module.mlp, kernel.library)
    if mlp is None or known.keys() != norms.keys():
        return None
    sizes = {mlp.size} if isinstance(mlp, MixtureLayer) else {mlp.depth, mlp.columns}
    if sizes != {size} or any(
        norm.columns != (spec.k_dim if part in of_heads else size) for part, norm in known.items()
    ):
        return None
    layer = DecoderLayer(Norms(**known), projections, mlp, heads)
    attention = DecoderLayer(Norms(**known), projections, None, heads) if isinstance(mlp, MixtureLayer) else None
    sinks = None if call.sinks is None else call.sinks.float().contiguous()
    scoring = Scoring(call.scaling, call.window, call.softcap, None if sinks is None else sinks.data_ptr())
    return FusedDecoder(module.forward, kernel, layer, spec, size, scoring, sinks, attention)
