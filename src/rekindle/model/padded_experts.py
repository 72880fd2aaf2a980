"""Experts of mixture models, computed so that a token's result does not depend on the other tokens of its expert.

The usual implementations multiply as many rows as happen to be routed to an expert, and products with fewer than four
rows give other bits. Here each expert's rows are padded to a multiple of four, one expert after the other, unless a
module has something that computes all of them at once. For CPUs only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rekindle.kv.plan import ROW_MULTIPLE

EXPERTS_NAME = "rekindle"
PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
# Attributes of a module: what has packed weights by projection, and what computes all experts at once, if something
# does.
PACKED_NAME, FUSED_NAME = "rekindle_packed", "rekindle_fused"


def padded_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's experts: [tokens, hidden] and [tokens, k] -> [tokens, hidden]."""
    fused = getattr(module, FUSED_NAME, None)
    output = None if fused is None else fused(hidden_states, top_k_index, top_k_weights)
    return each_padded(module, hidden_states, top_k_index, top_k_weights) if output is None else output


def each_padded(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """As `padded_experts`, one expert after the other."""
    num_tokens, num_chosen = top_k_index.shape
    chosen = top_k_index.reshape(-1)
    output = hidden_states.new_empty(num_tokens * num_chosen, hidden_states.shape[-1])
    for expert in chosen.unique().tolist():
        slots = (chosen == expert).nonzero()[:, 0]
        rows = slots // num_chosen
        dummies = rows[:1].expand(-len(rows) % ROW_MULTIPLE)
        output[slots] = _one_expert(module, expert, hidden_states[torch.cat([rows, dummies])])[: len(rows)]
    weighted = output.view(num_tokens, num_chosen, -1) * top_k_weights.unsqueeze(-1)
    return weighted.sum(dim=1).to(hidden_states.dtype)


def _one_expert(module: Any, expert: int, rows: torch.Tensor) -> torch.Tensor:
    if module.has_gate:
        inner = module._apply_gate(_product(module, "gate_up_proj", expert, rows))
    else:
        inner = module.act_fn(_product(module, "up_proj", expert, rows))
    outer = _product(module, "down_proj", expert, inner)
    return module.post_expert_norm(outer) if module.has_post_expert_norm else outer


def _product(module: Any, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
    packed = getattr(module, PACKED_NAME, {}).get(name)
    product = torch_product(module, name, expert, rows) if packed is None else packed.product(expert, rows)
    return product + getattr(module, f"{name}_bias")[expert] if module.has_bias else product


def torch_product(module: Any, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
    """Rows times the weights of one projection of one expert, by torch."""
    weight = getattr(module, name)[expert]
    return rows @ weight if module.is_transposed else torch.nn.functional.linear(rows, weight)


def mixtures(model: Any) -> Iterator[tuple[str, Any]]:
    """Layers that compute by `padded_experts`, with their names."""
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        if hasattr(module, "has_post_expert_norm") and getattr(config, "_experts_implementation", "") == EXPERTS_NAME:
            yield path, module


def use_padded_experts(model: Any) -> bool:
    """Switch a mixture model to these experts if it supports that; return whether it does."""
    if not any(hasattr(module, "has_post_expert_norm") for module in model.modules()):
        return False
    # A model that also sees may not know that the language model inside it has experts.
    models = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    mixtures = [each for each in models if each._can_set_experts_implementation()]
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, padded_experts)
    for each in mixtures:
        each.set_experts_implementation(EXPERTS_NAME)
    return bool(mixtures)
