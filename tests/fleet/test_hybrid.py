"""The real vLLM with models of several KV cache groups: windows, recurrent states, and what is kept of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.vllm.engine import Answer, Prompt, served
from tests.fleet.test_vllm import prompt, reuse

SIZES = {
    "vocab_size": 4000,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
IDS = prompt(1400)
LONGER = IDS + prompt(60, 1)


def written(directory: Path, config: transformers.PreTrainedConfig) -> Path:
    """A model of this config with random weights."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3: of three layers two see 128 tokens, which vLLM keeps in two groups of their own."""
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=6, sliding_window=128, sliding_window_pattern=3, query_pre_attn_scalar=32, **SIZES
    )
    return written(tmp_path_factory.mktemp("windows"), config)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-Next: of four layers three are gated delta nets, whose states vLLM keeps after each 640 tokens."""
    config = transformers.Qwen3NextConfig(
        num_hidden_layers=4,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        **SIZES,
    )
    return written(tmp_path_factory.mktemp("states"), config)


@pytest.fixture(scope="module")
def kept(windows: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Answer]]]:
    """A store that a killed engine with windows left, and its answers: cold, and with the shorter prompt hot."""
    directory = tmp_path_factory.mktemp("kept")
    yield directory, served(directory, [Prompt(IDS), Prompt(LONGER)], model=str(windows))


def same(one: Answer, other: Answer) -> bool:
    """Whether two answers have the same tokens, and the first the same log probabilities."""
    return (one.ids, one.first) == (other.ids, other.first)


def test_windows_are_continued_bit_for_bit_after_a_kill(windows: Path, kept: tuple[Path, list[Answer]]) -> None:
    directory, (cold, hot) = kept
    assert cold.reuse == reuse(1400) and hot.reuse == reuse(1460, hot=1344)
    warm, again, earlier = served(
        directory, [Prompt(LONGER), Prompt(IDS), Prompt(IDS[:600] + prompt(30, 2))], model=str(windows)
    )
    assert warm.reuse == reuse(1460, loaded=1408)
    assert again.reuse == reuse(1400, loaded=1344) and same(again, cold)  # of which no window was hot
    assert earlier.reuse == reuse(630, loaded=512)  # where the first step ended: no window is kept of 576
    (fresh,) = served(None, [Prompt(IDS[:600] + prompt(30, 2))], model=str(windows))
    assert earlier.ids == fresh.ids


def test_a_window_that_is_damaged_is_found_before_anything_is_computed_on_it(
    windows: Path, kept: tuple[Path, list[Answer]], tmp_path: Path
) -> None:
    _, (cold, _) = kept
    served(tmp_path, [Prompt(IDS)], model=str(windows))
    (shard,) = tmp_path.rglob("blocks-1-*.safetensors")
    data = bytearray(shard.read_bytes())
    last = data.rindex(b"RKBLOCK\n")
    data[last + 5000] ^= 1
    shard.write_bytes(data)
    warm, repaired = served(tmp_path, [Prompt(IDS), Prompt(IDS)], model=str(windows))
    assert warm.ids == cold.ids and warm.reuse["failed_tokens"] > 0
    assert repaired.reuse == reuse(1400, hot=1344) and repaired.ids == cold.ids
    (again,) = served(tmp_path, [Prompt(IDS)], model=str(windows))
    assert again.reuse == reuse(1400, loaded=1344) and again.ids == cold.ids


def test_two_workers_save_windows_that_one_reads(
    windows: Path, kept: tuple[Path, list[Answer]], tmp_path: Path
) -> None:
    _, (cold, _) = kept
    served(tmp_path, [Prompt(IDS)], model=str(windows), tensor_parallel_size=2)
    (warm,) = served(tmp_path, [Prompt(IDS)], model=str(windows))
    assert warm.reuse == reuse(1400, loaded=1344) and warm.ids == cold.ids


@pytest.mark.parametrize("record_format", ["native", "q4h"])
def test_states_are_continued_after_a_kill(states: Path, tmp_path: Path, record_format: str) -> None:
    engine: dict[str, Any] = {"model": str(states), "block_size": None, "record_format": record_format}
    cold, hot = served(tmp_path, [Prompt(IDS, 8), Prompt(LONGER, 8)], **engine)
    assert cold.reuse == reuse(1400) and hot.reuse == reuse(1460, hot=1280)
    warm, again = served(tmp_path, [Prompt(LONGER, 8), Prompt(IDS[:700] + prompt(30, 2), 8)], **engine)
    assert warm.reuse == reuse(1460, loaded=1280) and again.reuse["reused_tokens"] == 640
    if record_format == "native":
        assert same(warm, hot)
