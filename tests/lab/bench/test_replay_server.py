"""A replay of part of a made-up day against our own server, killed and restarted in its midst."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rekindle.harness.client import Client, free_port
from rekindle_lab.bench.replay.day import DayPlan, make_day, write_day
from rekindle_lab.bench.replay.replay import Pace, run_command
from rekindle_lab.bench.replay.run import ReplayOptions, lines_of, run_replay
from rekindle_lab.bench.server import arms as server_bench_arms
from rekindle_lab.bench.server.bench import ServerBench, run_server_bench
from tests.lab.bench.durable import until_durable

AGAIN = Path(__file__).parents[3] / "tools" / "again.py"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """URL of a server on a store, and the command that kills it and starts it again ({} is the signal)."""
    port, pidfile = free_port(), tmp_path / "pid"
    serve = f"{sys.executable} -m rekindle.cli serve --port {port} --threads 1 --hot-bytes 128MiB"
    command = f"{sys.executable} {AGAIN} {{}} {pidfile} {serve} --store {tmp_path / 'store'}"
    subprocess.run(command.format("KILL"), shell=True, check=True)
    try:
        yield f"http://127.0.0.1:{port}", command
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(pidfile.read_text()), signal.SIGKILL)


@pytest.mark.long
def test_what_was_said_is_warm_after_a_kill_and_a_restart(tmp_path: Path, server: tuple[str, str]) -> None:
    url, command = server
    whole = make_day(DayPlan(seed=2, context=2048))
    few = tuple(request for request in whole.requests if request.session in ("desk-1", "chat-1"))
    write_day(tmp_path / "day.jsonl", replace(whole, requests=few))
    pace = Pace(speed=1000.0, kill_cmd=command.format("KILL"), restart_cmd=command.format("TERM"))
    out = tmp_path / "out.jsonl"
    options = ReplayOptions(url, pace, arm="ours", cold_check=6, out=out)
    assert run_replay(tmp_path / "day.jsonl", options, Console(quiet=True)) == 0
    lines = {line["measure"]: line for line in lines_of(out)}
    assert lines["errors"]["values"] == [0.0], lines["errors"]
    assert lines["errors"]["detail"]["requests"] == len(few) == len(lines["first token"]["values"])
    assert lines["replies unlike cold"]["detail"]["compared"] > 3
    assert lines["prompt tokens computed"]["detail"]["share"] < 0.4
    assert lines["prompt tokens computed, 10 min after a restart"]["detail"]["share"] < 0.5
    assert {"answers again after a kill", "answers again after a restart"} <= set(lines)
    assert lines["whole replay"]["detail"]["replies in prompts"]["replaced"] > 0


@pytest.mark.long
def test_the_server_bench_finds_conversations_warm_after_a_kill(
    tmp_path: Path, server: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, command = server

    def run_behind_what_is_durable(command: str) -> None:
        until_durable(Client(int(url.rpartition(":")[2])))  # the bench itself, which asks any server, waits a while
        run_command(command)

    monkeypatch.setattr(server_bench_arms, "run_command", run_behind_what_is_durable)
    out = tmp_path / "out.jsonl"
    options = ServerBench(url, 500, 32, 1, restart_cmd=command.format("KILL"), arm="ours", out=out)
    assert run_server_bench(options, Console(quiet=True)) == 0
    details = {line["measure"]: line["detail"] for line in lines_of(out)}
    assert details["cold"]["cached_tokens"] < 20
    assert 400 < details["cold"]["prompt_tokens"] <= 520
    for measure in ("hot EXACT", "hot EXTEND", "warm EXACT", "warm EXTEND"):
        cached, prompt = details[measure]["cached_tokens"], details[measure]["prompt_tokens"]
        assert cached > 0.75 * prompt, measure
    assert 0.15 < details["DIVERGE at 25%"]["cached_tokens"] / details["DIVERGE at 25%"]["prompt_tokens"] < 0.3
    assert details["batch of 8, to its last token"]["streams"] == 8
