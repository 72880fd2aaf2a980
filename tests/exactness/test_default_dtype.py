"""What one engine computes does not depend on torch's default dtype, which is that of another model while it loads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rekindle.kv.plan import AttentionPlan
from rekindle.kv.step_layout import SequenceSpan, StepLayout
from tests.exactness.rig import Rig, load
from tests.tiny_models import tiny_model_dir

IDS = tuple(range(5, 90))


@contextmanager
def another_model_loading() -> Iterator[None]:
    """What `from_pretrained` sets for as long as it makes a model in bf16."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("dtype", "kv"), [("bf16", "q4h"), ("bf16", "q8h"), ("fp32", "q4h"), ("fp32", "native")])
def test_answers_and_bytes_are_the_same_while_another_model_is_loaded(dtype: str, kv: str, tmp_path: Path) -> None:
    model = load(tiny_model_dir("llama", dtype, tmp_path), dtype, kv)
    alone, beside = Rig(model, num_blocks=16), Rig(model, num_blocks=16)
    expected = alone.generate(IDS, 20).token_ids
    with another_model_loading():
        plan = AttentionPlan(StepLayout([SequenceSpan([0], 0, 4, 0)], model.spec.layout.block_tokens, 4), "cpu")
        assert plan.worst.dtype == torch.float32, "kernels write so many bytes"
        assert beside.generate(IDS, 20).token_ids == expected
    assert beside.stored(IDS) == alone.stored(IDS)
