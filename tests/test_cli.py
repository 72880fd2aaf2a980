"""The command line: every fixed flag is on every command, and honoured or refused; never ignored."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rekindle.bench.client import ServerProcess
from rekindle.bench.demo import variables
from rekindle.cli import app
from rekindle.config import ServerSettings, Settings

FIXED = (
    "--model --host --port --store --kv --dtype --device --block-tokens --hot-bytes --disk-bytes --max-context "
    "--threads --served-model-name --reuse --config"
).split()
COMMANDS = (["serve"], ["demo"], ["bench", "engine"], ["bench", "match"], ["bench", "recall"])


def run(*arguments: str, **env: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", **env}).invoke(app, arguments)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_fixed_names_exist(command: list[str]) -> None:
    shown = run(*command, "--help").output
    assert [flag for flag in FIXED if f"{flag} " not in shown] == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("demo --reuse off", "--reuse on"),
        ("demo --store off", "a store"),
        ("bench engine --reuse off", "--reuse off"),
        ("bench recall --reuse off", "--reuse off"),
        ("bench engine --port 1", "--port"),
        ("bench engine --store x", "--store"),
        ("bench recall --kv q4h", "--kv"),
        ("bench match --hot-bytes 1GiB --threads 2", "--hot-bytes, --threads"),
        ("chat --host localhost --open", "--host, --open"),
    ],
)
def test_what_a_command_cannot_honour_is_refused(arguments: str, named: str) -> None:
    result = run(*arguments.split())
    assert (result.exit_code, named in result.output) == (2, True), result.output
    assert len(result.output.splitlines()) == 1


def test_matching_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "lines"
    arguments = ["bench", "match", "--short", "3", "--long", "1", "--repeats", "1", "--out", str(out)]
    # a variable is written for all commands: it is no reason to refuse one
    result = run(*arguments, REKINDLE_PORT="1")
    assert result.exit_code == 0, result.output
    assert all(json.loads(line)["measure"].startswith("match") for line in out.read_text().splitlines())


def test_the_demo_hands_all_settings_on(tmp_path: Path) -> None:
    given = {"kv": "bf16", "max_running": 3, "max_stall_s": 0.5, "min_reuse_tokens": 20, "hot_bytes": "64MiB"}
    settings = Settings.load({**given, "model": "pocket"})
    env = {f"REKINDLE_{name.upper()}": value for name, value in variables(settings, tmp_path).items()}
    assert Settings.load({}, env) == Settings.load({**given, "model": "pocket", "store": tmp_path})


def test_a_taken_port_is_noticed_before_the_model_is_looked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run("serve", "--port", port, "--model", "/no/such/model")
    assert result.exit_code == 2
    assert result.output.startswith(f"rekindle: cannot listen on 127.0.0.1:{port}: another program has this port")


def test_variables_of_the_caller_stay_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither tests nor a server they or the demo start see them; its own key reaches the server, and the client."""
    assert [name for name in os.environ if name.startswith("REKINDLE_")] == []
    monkeypatch.setenv("REKINDLE_API_KEY", "theirs")
    monkeypatch.setenv("REKINDLE_KV", "no such format")
    flags = ["--store", str(tmp_path), "--hot-bytes", "32MiB", "--model", "pocket", "--threads", "1"]
    own = ServerSettings(port=0, api_key="ours", served_model_name="me")
    with ServerProcess(flags, log=tmp_path / "log", server=own) as server:
        client = server.wait_ready()
        assert client.json("GET", "/v1/models")["data"][0]["id"] == "me"
        deadline = time.monotonic() + 30
        while "ready" not in (shown := (tmp_path / "log").read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.stop() == 0
    assert "the bundled model" in shown
