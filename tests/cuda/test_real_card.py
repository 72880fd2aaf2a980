"""Real weights on a card: the next token's distributions at every position against a processor's.

Both compute in bf16 over KV in bf16 with the same weights, by roundings of their own: KV in 4 bits makes many times as
much of a rounding that moves a value over the border of a code.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rekindle.compute.load import load_model
from rekindle.config import Settings
from rekindle.model.batch import SequenceStep
from rekindle.model.check_text import text_ids
from rekindle.model.divergence import divergence
from tests.cuda.test_attention import DEVICE
from tools.real_models import REAL_MODELS

NUM_TOKENS, CHUNKS = 512, (300, 20, 1, 1, 1, 1, 60)  # prompts, extensions and decoded rows; the rest at once
MOST_KL, LEAST_AGREEMENT = 0.002, 0.98


def logits_of(file: Path, device: str, kernels: str) -> torch.Tensor:
    """Logits fp32 [tokens, vocab] of a text that is computed in several steps."""
    settings = Settings.load({"model": str(file), "device": device, "kernels": kernels, "kv": "bf16", "dtype": "bf16"})
    loaded = load_model(settings.model, block_tokens=64, max_context=None, format_map_dir=None)
    ids, num_blocks = text_ids(loaded.directory)[:NUM_TOKENS].numpy(), NUM_TOKENS // 64
    arena = loaded.compute.arena(loaded.spec.layout, num_blocks, loaded.device)
    runner, found, start = loaded.compute.runner(loaded, arena), [], 0
    for count in (*CHUNKS, len(ids) - sum(CHUNKS)):
        step = SequenceStep(ids[start : start + count], start, range(num_blocks), start, "all")
        found.append(runner.forward([step]).cpu())
        start += count
    return torch.cat(found)


@pytest.mark.parametrize("name", REAL_MODELS)
def test_a_card_gives_the_distributions_of_a_processor(name: str) -> None:
    file = REAL_MODELS[name].path()
    found = divergence(logits_of(file, "cpu", "torch"), logits_of(file, DEVICE.type, "auto"))
    print(f"{name}: {found}")
    assert found.kl <= MOST_KL and found.agreement >= LEAST_AGREEMENT, str(found)
