"""Ways to keep KV, served or not, and what each costs a model: every window is one pass through the model in fp32.

K and V of each layer are what storing them gives back, at once for all tokens; the first tokens of a window, and those
that come last before each query, can stay in bf16 instead. Products have factors in bf16 where the processor computes
those faster, as the model that is served has them: one of KV that changes next to nothing gives a KL of up to 0.0005.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from rekindle.kv.coded import round_trip
from rekindle.model.adapter import AttentionCall, run_model
from rekindle.model.loaded import LoadedModel
from rekindle.model.recurrent import RecurrentLayers
from rekindle.spec import CODED, Format, KVLayout, LayerSpec
from rekindle_lab.bench.eval.kv import Score
from rekindle_lab.record import Measurement

BLOCK, RECENT = 64, 128  # tokens
QUERIES = 256  # that attend at once
PAIRS: tuple[tuple[Format, Format], ...] = (  # next to 8 bits, 16 can gain no more than the little that q8h costs
    *(("bf16", "bf16"), ("q4h", "q4h"), ("q4h", "q8h"), ("q8h", "q4h"), ("q8h", "q8h")),
    *(("q4h", "bf16"), ("bf16", "q4h")),
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """The formats of each layer, how many tokens of a window's beginning are in bf16, and how many before a query."""

    layers: tuple[LayerSpec, ...]
    first: int = 0
    recent: int = 0

    def bytes_per_token(self, context: int) -> float:
        """Bytes of a window of `context` tokens, for each of them."""
        native = tuple(replace(layer, k_format="bf16", v_format="bf16") for layer in self.layers)
        coded, wide = (
            sum(part.payload_bytes for part in KVLayout(BLOCK, layers).parts) / BLOCK
            for layers in (self.layers, native)
        )
        return coded + (wide - coded) * min(1.0, (self.first + self.recent) / context)


def candidates_of(auto: Sequence[LayerSpec]) -> dict[str, Candidate]:
    """Candidates by name, the reference first: K and V of each format, 16 bits for some tokens, more for some layers.

    `auto`: the layers with the formats that `--kv auto` chose.
    """
    auto = tuple(auto)

    def coded(k: Format, v: Format, chosen: Sequence[int] = range(len(auto))) -> tuple[LayerSpec, ...]:
        """These formats on chosen layers, q4h on others."""
        formats = [(k, v) if at in chosen else ("q4h", "q4h") for at in range(len(auto))]
        return tuple(replace(layer, k_format=k, v_format=v) for layer, (k, v) in zip(auto, formats, strict=True))

    pairs = {f"{k}/{v}" if k != v else k: coded(k, v) for k, v in PAIRS}
    found = {"bf16": Candidate(pairs.pop("bf16"))} | {name: Candidate(layers) for name, layers in pairs.items()}
    q4h = pairs["q4h"]
    found[f"q4h, first {BLOCK} tokens bf16"] = Candidate(q4h, first=BLOCK)
    found["auto"] = Candidate(auto)
    for name, layers in (("q4h", q4h), ("auto", auto)):
        found[f"{name}, last {RECENT} tokens bf16"] = Candidate(layers, recent=RECENT)
    thirds = (len(auto) // 3, 2 * len(auto) // 3)
    for which, chosen in (
        ("first", range(thirds[0])),
        ("second", range(*thirds)),
        ("last", range(thirds[1], len(auto))),
    ):
        found[f"q4h, {which} third of layers q8h"] = Candidate(coded("q8h", "q8h", chosen))
    full = [at for at, layer in enumerate(auto) if layer.window is None]
    if len(full) < len(auto):
        found["q4h, layers without a window q8h"] = Candidate(coded("q8h", "q8h", full))
    return found


def scored_candidates(
    model: LoadedModel,
    candidates: Mapping[str, Candidate],
    windows: Sequence[np.ndarray],
    begin: Callable[[str], None],
) -> dict[str, Score]:
    """Score candidates on windows of ids [tokens], uint32, by what the model says with the first of them.

    `begin` is called with what is computed next. Interrupted, it returns what whole windows gave, if there are any.
    """
    scores = {name: Score() for name in candidates}
    for at, ids in enumerate(windows, start=1):
        try:
            found = _of_window(model, candidates, ids, f"window {at} of {len(windows)}", begin)
        except KeyboardInterrupt:
            if at == 1:
                raise
            break
        scores = {name: scores[name].with_all_of(each) for name, each in found.items()}
    return scores


def _of_window(
    model: LoadedModel, candidates: Mapping[str, Candidate], ids: np.ndarray, which: str, begin: Callable[[str], None]
) -> dict[str, Score]:
    following = torch.from_numpy(ids[1:].astype(np.int64))
    scores: dict[str, Score] = {}
    native: torch.Tensor | None = None
    for name, candidate in candidates.items():
        begin(f"{which}: {name}")
        logits = _logits(model, candidate, ids)
        native = logits if native is None else native
        scores[name] = Score()
        scores[name].add(native[:-1], logits[:-1], following)
    return scores


def _logits(model: LoadedModel, candidate: Candidate, ids: np.ndarray) -> torch.Tensor:
    """Logits of every position [tokens, vocab]."""
    tokens, at = torch.from_numpy(ids.astype(np.int64)), torch.arange(len(ids))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.inference_mode():
            return run_model(model.model, StoredStep(candidate), tokens[None], at[None], at)
    finally:
        torch.set_float32_matmul_precision(precision)


def measured_candidates(
    text: str, candidates: Mapping[str, Candidate], scores: Mapping[str, Score], context: int
) -> Iterator[Measurement]:
    """A line per candidate and figure: a table has the candidates as rows, the fewest bytes first."""
    native = next(iter(scores.values()))
    for name in sorted(candidates, key=lambda each: candidates[each].bytes_per_token(context)):
        score, detail = scores[name], {"positions": scores[name].num_tokens}
        yield Measurement(name, "a token", "bytes", (candidates[name].bytes_per_token(context),), detail)
        yield Measurement(name, f"{text}: KL", "nats", (score.mean_kl,), detail)
        yield Measurement(name, f"{text}: the same first choice", "share", (score.agreement,), detail)
        change = score.perplexity / native.perplexity - 1
        yield Measurement(name, f"{text}: change of perplexity", "share", (change,), detail)


class StoredStep:
    """Dense causal attention over one sequence, to K and V as a candidate keeps them."""

    states = None

    def __init__(self, candidate: Candidate) -> None:
        self.recurrent = RecurrentLayers()
        self._candidate = candidate
        self._layers = {layer.index: layer for layer in candidate.layers}
        self._kv: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def write(self, layer_index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep K and V [rows, kv_heads, dim] as they are stored, and in bf16."""
        layer, first = self._layers[layer_index], slice(self._candidate.first)
        exact_k, exact_v = k.bfloat16().float(), v.bfloat16().float()
        stored_k = round_trip(k.float(), "k", layer.k_format) if layer.k_format in CODED else exact_k.clone()
        stored_v = round_trip(v.float(), "v", layer.v_format) if layer.v_format in CODED else exact_v.clone()
        stored_k[first], stored_v[first] = exact_k[first], exact_v[first]
        self._kv[layer_index] = stored_k, exact_k, stored_v, exact_v

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return attention's rows times V: [rows, heads, v_dim]."""
        assert call.softcap is None and call.sinks is None and call.latent is None, "no real model here has these"
        rows = torch.arange(len(call.q)).split(QUERIES)
        return torch.cat([self._attended(call, each) for each in rows]).to(call.q.dtype)

    def _attended(self, call: AttentionCall, rows: torch.Tensor) -> torch.Tensor:
        """The output of some rows, which see keys as they are stored, and recent ones in bf16."""
        recent, end = self._candidate.recent, int(rows[-1]) + 1
        begin = max(0, int(rows[0]) + 1 - (call.window or end))
        at = torch.arange(begin, end)
        wide = at[at > int(rows[0]) - recent] if recent else at[:0]
        distance = rows[:, None] - torch.cat((at, wide))
        is_recent, is_wide = distance < recent, torch.arange(len(at) + len(wide)) >= len(at)
        seen = (distance >= 0) & (distance < (call.window or end)) & (is_recent == is_wide)
        stored_k, exact_k, stored_v, exact_v = self._kv[call.kv_index]
        k, v = torch.cat((stored_k[at], exact_k[wide])), torch.cat((stored_v[at], exact_v[wide]))
        k, v = (each.transpose(0, 1).repeat_interleave(call.q.shape[1] // each.shape[1], dim=0) for each in (k, v))
        q = call.q[rows].float().transpose(0, 1)
        out = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen, scale=call.scaling)
        return out[0].transpose(0, 1)
