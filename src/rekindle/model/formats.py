"""Which format each layer keeps K and V in (`--kv`), as values: what a setting asks for, and the layout that follows.

A setting names one format, or those of K and of V: `q8h/q4h`. Of latent attention the rotary key is always native.
What `auto` takes is found by `auto_formats`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from rekindle.errors import ModelRefused
from rekindle.kv.q4h import MAX_ROTATION
from rekindle.model.geometry import Geometry, LayerGeometry
from rekindle.spec import CODED, Format, KVLayout, LayerSpec, rotation_size

NATIVE: dict[torch.dtype, Format] = {torch.bfloat16: "bf16", torch.float64: "fp64"}


@dataclass(frozen=True, slots=True)
class LayerFormats:
    """The formats of one layer's K and V, and the reason in words, if they are not the fewest bits."""

    index: int
    k: Format
    v: Format
    reason: str


def native_format(dtype: torch.dtype) -> Format:
    """The format that keeps K and V as computed (fp32 if the dtype has no format)."""
    return NATIVE.get(dtype, "fp32")


def fits_coded(dim: int) -> bool:
    """Whether heads of this size can be cut into whole groups, and rotated."""
    return dim % 16 == 0 and rotation_size(dim) <= MAX_ROTATION


def in_4_bits(layer: LayerGeometry | LayerSpec, native: Format) -> tuple[Format, Format]:
    """The formats of a layer's K and V with 4 bits where they fit, native elsewhere and for rotary keys."""
    v_fits = not layer.latent and fits_coded(layer.v_dim)
    return "q4h" if fits_coded(layer.k_dim) else native, "q4h" if v_fits else native


def summary(formats: Sequence[LayerFormats]) -> str:
    """The choice in one line for people: `20 layers K q4h V q4h, 4 layers K q8h V q4h (4 bits change too much)`."""
    groups: dict[tuple[str, str, str], int] = {}
    for chosen in formats:
        key = (chosen.k, chosen.v, chosen.reason)
        groups[key] = groups.get(key, 0) + 1
    return ", ".join(
        f"{count} layers K {k} V {v}" + (f" ({reason})" if reason else "") for (k, v, reason), count in groups.items()
    )


def layout_of(geometry: Geometry, formats: Sequence[LayerFormats], block_tokens: int) -> KVLayout:
    """Geometry and formats joined."""
    layers = tuple(
        LayerSpec(
            *(layer.index, layer.num_kv_heads, layer.k_dim, layer.v_dim, layer.window, chosen.k, chosen.v), layer.latent
        )
        for layer, chosen in zip(geometry.layers, formats, strict=True)
    )
    return KVLayout(block_tokens, layers, geometry.states)


def forced_formats(geometry: Geometry, setting: str) -> tuple[LayerFormats, ...]:
    """The same formats everywhere, one for both or `K/V`, but for rotary keys, which are never coded; ModelRefused if
    one of them cannot hold a head size."""
    k, _, v = setting.partition("/")
    wanted_k, wanted_v = cast(Format, k), cast(Format, v or k)
    native, formats = native_format(geometry.dtype), []
    for layer in geometry.layers:
        layer_v = native if layer.latent and wanted_v in CODED else wanted_v
        for fmt, dim in ((wanted_k, layer.k_dim), (layer_v, layer.v_dim)):
            if fmt in CODED and not fits_coded(dim):
                raise ModelRefused(
                    f"kv={setting}: {fmt} needs head sizes divisible by 16 and not by {2 * MAX_ROTATION}; layer "
                    f"{layer.index} has {layer.k_dim}/{layer.v_dim}: use kv=auto"
                )
        formats.append(LayerFormats(layer.index, wanted_k, layer_v, "forced"))
    return tuple(formats)
