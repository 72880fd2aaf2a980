"""The real vLLM: cold, killed with -9, warm; damage on disk; engines that cannot be stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

from benchmarks.vllm.engine import Answer, Prompt, served
from rekindle_vllm.config import kind_of


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(300, 4000, length)]


IDS = prompt(1000)
LONGER = IDS + prompt(60, 1)


def reuse(prompt_tokens: int, *, hot: int = 0, loaded: int = 0, failed: int = 0) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "reused_tokens": hot + loaded,
        "hot_tokens": hot,
        "loaded_tokens": loaded,
        "failed_tokens": failed,
    }


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Answer]]:
    """A store that a killed engine left, and its answers: cold, and the longer prompt with the shorter one hot."""
    directory = tmp_path_factory.mktemp("native")
    return directory, served(directory, [Prompt(IDS), Prompt(LONGER)])


def test_a_killed_engine_is_continued_bit_for_bit(native: tuple[Path, list[Answer]]) -> None:
    directory, (cold, hot) = native
    assert cold.reuse == reuse(1000) and hot.reuse == reuse(1060, hot=960)
    warm, again = served(directory, [Prompt(LONGER), Prompt(IDS)])
    assert warm.reuse == reuse(1060, loaded=1024)
    assert again.reuse == reuse(1000, hot=960) and again.ids == cold.ids
    assert warm.ids == hot.ids


def test_the_same_tokens_from_disk_give_the_same_logits(native: tuple[Path, list[Answer]], tmp_path: Path) -> None:
    _, (_, hot) = native
    served(tmp_path, [Prompt(IDS)])
    (warm,) = served(tmp_path, [Prompt(LONGER)])
    assert warm.reuse == reuse(1060, loaded=960)
    assert (warm.ids, warm.first) == (hot.ids, hot.first)


def test_other_block_sizes_read_the_same_records(native: tuple[Path, list[Answer]]) -> None:
    directory, (_, hot) = native
    (warm,) = served(directory, [Prompt(LONGER)], block_size=32)
    assert warm.reuse == reuse(1060, loaded=1024) and warm.ids == hot.ids


def test_a_flipped_bit_is_computed_again_and_usage_stays_true(tmp_path: Path) -> None:
    (cold,) = served(tmp_path, [Prompt(IDS)])
    (shard,) = tmp_path.rglob("blocks-*.safetensors")
    data = bytearray(shard.read_bytes())
    records = data.count(b"RKBLOCK\n")
    at = [number for number in range(len(data)) if data[number : number + 8] == b"RKBLOCK\n"][7]
    data[at + 5000] ^= 1
    shard.write_bytes(data)
    warm, hot = served(tmp_path, [Prompt(IDS), Prompt(IDS)])
    assert records == 15 and warm.ids == cold.ids == hot.ids
    assert warm.reuse == reuse(1000, loaded=448, failed=512)
    assert warm.cached_tokens == 960  # what vLLM promised
    (repaired,) = served(tmp_path, [Prompt(IDS)])
    assert repaired.reuse == reuse(1000, loaded=960) and repaired.ids == cold.ids


def test_in_4_bits_replies_stay_near(tmp_path: Path) -> None:
    cold, hot = served(tmp_path, [Prompt(IDS), Prompt(LONGER)], record_format="q4h")
    warm, _ = served(tmp_path, [Prompt(LONGER), Prompt(IDS)], record_format="q4h")
    assert warm.reuse == reuse(1060, loaded=1024) and cold.reuse == reuse(1000)
    assert warm.ids[0] == hot.ids[0]
    for token in hot.first.keys() & warm.first.keys():
        assert abs(hot.first[token] - warm.first[token]) < 0.5


def test_two_workers_save_what_one_reads_and_the_other_way_round(tmp_path: Path) -> None:
    (cold,) = served(tmp_path, [Prompt(IDS)], tensor_parallel_size=2)
    (warm,) = served(tmp_path, [Prompt(LONGER, 70)])
    assert cold.reuse == reuse(1000) and warm.reuse == reuse(1060, loaded=960)
    (again,) = served(tmp_path, [Prompt(LONGER + warm.ids)], tensor_parallel_size=2)
    assert again.reuse == reuse(1130, loaded=1088)


def test_scopes_and_crowds(tmp_path: Path) -> None:
    """Ten requests at once on few blocks preempt each other; namespaces share nothing on disk; salts nothing at all."""
    own = [Prompt(prompt(700, seed), 40, {"namespace": "tenant", "agent": f"a{seed}"}, True) for seed in range(10)]
    small = {"num_gpu_blocks_override": 40, "max_num_seqs": 10}
    crowded = served(tmp_path, own, **small)
    alone = served(tmp_path, [Prompt(p.ids, 1, p.params) for p in own], **small)
    assert [answer.reuse["loaded_tokens"] for answer in alone] == [640] * 10
    assert [answer.ids[0] for answer in alone] == [answer.ids[0] for answer in crowded]
    (other,) = served(tmp_path, [Prompt(own[0].ids, 1, {"namespace": "other"})])
    assert other.reuse == reuse(700)


def test_an_engine_that_cannot_be_stored_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="set kv_load_failure_policy to recompute"):
        served(tmp_path, [Prompt(IDS)], transfer={"kv_load_failure_policy": "fail"})


def test_kinds_of_groups_go_by_vllms_own_classes() -> None:
    attention = {"block_size": 64, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    assert kind_of(FullAttentionSpec(**attention)) == "full"
    assert kind_of(FullAttentionSpec(**attention, sliding_window=128)) == "window of 128 tokens among full attention"
    assert kind_of(FullAttentionSpec(**attention, attention_chunk_size=256)) == "chunks of 256 tokens"
    assert kind_of(SlidingWindowSpec(**attention, sliding_window=128)) == "window"
    assert kind_of(MLAAttentionSpec(**attention)) == "MLAAttention"
    state = MambaSpec(block_size=64, shapes=((2, 2),), dtypes=(torch.float32,))
    assert kind_of(state) == "state"
