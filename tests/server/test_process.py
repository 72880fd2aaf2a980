"""The server as a process: banner, a graceful stop, and what is warm afterwards."""

from __future__ import annotations

from pathlib import Path

from rekindle.harness.client import ServerProcess
from tests.forks import ForkedServer

SAID = [{"role": "user", "content": "Remember that the copper key is in the attic. " * 8}]


def test_sigterm_stops_and_saves(tmp_path: Path) -> None:
    flags, log = ["--store", str(tmp_path / "store"), "--threads", "1", "--hot-bytes", "64MiB"], tmp_path / "log"
    with ServerProcess(flags, log=log) as server:
        first = server.wait_ready().chat(SAID, agent="ada", max_tokens=4)
        assert server.stop() == 0
    banner = log.read_text()
    for wanted in (
        "pocket",
        "q4h",
        "hot",
        "agents found: 0",
        f"http://127.0.0.1:{server.port}/v1",
        "agent=ada ",
        ": miss, reused 0 ",
    ):
        assert wanted in banner
    with ForkedServer(flags, log=log) as server:
        again = server.wait_ready().chat(SAID, agent="ada", max_tokens=4)
        assert server.stop() == 0
    assert again.report["outcome"] == "exact"
    assert again.report["warm_tokens"] == again.report["reused_tokens"] == first.report["prompt_tokens"] - 1
    assert again.completion_ids == first.completion_ids


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with ServerProcess(["--kv", "int8"], log=log) as server:
        assert server.wait_end() == 2
    formats = "auto, q4h, q8h, bf16, fp32, q4h/q8h, q8h/q4h, bf16/q4h, bf16/q8h, q4h/bf16, q8h/bf16"
    assert log.read_text().splitlines() == [f"rekindle: kv: must be one of {formats}, not 'int8'"]
