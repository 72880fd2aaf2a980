"""Which format each layer keeps K and V in (`--kv`), and why.

A setting names one format, or those of K and of V: `q8h/q4h`. Of latent attention the rotary key is always native.

`auto` has two steps. A rule: a layer whose K projection adds a bias, or that has learned sinks, keeps native K. Then a
self-check of the remaining layers: one forward over a fixed pseudo-random sequence, comparing the attention rows that
true K gives with those of the K that would be stored. Squared error would not do: next to a bias of 600 it is 0.02 %,
yet all variation between tokens is lost.

The decision of the self-check is saved once per model and reused: a borderline layer must not flip between two starts,
which would change the fingerprint and make every agent cold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from rekindle.errors import ModelRefused
from rekindle.kv.coded import round_trip
from rekindle.kv.q4h import MAX_ROTATION
from rekindle.model.adapter import AttentionCall, run_model
from rekindle.model.fingerprint import write_json
from rekindle.model.geometry import Geometry, LayerGeometry
from rekindle.model.recurrent import RecurrentLayers
from rekindle.spec import CODED, Format, KVLayout, LayerSpec, rotation_size

NATIVE: dict[torch.dtype, Format] = {torch.bfloat16: "bf16", torch.float64: "fp64"}
CHECK_TOKENS = 192
# Healthy K gives at most 0.009 on a trained model and 0.03 on random weights with sharp attention; a bias of 10 on
# every channel gives 0.06 to 0.24, one of 100 on one channel 0.07 to 0.27, and both grow without bound.
MAX_KL = 0.05
MAP_VERSION = 1


@dataclass(frozen=True, slots=True)
class LayerFormats:
    """The formats of one layer's K and V, the reason in words, and the divergence measured (nats), if it was."""

    index: int
    k: Format
    v: Format
    reason: str
    kl: float | None = None


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
    """The choice in one line for people: `24 layers K q4h V q4h (passed the self-check)`."""
    groups: dict[tuple[str, str, str], int] = {}
    for chosen in formats:
        key = (chosen.k, chosen.v, chosen.reason)
        groups[key] = groups.get(key, 0) + 1
    return ", ".join(f"{count} layers K {k} V {v} ({reason})" for (k, v, reason), count in groups.items())


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


def auto_formats(
    geometry: Geometry, measure: Callable[[], Mapping[int, float]], map_path: Path | None
) -> tuple[LayerFormats, ...]:
    """Formats by rule and self-check; `measure` is called only if no map of this model is saved."""
    known = _read_map(map_path, geometry)
    if known is not None:
        return known
    native = native_format(geometry.dtype)
    ruled = [_by_rule(layer, native) for layer in geometry.layers]
    if any(chosen.k == "q4h" for chosen in ruled):
        divergence = measure()
        ruled = [_judged(chosen, divergence[chosen.index], native) for chosen in ruled]
    if map_path is not None:
        write_json(map_path, {"version": MAP_VERSION, "layers": [asdict(chosen) for chosen in ruled]})
    return tuple(ruled)


def _by_rule(layer: LayerGeometry, native: Format) -> LayerFormats:
    k, v = in_4_bits(layer, native)
    if layer.k_bias:
        return LayerFormats(layer.index, native, v, "the K projection has a bias")
    if layer.has_sinks:
        return LayerFormats(layer.index, native, v, "the layer has learned sinks")
    if k != "q4h":
        why = "is not divisible by 16" if layer.k_dim % 16 else f"is divisible by {2 * MAX_ROTATION}"
        return LayerFormats(layer.index, native, v, f"head size {layer.k_dim} {why}")
    return LayerFormats(layer.index, "q4h", v, "passed the self-check")


def _judged(chosen: LayerFormats, kl: float, native: Format) -> LayerFormats:
    """Choose native K if 4 bits change the attention rows too much (or anything is not finite)."""
    if chosen.k != "q4h":
        return chosen
    if kl <= MAX_KL:
        return LayerFormats(chosen.index, "q4h", chosen.v, chosen.reason, kl)
    return LayerFormats(chosen.index, native, chosen.v, f"4-bit K moves attention by KL > {MAX_KL}", kl)


def _read_map(path: Path | None, geometry: Geometry) -> tuple[LayerFormats, ...] | None:
    """The saved map, if it is complete and matches this geometry."""
    if path is None or not path.is_file():
        return None
    try:
        stored: Any = json.loads(path.read_text("utf-8"))
        layers = tuple(LayerFormats(**entry) for entry in stored["layers"])
        whole = stored["version"] == MAP_VERSION and [x.index for x in layers] == [x.index for x in geometry.layers]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return layers if whole else None


def check_tokens(vocab_size: int, count: int) -> torch.Tensor:
    """A fixed pseudo-random token sequence [count], the same on every machine and in every release."""
    state, ids = 0x9E3779B97F4A7C15, []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        ids.append((state >> 33) % vocab_size)
    return torch.tensor(ids, dtype=torch.int64)


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
        keys, values = self._kv[call.kv_index]
        if call.latent:
            keys, values = torch.cat((keys, values), dim=-1), keys
        true = attention_rows(call, keys)
        self._look_at(call, keys, true)
        values = values.transpose(0, 1).repeat_interleave(call.q.shape[1] // keys.shape[1], dim=0)
        return call.expanded((true.exp() @ values).transpose(0, 1).to(call.q.dtype))

    def _look_at(self, call: AttentionCall, keys: torch.Tensor, true: torch.Tensor) -> None:
        """Hook for subclasses that measure: the keys and the log-probabilities [heads, rows, keys] of a layer."""


class SelfCheckStep(DenseStep):
    """Measures per layer what storing K would change."""

    def __init__(self) -> None:
        super().__init__()
        self.divergence: dict[int, float] = {}

    def _look_at(self, call: AttentionCall, keys: torch.Tensor, true: torch.Tensor) -> None:
        """Record the worst KV head's mean KL(true rows ‖ rows over stored K), in nats."""
        k_dim = self._kv[call.kv_index][0].shape[-1]
        if not fits_coded(k_dim):
            return
        stored = attention_rows(call, torch.cat((round_trip(keys[..., :k_dim], "k"), keys[..., k_dim:]), dim=-1))
        kl = (true.exp() * (true - stored).nan_to_num(0.0, posinf=1e9)).sum(-1).mean(-1)  # [heads]
        worst = float(kl.view(keys.shape[1], -1).mean(-1).max())
        self.divergence[call.kv_index] = max(worst, self.divergence.get(call.kv_index, 0.0))


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


def measure_divergence(model: Any, geometry: Geometry, max_context: int) -> dict[int, float]:
    """The self-check's forward: KL in nats per layer index."""
    count = min(CHECK_TOKENS, max_context) // 4 * 4
    ids = check_tokens(geometry.vocab_size, count).to(model.device)
    step = SelfCheckStep()
    with torch.inference_mode():
        run_model(model, step, ids[None], torch.arange(count, device=model.device)[None], ids[:0])
    return step.divergence
