"""The formats that `--kv auto` takes: the fewest bytes with which the whole model says what it says with native KV.

A layer's K and V begin in 4 bits, or in 8 where 4 are known to harm: where the K projection adds a bias, where
attention has learned sinks, and in families of which others report it. If the distributions of next tokens on the check
text then differ by more than MAX_KL, K and V of single layers are promoted to 8 bits and to native, those first that
change their layer's output most for the bytes; how many is found by a few tries, each a forward through the real path.

A layer alone shows little: 29 of 30 layers that each pass a check of their own cost 3 % of perplexity together. And a
model in 16 or 8 bits rounds: the least change of its embeddings moves its logits, by a KL of 0.006 where inputs of
linear layers have 8 bits. That much is subtracted, for it says nothing about KV.

The decision is saved once per model and reused: it is part of the fingerprint, and a borderline model must not flip
between two starts, which would make every agent cold.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from operator import neg
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from rekindle.kv.coded import round_trip
from rekindle.kv.q4h import MAX_ROTATION
from rekindle.model.adapter import AttentionCall, run_model
from rekindle.model.check_text import checked_ids
from rekindle.model.dense_attention import DenseStep, attended
from rekindle.model.divergence import Reference
from rekindle.model.fingerprint import write_json
from rekindle.model.formats import LayerFormats, fits_coded, layout_of, native_format
from rekindle.model.geometry import Geometry, LayerGeometry
from rekindle.model.loaded import LoadedModel
from rekindle.model.trial import sequence_step
from rekindle.spec import CODED, Format, KVLayout, LayerSpec

Kind = Literal["k", "v"]
# In nats a token, beyond the model's own roundings. It is less than the 1 % of perplexity that may be lost, for other
# texts lose up to a third more than the check text. Real models of 0.1 and 0.3 billion parameters come near it with K
# in 8 bits and V in 4 (0.008), where all in 4 bits gives 0.05 to 0.1; 8 bits for both give 0.001.
MAX_KL = 0.007
MOST_TOKENS, MOST_TOKENS_OF_LARGE, LARGE_MODEL = 512, 256, 2_000_000_000
PIECE_TOKENS = 64  # logits of so many positions are in memory at once
RANKED_TOKENS = 192
CLOSE = 0.01  # of the bytes between the fewest bits and native
TRIES = 4  # by interpolation; more only where the KL does not fall as the errors do
FROM_8_BITS = ("gemma4", "gpt_oss")  # beginnings of `model_type` of families that others report to break at 4 bits
MAP_VERSION = 2


@dataclass(frozen=True, slots=True)
class AutoFormats:
    """The formats, and what they change of the whole model: mean KL over `num_tokens`, `rounding` subtracted, nats."""

    layers: tuple[LayerFormats, ...]
    kl: float
    rounding: float
    num_tokens: int

    def __str__(self) -> str:
        """What it comes to, for the banner, next to the formats and bytes of the layout."""
        reasons = Counter(each.reason for each in self.layers if each.reason)
        more = [
            f"more than 4 bits on {count} of {len(self.layers)} layers: {reason}" for reason, count in reasons.items()
        ]
        if not self.num_tokens:
            return "; ".join(more)
        return "; ".join([f"KL {self.kl:.2g} to native KV on {self.num_tokens} tokens, at most {MAX_KL:g}", *more])


class _Promotion(NamedTuple):
    """A better format for K or V of one layer, which takes `num_bytes` more in a block.

    `gain`: the squared error of the layer's output that each of these bytes saves.
    """

    at: int
    kind: Kind
    format: Format
    gain: float
    num_bytes: int


def auto_formats(draft: LoadedModel, geometry: Geometry, map_path: Path | None) -> AutoFormats:
    """The formats for a model that is given with native KV; measured only if no decision of it is saved."""
    known = _read_map(map_path, geometry)
    if known is not None:
        return known
    first = tuple(
        _first_formats(layer, draft.spec.facts.family, native_format(geometry.dtype)) for layer in geometry.layers
    )
    if not any(fmt in CODED for each in first for fmt in (each.k, each.v)):
        found = AutoFormats(first, 0.0, 0.0, 0)
    else:
        found = _searched(_WholeModel(draft), geometry, first, lambda: _output_errors(draft, geometry))
    if map_path is not None:
        write_json(map_path, {"version": MAP_VERSION, **asdict(found)})
    return found


def _first_formats(layer: LayerGeometry, family: str, native: Format) -> LayerFormats:
    """The fewest bits that are tried for a layer."""
    v = _coded(layer, "q4h", native)
    if not fits_coded(layer.k_dim):
        why = "is not divisible by 16" if layer.k_dim % 16 else f"is divisible by {2 * MAX_ROTATION}"
        return LayerFormats(layer.index, native, v, f"head size {layer.k_dim} {why}")
    if family.startswith(FROM_8_BITS):
        return LayerFormats(layer.index, "q8h", _coded(layer, "q8h", native), "4 bits are reported to harm this family")
    if layer.k_bias:
        return LayerFormats(layer.index, "q8h", v, "the K projection has a bias")
    if layer.has_sinks:
        return LayerFormats(layer.index, "q8h", v, "the layer has learned sinks")
    return LayerFormats(layer.index, "q4h", v, "")


def _coded(layer: LayerGeometry, wanted: Format, native: Format) -> Format:
    """The format of a layer's V: rotary keys of latents are native, and heads that do not fit."""
    return native if layer.latent or not fits_coded(layer.v_dim) else wanted


def _searched(
    whole: _WholeModel,
    geometry: Geometry,
    first: tuple[LayerFormats, ...],
    errors: Callable[[], Mapping[tuple[int, Kind, Format], float]],
) -> AutoFormats:
    """Promote as few as are needed, to within CLOSE; `errors` is asked only if any are.

    A try is where the KL reaches the bound if it falls as the errors do between the numbers that are known, moved so
    that one near a known number ends the search. After TRIES of them it goes on by halves.
    """

    def kl_of(layers: Sequence[LayerFormats]) -> float:
        return whole.kl(layout_of(geometry, layers, whole.block_tokens))

    layers, kl = first, kl_of(first)
    if kl > MAX_KL:
        promotions = _promotions(geometry, first, errors())
        num_bytes = [0, *accumulate(each.num_bytes for each in promotions)]
        left = [*accumulate((each.gain * each.num_bytes for each in reversed(promotions)), initial=0.0)][::-1]
        (few, most), (enough, kl) = (0, kl), (len(promotions), 0.0)  # native throughout differs by nothing
        close, tried = CLOSE * num_bytes[-1], 0
        while enough - few > 1 and num_bytes[enough] - num_bytes[few] > close:
            error = left[enough] + (left[few] - left[enough]) * (MAX_KL - kl) / (most - kl)
            expected = bisect_left(left, -error, key=neg) if tried < TRIES else (few + enough) // 2
            nearest = max(bisect_right(num_bytes, num_bytes[few] + close) - 1, few + 1)
            furthest = min(bisect_left(num_bytes, num_bytes[enough] - close), enough - 1)
            number, tried = min(max(expected, nearest), furthest), tried + 1
            found = kl_of(_promoted(first, promotions[:number]))
            if found <= MAX_KL:
                enough, kl = number, found
            else:
                few, most = number, found
        layers = _promoted(first, promotions[:enough])
    return AutoFormats(layers, kl, whole.rounding, whole.num_tokens)


def _promoted(first: Sequence[LayerFormats], promotions: Sequence[_Promotion]) -> tuple[LayerFormats, ...]:
    layers = list(first)
    for each in promotions:
        old = layers[each.at]
        k, v = (each.format, old.v) if each.kind == "k" else (old.k, each.format)
        layers[each.at] = LayerFormats(old.index, k, v, old.reason or "4 bits change too much")
    return tuple(layers)


def _promotions(
    geometry: Geometry, first: Sequence[LayerFormats], errors: Mapping[tuple[int, Kind, Format], float]
) -> list[_Promotion]:
    """All promotions up to native, those that save most for a byte first; of one K or V in the order of its bits."""
    found = []
    native = native_format(geometry.dtype)
    for at, (layer, formats) in enumerate(zip(geometry.layers, first, strict=True)):
        kinds: tuple[tuple[Kind, Format], ...] = (("k", formats.k), ("v", formats.v))
        for kind, fmt in kinds:
            ladder: list[Format] = [*CODED[CODED.index(fmt) :], native] if fmt in CODED else [native]
            costs = [_bytes(layer, kind, each, native) for each in ladder]
            of_levels = [errors.get((layer.index, kind, each), 0.0) for each in ladder]
            level = 0
            while level + 1 < len(ladder):
                gains = {
                    higher: (of_levels[level] - of_levels[higher]) / (costs[higher] - costs[level])
                    for higher in range(level + 1, len(ladder))
                }
                lower, level = level, max(gains, key=lambda each: gains[each])
                found.append(_Promotion(at, kind, ladder[level], gains[level], costs[level] - costs[lower]))
    return sorted(found, key=lambda each: -each.gain)


def _bytes(layer: LayerGeometry, kind: Kind, fmt: Format, native: Format) -> int:
    """Bytes of a block with K or V of a layer in this format."""
    k, v = (fmt, native) if kind == "k" else (native, fmt)
    spec = LayerSpec(layer.index, layer.num_kv_heads, layer.k_dim, layer.v_dim, layer.window, k, v, layer.latent)
    return KVLayout(64, (spec,)).block_bytes


class _WholeModel:
    """The model on its check text with native KV, and in other formats compared with that."""

    def __init__(self, draft: LoadedModel) -> None:
        """Compute with native KV, and again with the embeddings changed by one rounding of their dtype."""
        large = draft.spec.facts.num_parameters >= LARGE_MODEL
        most = min(MOST_TOKENS_OF_LARGE if large else MOST_TOKENS, draft.spec.max_context)
        self._draft, self._ids = draft, checked_ids(draft.directory, draft.spec.vocab_size, most)
        self.block_tokens, self.num_tokens = draft.spec.layout.block_tokens, len(self._ids)
        native = draft.spec.layout
        self._references = [Reference(logits) for logits in self._logits(native)]
        self.rounding = 0.0
        with _embeddings_rounded_once_more(draft.model):
            self.rounding = self.kl(native)

    def kl(self, layout: KVLayout) -> float:
        """Mean KL to native KV in nats, `rounding` subtracted; infinite if anything is not finite."""
        pairs = zip(self._references, self._logits(layout), strict=True)
        total = sum(reference.sum_of_kl(logits) for reference, logits in pairs)
        return max(0.0, total / self.num_tokens - self.rounding)

    def _logits(self, layout: KVLayout) -> Iterator[torch.Tensor]:
        """Logits of every position, some positions at a time."""
        loaded = replace(self._draft, spec=replace(self._draft.spec, layout=layout))
        num_blocks = -(-self.num_tokens // layout.block_tokens)
        runner = loaded.compute.runner(loaded, loaded.compute.arena(layout, num_blocks, loaded.device))
        for start in range(0, self.num_tokens, PIECE_TOKENS):
            ids = self._ids[start : start + PIECE_TOKENS]
            yield runner.forward([sequence_step(ids, start, range(num_blocks), "all")])


@contextmanager
def _embeddings_rounded_once_more(model: Any) -> Iterator[None]:
    """Change every value of the token embeddings by one unit in its last place, up and down in turn."""

    def changed(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        signs = 1 - 2 * (torch.arange(output.shape[-1], device=output.device) % 2)
        return output * (1 + torch.finfo(output.dtype).eps * signs).to(output.dtype)

    handle = model.get_input_embeddings().register_forward_hook(changed)
    try:
        yield
    finally:
        handle.remove()


def _output_errors(draft: LoadedModel, geometry: Geometry) -> Mapping[tuple[int, Kind, Format], float]:
    """By layer index, K or V, and format: the squared error of the attention's output, relative to its square."""
    ids = checked_ids(draft.directory, draft.spec.vocab_size, min(RANKED_TOKENS, draft.spec.max_context))
    step, at = _RankingStep(), torch.arange(len(ids), device=draft.model.device)
    with torch.inference_mode():
        run_model(draft.model, step, ids[None].to(at.device), at[None], at[:0])
    return step.errors


class _RankingStep(DenseStep):
    """Measures what storing K alone, or V alone, changes of each attention's output."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: dict[tuple[int, Kind, Format], float] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return attention's output, of which those with coded K or V are compared."""
        k, v = self._kv[call.kv_index]
        exact = attended(call, k, v)
        for fmt in CODED:
            if fits_coded(k.shape[-1]):
                self._compare(call, ("k", fmt), exact, attended(call, round_trip(k, "k", fmt), v))
            if fits_coded(v.shape[-1]) and not call.latent:
                self._compare(call, ("v", fmt), exact, attended(call, k, round_trip(v, "v", fmt)))
        return call.expanded(exact.to(call.q.dtype))

    def _compare(
        self, call: AttentionCall, key: tuple[Kind, Format], exact: torch.Tensor, stored: torch.Tensor
    ) -> None:
        error = float((stored - exact).square().sum() / exact.square().sum().clamp_min(1e-30))
        place = (call.kv_index, *key)
        self.errors[place] = self.errors.get(place, 0.0) + (error if math.isfinite(error) else 1e9)


def _read_map(path: Path | None, geometry: Geometry) -> AutoFormats | None:
    """The saved decision, if it is complete and matches this geometry."""
    if path is None or not path.is_file():
        return None
    try:
        stored: Any = json.loads(path.read_text("utf-8"))
        layers = tuple(LayerFormats(**entry) for entry in stored["layers"])
        found = AutoFormats(layers, float(stored["kl"]), float(stored["rounding"]), int(stored["num_tokens"]))
        whole = stored["version"] == MAP_VERSION and [x.index for x in layers] == [x.index for x in geometry.layers]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if whole else None
