"""Our path gives the logits of the model's own code at every position, whatever is packed and chunked how."""

from __future__ import annotations

import pytest
import torch

from rekindle.spec import Format
from tests.model.helpers import Bench, in_memory, random_ids, reference_logits
from tests.tiny_models import tiny_model

SERVED = (
    "llama llama-80 mistral qwen2 qwen3 gemma2 gemma3 gemma4 mixtral qwen3-moe phi3 gpt-oss gpt-neox gpt2 smollm3 "
    "olmo2 granite cohere2"
).split()
LENGTHS = {"a": 53, "b": 9, "c": 34}
CHUNKS = [{"a": 20, "b": 1, "c": 3}, {"a": 1, "c": 30}, {"b": 8, "a": 31}, {"a": 1, "c": 1}]


def packed_logits(bench: Bench, sequences: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """All logits of three sequences, run in chunks beside one another."""
    at = dict.fromkeys(sequences, 0)
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in sequences}
    for chunk in CHUNKS:
        named = [(name, sequences[name][at[name] : at[name] + count]) for name, count in chunk.items()]
        for (name, ids), logits in zip(named, bench.forward(*named), strict=True):
            rows[name].append(logits)
            at[name] += len(ids)
    assert at == LENGTHS
    return {name: torch.cat(parts) for name, parts in rows.items()}


@pytest.mark.parametrize("kind", SERVED)
def test_float64_native_equals_the_model(kind: str) -> None:
    model = tiny_model(kind, torch.float64)
    sequences = {name: random_ids(count, seed=len(name) + count) for name, count in LENGTHS.items()}
    ours = packed_logits(Bench(in_memory(model)), sequences)
    for name, ids in sequences.items():
        theirs = reference_logits(model, ids)
        assert ours[name].dtype == torch.float64
        assert (ours[name] - theirs).abs().max() <= 1e-9 * theirs.abs().max().clamp_min(1), name


@pytest.mark.parametrize(("dtype", "kv", "bound"), [(torch.float32, None, 1e-5), (torch.bfloat16, None, 0.15)])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_lower_precision_native(kind: str, dtype: torch.dtype, kv: Format | None, bound: float) -> None:
    model = tiny_model(kind, dtype)
    ids = random_ids(60)
    bench = Bench(in_memory(model, kv=kv))
    ours = torch.cat([bench.forward(("a", part))[0] for part in (ids[:33], ids[33:34], ids[34:])])
    assert ours.dtype == torch.float32
    theirs = reference_logits(model, ids).float()
    assert (ours - theirs).abs().max() <= bound * theirs.abs().max()


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mixtral", "gpt-oss", "llama-80"])
@pytest.mark.parametrize("kv", ["q4h", None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_path_stores_the_same_bytes(kind: str, kv: Format | None, dtype: torch.dtype) -> None:
    loaded = in_memory(tiny_model(kind, dtype), kv=kv)
    ids, other = random_ids(70), random_ids(41, seed=2)
    cold, pieces, packed = Bench(loaded), Bench(loaded), Bench(loaded)
    (expected,) = cold.forward(("a", ids))
    at, rows = 0, []
    for count in (1, 2, 1, 17, 30, 1, 5, 12, 1):
        rows.extend(pieces.forward(("a", ids[at : at + count])))
        at += count
    assert at == len(ids)
    first = packed.forward(("x", other), ("a", ids[:37]))[1]
    second = packed.forward(("a", ids[37:]), ("x", other[:3]))[0]
    for bench, logits in ((pieces, torch.cat(rows)), (packed, torch.cat([first, second]))):
        assert bench.stored_bytes("a") == cold.stored_bytes("a")
        assert torch.equal(logits, expected)


def test_q4h_logits_stay_near_the_true_ones() -> None:
    model = tiny_model("llama", torch.float64)
    ids = random_ids(64)
    true = reference_logits(model, ids).log_softmax(-1)
    stored = Bench(in_memory(model, kv="q4h")).forward(("a", ids))[0].log_softmax(-1)
    kl = (true.exp() * (true - stored)).sum(-1).mean()
    assert 1e-6 < kl < 0.2
