"""Experts of mixture models, computed so that a token's result does not depend on the other tokens of its expert.

The usual implementations multiply as many rows as happen to be routed to an expert, and products with fewer than four
rows give other bits. Here each expert's rows are padded to a multiple of four. For CPUs only: it loops over experts.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rekindle.kv.plan import ROW_MULTIPLE

EXPERTS_NAME = "rekindle"


def padded_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's experts: [tokens, hidden] and [tokens, k] -> [tokens, hidden]."""
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
    weight = getattr(module, name)[expert]
    product = rows @ weight if module.is_transposed else torch.nn.functional.linear(rows, weight)
    return product + getattr(module, f"{name}_bias")[expert] if module.has_bias else product


def use_padded_experts(model: Any) -> bool:
    """Switch a mixture model to these experts if it supports that; return whether it does."""
    has_experts = any(hasattr(module, "has_post_expert_norm") for module in model.modules())
    if not has_experts or not model._can_set_experts_implementation():
        return False
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, padded_experts)
    model.set_experts_implementation(EXPERTS_NAME)
    return True
