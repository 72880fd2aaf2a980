"""Multi-head latent attention (MLA), in its absorbed form.

Such a layer caches a latent of each token and one rotary key for all heads; a linear map, its `expand_kv`, makes K and
V of every head from them. Here nothing is expanded: queries go through the map of K, attention runs over latents as
over one head, and its result goes through the map of V (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). Owns which
layers compute so, and the weights of their maps: layers are found by what they have, never by their model's name, and
taken only if their map is linear and appends the rotary key to K.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.errors import ModelRefused
from rekindle.model.compare import same_largest
from rekindle.model.refusals import refusing

NUM_CHECKED = 8  # random tokens on which a map is compared
# Both sides are sums of the same products, rounded once: in bf16 they differ by up to 0.004 of the largest.
TOLERANCE = 0.02
Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class LatentMap(nn.Module):
    """The `expand_kv` of one layer, which leaves latents as they are for the attention that absorbs it.

    `keys` [heads, latent, size of K without the rotary key] and `values` [heads, size of V, latent] are its weights:
    both have the numbers that are summed next to each other, by which torch multiplies fast everywhere.
    """

    def __init__(self, config: Any, absorbed_by: str, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self._config, self._absorbed_by = config, absorbed_by
        self.keys = nn.Parameter(keys.contiguous(), requires_grad=False)
        self.values = nn.Parameter(values.contiguous(), requires_grad=False)

    def forward(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Latents and rotary keys [batch, 1, rows, size] -> the same, or K and V of every head for other attention."""
        absorbed = self._config._attn_implementation == self._absorbed_by
        return (latent, rotary) if absorbed else self.expanded(latent, rotary)

    def expanded(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Latents and rotary keys [batch, 1, rows, size] -> K and V [batch, heads, rows, size]."""
        k = latent @ self.keys
        return torch.cat((k, rotary.expand(-1, k.shape[1], -1, -1)), dim=-1), latent @ self.values.transpose(1, 2)

    def absorb(self, q: Tensor) -> Tensor:
        """Queries [heads, rows, size of K] -> queries of latents and rotary keys [heads, rows, latent + rotary]."""
        size = self.keys.shape[2]
        return torch.cat((q[..., :size] @ self.keys.transpose(1, 2), q[..., size:]), dim=-1)

    def expand(self, summed: Tensor) -> Tensor:
        """Sums of latents [rows, heads, latent] -> those of V [rows, heads, size of V]."""
        return (summed.transpose(0, 1) @ self.values.transpose(1, 2)).transpose(0, 1)


def absorb_latents(model: Any, attention: str) -> int:
    """Let the layers of a model that have latent attention leave it to this attention; return how many.

    ModelRefused if a layer's map is of another form, or its weights cannot be read.
    """
    found = [module for module in model.modules() if callable(getattr(module, "expand_kv", None))]
    with torch.inference_mode():
        for module in found:
            with refusing(f"the map of latents of {type(module).__name__} cannot be read"):
                expand = _map_of(module, attention)
            module.latent_map = expand
            module.__dict__["expand_kv"] = expand  # in place of the method
            module.kv_b_proj = None  # its weights are the map's now
    return len(found)


def _map_of(module: Any, attention: str) -> LatentMap:
    """A layer's map, with the weights of the layer, widened if they are quantised."""
    linear, size, rotary_size = module.kv_b_proj, int(module.qk_nope_head_dim), int(module.qk_rope_head_dim)
    if getattr(linear, "bias", None) is not None:
        raise ModelRefused("latent attention adds a bias to K and V of each head, which is not implemented")
    if not rotary_size:
        raise ModelRefused("latent attention without a rotary key is not implemented")
    of_heads = _weight(linear, module).unflatten(0, (-1, size + int(module.v_head_dim)))
    found = LatentMap(module.config, attention, of_heads[:, :size].transpose(1, 2), of_heads[:, size:])
    _check(found, module.expand_kv, rotary_size)
    return found


def _weight(linear: Any, module: Any) -> Tensor:
    """The weight of a layer's linear map [columns, latent], as numbers: quantised ones are multiplied by ones."""
    own = getattr(linear, "weight", None)
    if type(linear) is nn.Linear and type(own) is nn.Parameter and type(own.data) is Tensor:
        return own.detach()
    norm = module.kv_a_layernorm.weight  # of what latents are
    widened: Tensor = linear(torch.eye(linear.in_features, dtype=norm.dtype, device=norm.device)).T
    return widened


def _check(found: LatentMap, own: Expand, rotary_size: int) -> None:
    """Refuse a layer whose own `expand_kv` is not this map, compared on random tokens."""
    generator = torch.Generator().manual_seed(0)
    sizes = (found.keys.shape[1], rotary_size)
    latent, rotary = (torch.randn(1, 1, NUM_CHECKED, size, generator=generator).to(found.keys) for size in sizes)
    size = found.keys.shape[2]
    (k, v), (expected_k, expected_v) = own(latent, rotary), found.expanded(latent, rotary)
    appended = torch.equal(k[..., size:], expected_k[..., size:])
    if not (appended and same_largest(k, expected_k, TOLERANCE) and same_largest(v, expected_v, TOLERANCE)):
        raise ModelRefused("latent attention makes K and V of each head otherwise than by a product of its weights")


def map_notes(model: Any, weights: str) -> list[str]:
    """Say what the maps of a model's latent attention take, where `weights` does not concern them."""
    maps = [module for module in model.modules() if isinstance(module, LatentMap)]
    if not maps or weights == "native":
        return []
    num_bytes = sum(weight.nbytes for each in maps for weight in each.parameters())
    return [f"weights: the maps of latent attention stay as they are, in {num_bytes:,} bytes"]
