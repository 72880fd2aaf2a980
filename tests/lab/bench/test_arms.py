"""Every arm runs and measures what its name says, on a tiny model; how fast is not asked here."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.match import MatchBench, run_match_bench
from rekindle.compute.load import eos_ids, read_config
from rekindle.config import Settings
from rekindle.errors import ConfigError, RekindleError
from rekindle.harness.client import flags_of
from rekindle.model.gguf import opened
from rekindle_lab.bench.endless import endless_copy
from rekindle_lab.bench.engine import arms, reuse_arm, transformers_arm
from rekindle_lab.bench.engine.bench import EngineBench, check_peers, run_engine_bench
from rekindle_lab.bench.engine.gguf_model import write_gguf
from rekindle_lab.bench.engine.job import Job
from rekindle_lab.bench.engine.peers import peers_of
from rekindle_lab.record import Measurement
from tests.tiny_models import tiny_model_dir

CONTEXT = 600


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("llama", "fp32", tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def job(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Two repeats on an endless twin, few tokens."""
    parent = tmp_path_factory.mktemp("jobs")
    settings = Settings.load({"kv": "q4h", "threads": 1, "hot_bytes": 64 << 20})
    flags = {**flags_of(settings), "model": str(endless_copy(model, parent / "model")), "store": str(parent / "store")}
    return Job("hot", flags, CONTEXT, repeats=2, seed=0, decode_tokens=48)


@pytest.fixture(scope="module")
def hot(job: Job) -> dict[str, Measurement]:
    return {found.measure: found for found in arms.hot(job)}


def outcome(found: Measurement) -> tuple[list[str], int]:
    return found.detail["outcomes"], found.detail["computed_tokens"]


def test_an_endless_twin_has_no_end(model: Path, job: Job) -> None:
    assert eos_ids(model, read_config(model))
    twin = Path(job.flags["model"])
    assert not eos_ids(twin, read_config(twin))


def test_the_hot_arm(hot: dict[str, Measurement]) -> None:
    prompt = hot["cold"].detail["prompt_tokens"]
    assert outcome(hot["cold"]) == (["miss"], prompt)
    assert outcome(hot["cold, nothing saved"]) == (["miss"], prompt)
    assert hot["hot EXTEND"].detail["outcomes"] == ["extend"]
    assert 40 <= hot["hot EXTEND"].detail["computed_tokens"] <= 64 + 4
    assert outcome(hot["hot EXACT"]) == (["exact"], 1)
    for share in (0.25, 0.5, 0.75):
        found = hot[f"DIVERGE at {share:.0%}"]
        assert found.detail["outcomes"] == ["diverge"]
        assert abs(found.detail["hot_tokens"] / found.detail["prompt_tokens"] - share) < 0.05
    layers, heads, size = 3, 2, 32
    assert hot["KV bytes per token"].median == layers * heads * (size / 2 + size / 16 + size / 2 + size / 32)
    for count in (1, 4, 8):
        assert all(rate > 0 for rate in hot[f"decode, {count} streams"].values)
    assert hot["engine outside the forward, per step"].median > 0


@pytest.mark.parametrize("variant", ["cached", "evicted"])
def test_the_warm_arm_reads_the_base_text_from_disk(job: Job, hot: dict[str, Measurement], variant: str) -> None:
    for number in range(job.repeats):
        (found,) = arms.warm(replace(job, arm="warm", variant=variant, number=number))
        assert found.detail["outcomes"] == ["extend"]
        assert found.detail["hot_tokens"] == 0
        assert found.detail["warm_tokens"] >= hot["cold"].detail["prompt_tokens"] - 4
        assert 40 <= found.detail["computed_tokens"] <= 64 + 4


@pytest.mark.parametrize("variant", ["in chunks", "one piece"])
def test_the_memory_arm(job: Job, variant: str) -> None:
    (found,) = arms.memory(replace(job, arm="memory", variant=variant))
    before, peak = found.detail["resident_before_bytes"], found.detail["peak_bytes"]
    assert peak >= before > 1 << 20 and found.median == (peak - before) / 2**20


def test_the_arms_of_reuse(job: Job, hot: dict[str, Measurement]) -> None:
    found = {(each.measure, each.arm): each for arm in (reuse_arm.cost, reuse_arm.capacity) for each in arm(job)}
    prompt = hot["cold"].detail["prompt_tokens"]
    on, off = (found["cold, reuse on or off", arm] for arm in ("rekindle", "reuse off"))
    assert outcome(on) == outcome(off) == (["miss"], prompt)
    seconds = zip(on.values, off.values, strict=True)
    assert found["reuse overhead on cold", "rekindle"].values == tuple(100 * (a / b - 1) for a, b in seconds)
    for saved in found["memory saved, two prompts that share half", "rekindle"].values:
        assert 25 - 100 * 64 / prompt < saved <= 25, "all of the half, but for a block"
    ours, native = (found["tokens in the same memory", arm] for arm in ("rekindle", "16-bit KV"))
    assert ours.detail["hot_bytes"] >= native.detail["hot_bytes"] and ours.median > 3.5 * native.median


def test_a_turn_writes_the_blocks_that_it_touched(hot: dict[str, Measurement]) -> None:
    records, new = hot["a turn of hot EXTEND writes, records"].median, hot["KV of its new tokens"]
    assert 0 < records <= 2 * -(-new.detail["block_bytes"] // 4096) * 4096, "the one begun before, and one more"
    assert hot["a turn of hot EXTEND writes, index"].median > 0


def test_only_the_rows_that_are_asked_for_are_measured(job: Job, tmp_path: Path) -> None:
    job = replace(job, flags={**job.flags, "store": str(tmp_path / "store")}, rows=("hot",), num_cold=1)
    found = {each.measure: each for each in arms.hot(job)}
    writes = ("a turn of hot EXTEND writes, records", "a turn of hot EXTEND writes, index", "KV of its new tokens")
    assert list(found) == ["cold", "KV bytes per token", "hot EXTEND", *writes, "hot EXACT"]
    assert (len(found["cold"].values), len(found["hot EXTEND"].values)) == (1, job.repeats)
    assert [each.measure for each in transformers_arm.speed(replace(job, rows=("warm",)))] == ["cold"]


def test_the_baseline(job: Job) -> None:
    measured = {found.measure: found for found in transformers_arm.speed(job)}
    assert set(measured) == {"cold", "hot EXTEND", "hot EXACT", "decode, 1 streams", "decode, 4 streams"}
    assert all(value > 0 for found in measured.values() for value in found.values)


@pytest.mark.long
def test_the_whole_command_in_processes_of_its_own(model: Path, tmp_path: Path) -> None:
    settings = Settings.load({"model": str(model), "kv": "q4h", "threads": 1, "hot_bytes": 64 << 20})
    out = tmp_path / "lines.jsonl"
    options = EngineBench(512, 1, 0, "none", out, streams="1,3")
    assert run_engine_bench(settings, options, Console(quiet=True)) == 0
    lines = {line["measure"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert [name for name in lines if name.startswith("decode")] == ["decode, 1 streams", "decode, 3 streams"]
    assert lines["warm EXTEND, files evicted"]["detail"]["warm_tokens"] > 400
    assert lines["cold"]["settings"]["kv"] == "q4h"
    few = tmp_path / "few.jsonl"
    assert run_engine_bench(settings, EngineBench(512, 1, 0, "none", few, rows="capacity"), Console(quiet=True)) == 0
    measures = {json.loads(line)["measure"] for line in few.read_text().splitlines()}
    assert measures == {"cold", "KV bytes per token", "tokens in the same memory"}


@pytest.mark.long
def test_what_was_measured_of_a_gguf_file_outlasts_an_arm_that_fails(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "openvino_genai.py").write_text("raise RuntimeError('of another processor')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, out = tmp_path / "tiny.gguf", tmp_path / "lines.jsonl"
    write_gguf(model, file, "f16")
    settings = Settings.load({"model": str(file), "kv": "q4h", "threads": 1, "hot_bytes": 64 << 20})
    with pytest.raises(RekindleError, match="the arm openvino failed"):
        run_engine_bench(settings, EngineBench(512, 1, 0, "none", out, "openvino"), Console(quiet=True))
    measured = {json.loads(line)["measure"] for line in out.read_text().splitlines()}
    assert {"cold", "warm EXTEND, files evicted"} <= measured
    assert file.is_file(), "peers read the file itself"


def test_a_gguf_file_has_its_own_weights(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(model, tmp_path / "tiny.gguf", "f16")
    twin = endless_copy(opened(tmp_path / "tiny.gguf"), tmp_path / "twin")
    assert not eos_ids(twin, read_config(twin))
    check_peers(twin, peers_of("llama.cpp,openvino"))
    with pytest.raises(ConfigError, match=r"--against llama\.cpp without weights, not openvino:q8_0"):
        check_peers(twin, peers_of("llama.cpp,openvino:q8_0"))


def test_matching_finds_what_it_looks_for(tmp_path: Path) -> None:
    options = MatchBench(num_short=20, short_tokens=600, num_long=11, long_tokens=1500, repeats=2, out=tmp_path / "m")
    assert run_match_bench(Settings(), options, Console(quiet=True)) == 0
    lines = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert len(lines) == 7 and all(line["unit"] == "µs" for line in lines)
