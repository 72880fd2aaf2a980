"""Attention over one whole sequence with K and V as they are computed: what stored KV is compared with at load."""

from __future__ import annotations

import torch

from rekindle.model.adapter import AttentionCall
from rekindle.model.recurrent import RecurrentLayers


class DenseStep:
    """Dense causal attention over one sequence with true K and V."""

    states = None

    def __init__(self) -> None:
        self.recurrent = RecurrentLayers()
        self._kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(self, layer_index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep K and V [rows, kv_heads, dim] of the layer."""
        self._kv[layer_index] = (k.float(), v.float())

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return attention's rows times V: [rows, heads, v_dim]."""
        return call.expanded(attended(call, *self._kv[call.kv_index]).to(call.q.dtype))


def attended(call: AttentionCall, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention's output over K and V [keys, kv_heads, dim], of MLA latents and rotary keys: [rows, heads, dim]."""
    keys, values = (torch.cat((k, v), dim=-1), k) if call.latent else (k, v)
    values = values.transpose(0, 1).repeat_interleave(call.q.shape[1] // keys.shape[1], dim=0)
    return (attention_rows(call, keys).exp() @ values).transpose(0, 1)


def attention_rows(call: AttentionCall, k: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [heads, rows, keys] of causal attention over K [keys, kv_heads, dim], sinks removed."""
    rows, heads = call.q.shape[:2]
    keys = k.transpose(0, 1).repeat_interleave(heads // k.shape[1], dim=0)
    scores = call.q.float().transpose(0, 1) @ keys.transpose(1, 2) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    distance = torch.arange(rows, device=k.device)[:, None] - torch.arange(rows, device=k.device)
    outside = (distance < 0) | (distance >= (call.window or rows))
    scores = scores.masked_fill(outside, float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.float().view(-1, 1, 1).expand(-1, rows, 1)
        return torch.cat([scores, sinks], dim=-1).log_softmax(dim=-1)[..., :-1]
    return scores.log_softmax(dim=-1)
