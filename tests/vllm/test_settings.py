"""Settings of the connector, and engines whose KV cannot be stored: each error says what to set."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import ConfigError
from rekindle_vllm.refusals import EngineFacts, check_engine
from rekindle_vllm.settings import BridgeSettings

FITTING = EngineFacts(groups=["full"], kv_role="kv_both", load_failure_policy="recompute")


def test_the_page_has_every_setting() -> None:
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    table = page[page.index("| `kv_connector_extra_config`") :].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)[1:] == [field.name for field in fields(BridgeSettings)]


def test_settings_reach_the_store() -> None:
    settings = BridgeSettings.of(
        {"dir": "/kv/{dp_rank}", "format": "q4h", "disk": "20GB", "writes_a_day": "9GB", "staging": 4096, "readers": 3}
    )
    store = settings.store(2)
    assert store.directory() == Path("/kv/2") and settings.format == "q4h"
    assert (store.disk_bytes, store.disk_writes_a_day) == (20 * 10**9, 9 * 10**9)
    assert (store.staging_bytes, store.readers) == (4096, 3)
    assert BridgeSettings.of({"dir": "/kv"}).format == "native"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "dir is the directory"),
        ({"dir": 3}, "dir is the directory"),
        ({"dir": "/kv", "fromat": "q4h"}, "did you mean format"),
        ({"dir": "/kv", "format": "fp8"}, "native or q4h"),
        ({"dir": "/kv", "readers": 0}, "readers is a whole number from 1"),
        ({"dir": "/kv", "patience_ms": True}, "patience_ms is a whole number"),
        ({"dir": "/kv", "namespaces": "default"}, "namespaces is a list"),
    ],
)
def test_a_setting_that_is_wrong_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BridgeSettings.of(given)


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a size"):
        BridgeSettings.of({"dir": "/kv", "disk": "many"}).store(0)


@pytest.mark.parametrize(
    ("block", "wanted", "record"), [(16, None, 64), (64, None, 64), (128, None, 128), (16, 32, 32)]
)
def test_records_consist_of_the_engines_blocks(block: int, wanted: int | None, record: int) -> None:
    assert BridgeSettings(dir="/kv", block_tokens=wanted).record_tokens([block]) == record


@pytest.mark.parametrize(("block", "wanted"), [(48, None), (512, None), (32, 16), (16, 96)])
def test_blocks_that_no_record_consists_of_are_refused(block: int, wanted: int | None) -> None:
    with pytest.raises(ConfigError, match="--block-size"):
        BridgeSettings(dir="/kv", block_tokens=wanted).record_tokens([block])


def test_an_engine_that_fits_is_taken() -> None:
    check_engine(FITTING)
    check_engine(replace(FITTING, data_parallel=2, drafts="ngram", cache_dtype="bfloat16"))
    check_engine(replace(FITTING, groups=["window", "full", "window"], tensor_parallel=2, drafts="ngram"))
    check_engine(replace(FITTING, groups=["state", "full", "window"]))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"groups": ["full", "ChunkedLocalAttention"]}, "groups of the kinds ChunkedLocalAttention"),
        ({"groups": ["MLAAttention"]}, "MLAAttention"),
        ({"groups": ["window"]}, "no layer with full attention"),
        ({"groups": []}, "no layer with full attention"),
        ({"groups": ["full", "state"], "keeps_states": False}, "--mamba-cache-mode align"),
        ({"groups": ["full", "state"], "tensor_parallel": 2}, "--tensor-parallel-size 1"),
        ({"groups": ["full", "state"], "drafts": "ngram"}, "do not speculate"),
        ({"load_failure_policy": "fail"}, "set kv_load_failure_policy to recompute"),
        ({"kv_role": "kv_producer"}, "set kv_role to kv_both"),
        ({"cache_dtype": "fp8"}, "--kv-cache-dtype auto"),
        ({"pipeline_parallel": 2}, "--pipeline-parallel-size 1"),
        ({"context_parallel": 2}, "context parallel sizes to 1"),
        ({"data_parallel": 2, "has_own_directory": False}, "{dp_rank}"),
        ({"drafts": "eagle"}, "speculate by ngram"),
        ({"load_format": "dummy"}, "random"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_what_to_set(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"Rekindle cannot keep .*{said}"):
        check_engine(replace(FITTING, **changed))


def test_all_reasons_are_given_at_once() -> None:
    with pytest.raises(ConfigError, match=r"recompute.*kv_both"):
        check_engine(replace(FITTING, load_failure_policy="fail", kv_role="kv_consumer"))
