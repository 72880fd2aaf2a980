"""Lines that say where they come from, jobs that survive the command line, and the table made of them."""

from __future__ import annotations

import io
import json
import mmap
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rekindle.config import Settings
from rekindle.errors import ConfigError
from rekindle.harness.client import flags_of
from rekindle_lab.bench.engine.bench import EngineBench, merged, table
from rekindle_lab.bench.engine.job import Job
from rekindle_lab.bench.memory import drop_file_cache, measured_peak, processor_seconds
from rekindle_lab.record import Measurement, Origin, append_lines

COLD = Measurement("cold", "rekindle", "s", (3.0, 1.0, 2.0), {"prompt_tokens": 10})


def test_a_line_has_its_values_and_its_origin(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lines.jsonl"
    append_lines(path, Origin.here("engine", {"threads": 2}), [COLD])
    append_lines(path, Origin.here("engine", {"threads": 4}), [COLD])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["settings"]["threads"] for line in lines] == [2, 4]
    assert (lines[0]["median"], lines[0]["min"], lines[0]["max"]) == (2.0, 1.0, 3.0)
    assert lines[0]["commit"] and lines[0]["machine"]["cores"] >= 1 and lines[0]["versions"]["torch"]
    assert Measurement.from_dict(lines[0]) == COLD


def test_settings_survive_the_way_to_a_child() -> None:
    given = {"kv": "q4h", "hot_bytes": "1GiB", "threads": 2, "max_context": 99, "max_stall_s": 0.5}
    settings = Settings.load({**given, "tail_heading": ["Build:", "Stand:"]})
    job = Job("hot", flags_of(settings), 10, 1, 0)
    received = Job(**json.loads(json.dumps(asdict(job))))
    assert received == job
    assert received.settings() == settings
    assert received.settings(store="off").store.enabled is False


def test_processes_of_one_measure_are_put_together() -> None:
    other = Measurement("cold", "transformers", "s", (4.0,))
    again = Measurement("cold", "rekindle", "s", (5.0,), {"prompt_tokens": 10})
    assert [(item.arm, item.values) for item in merged([COLD, other, again])] == [
        ("rekindle", (3.0, 1.0, 2.0, 5.0)),
        ("transformers", (4.0,)),
    ]


def test_the_ratio_says_how_many_times_better_ours_is() -> None:
    measured = [
        COLD,
        Measurement("cold", "transformers", "s", (4.0,)),
        Measurement("decode", "rekindle", "tok/s", (30.0,)),
        Measurement("decode", "transformers", "tok/s", (10.0,)),
    ]
    shown = io.StringIO()
    Console(width=200, file=shown).print(table(measured))
    assert [word for word in shown.getvalue().split() if word.endswith("x")] == ["2.00x", "3.00x"]


@pytest.mark.parametrize(
    "given",
    [
        {"context": 100},
        {"repeats": 0},
        {"baseline": "vllm"},
        {"rows": "cold,fast"},
        {"cold_repeats": 0},
        *({"streams": text} for text in ("", "0", "1,x", "4,999")),
    ],
)
def test_options_are_checked(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EngineBench(**given)


def test_a_peak_is_seen_after_its_memory_was_given_back() -> None:
    def work() -> None:
        with mmap.mmap(-1, 64 << 20) as memory:
            memory.write(bytes(len(memory)))

    before, peak = measured_peak(work)
    assert peak > before + (32 << 20) and before > 1 << 20


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux")
def test_processor_time_is_that_of_a_process() -> None:
    before, began = processor_seconds(os.getpid()), time.process_time()
    while time.process_time() < began + 0.1:
        pass
    after = processor_seconds(os.getpid())
    assert before is not None and after is not None and after - before >= 0.05
    assert processor_seconds(1 << 30) is None


def test_only_files_below_the_directory_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "block").write_bytes(b"x" * 5000)
    (tmp_path / "index").write_bytes(b"y")
    assert drop_file_cache(tmp_path) == 2
    assert (tmp_path / "a" / "block").read_bytes() == b"x" * 5000
