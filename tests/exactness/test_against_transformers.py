"""Native KV against `transformers` alone: greedy answers of `generate`, and logits at every position.

Greedy tokens of tiny models hardly see a broken cache, so the logits are compared too, with teacher forcing.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.exactness.conftest import KINDS, Loader, MakeRig
from tests.exactness.test_paths import some_ids

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def reference(loaded: Loader, kind: str, dtype: str, attention: str = "eager") -> torch.nn.Module:
    directory = loaded(kind, dtype, "native").directory
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[dtype], attn_implementation=attention)
    if kind == "mixtral":
        model.set_experts_implementation("eager")  # the grouped product has no float64
    model.eval()
    return model


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_float64_equals_generate(make_rig: MakeRig, loaded: Loader, kind: str) -> None:
    model, ids = reference(loaded, kind, "fp64"), some_ids(70)
    rig = make_rig(kind, "fp64", "native", max_chunk_tokens=32)
    got = rig.generate(ids, 24).token_ids
    wanted = model.generate(
        torch.tensor([ids]), max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=None
    )
    assert list(got) == wanted[0, len(ids) :].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "attention", "tolerance"),
    # Eager attention takes its softmax in fp32 whatever the dtype; sdpa stays in float64.
    [("fp64", "eager", 1e-6), ("fp64", "sdpa", 1e-12), ("fp32", "eager", 1e-3)],
)
@torch.inference_mode()
def test_logits_at_every_position(
    make_rig: MakeRig, loaded: Loader, kind: str, dtype: str, attention: str, tolerance: float
) -> None:
    model, ids = reference(loaded, kind, dtype, attention), some_ids(70)
    wanted = model(torch.tensor([ids])).logits[0]
    rig = make_rig(kind, dtype, "native")
    for pieces in ([70], [33, 1, 1, 35], [1] * 70):
        got = rig.logits(ids, pieces)
        worst = (got - wanted).abs().max() / wanted.abs().max()
        assert worst <= tolerance, f"pieces {pieces}: logits differ by {worst:.2e} of the largest"
