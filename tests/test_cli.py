"""The command line: every fixed flag is on every command, and honoured or refused; never ignored."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rekindle.cli import app
from rekindle.cli.console import show_ago
from rekindle.cli.settings import FLAG_GROUPS, help_of
from rekindle.config import SETTINGS, ServerSettings, Settings, parse_duration, show_bytes
from rekindle.errors import ConfigError
from rekindle.harness.client import variables
from tests.forks import ForkedServer
from tests.given import UNSET

FIXED = (
    "--model --host --port --store --kv --dtype --device --block-tokens --hot-bytes --disk-bytes --max-context "
    "--kernels --threads --served-model-name --reuse --config"
).split()
COMMANDS = (["serve"], ["doctor"], ["demo"], ["bench", "engine"], ["bench", "noisy"], ["bench", "recall"])

VALUES = {
    "max_branches": 3,
    "namespace_share": 0.5,
    "agent_ttl_s": 86400.0,
    "anonymous_ttl_s": 60.0,
    "max_waiting": 7,
    "max_running": 3,
    "request_timeout_s": 12.5,
    "requests_per_minute": 9,
    "max_body_bytes": 4096,
    "record": Path("/no/such/day"),
}


def run(*arguments: str, **env: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", **env}).invoke(app, arguments)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_fixed_names_exist(command: list[str]) -> None:
    shown = run(*command, "--help").output
    assert [flag for flag in FIXED if f"{flag} " not in shown] == []


def test_every_setting_is_a_flag_but_secrets() -> None:
    names = {item.name for part in fields(Settings) for item in fields(getattr(Settings(), part.name))}
    assert {known.field for known in SETTINGS.values()} == names - UNSET.keys()
    without = {name for name, known in SETTINGS.items() if known.flag is None}
    assert without == {"api_key", "api_keys", "admin_key", "secret", "store_key", "backend_key"}
    for name in without:
        result = run("serve", f"--{name.replace('_', '-')}", "x")
        assert (result.exit_code, "No such option" in result.output) == (2, True)


def test_help_says_of_every_flag_what_config_knows_of_it() -> None:
    shown = "".join(run("serve", "--help").output.split())  # wherever lines are broken
    for known in SETTINGS.values():
        if known.flag is not None and known.name not in ("model", "open"):
            written = "|".join(known.choices) or f"<{known.unit}>"
            assert "".join(f"{known.flag}{written}{help_of(known)}".split()) in shown
            assert known.default_text and help_of(known).endswith(f"[{known.default_text}]")


def test_help_groups_the_settings() -> None:
    shown = run("serve", "--help").output
    heads = [line.removesuffix(":") for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert heads == ["Arguments", "Options", *FLAG_GROUPS]
    at = {name: shown.index(f"--{name.replace('_', '-')} ") for name in ("hot_bytes", "max_waiting", "record")}
    assert shown.index("\nMemory:") < at["hot_bytes"] < shown.index("\nStore:")
    assert shown.index("\nRequests:") < at["max_waiting"] < shown.index("\nServer:") < at["record"]


def test_a_flag_reaches_its_setting(tmp_path: Path) -> None:
    given = {name: str(value) for name, value in VALUES.items()}
    settings = Settings.load({**given, "model": "pocket"}, {})
    for name, value in VALUES.items():
        section = next(part for part in fields(Settings) if hasattr(getattr(settings, part.name), name))
        assert getattr(getattr(settings, section.name), name) == value
    flags = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", value)]
    result = run("serve", *flags, "--model", "/no/such/model", "--port", "0", "--store", str(tmp_path))
    assert (result.exit_code, "/no/such/model" in result.output) == (2, True), result.output


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("15m", 900), ("8h", 28800), ("1.5d", 129600), ("2W", 1209600)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "8 hours", "-3d", "1e3s", "nan", "8h30m"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ConfigError, match="90s, 15m, 8h or 30d"):
        parse_duration(text)


def test_moments_and_sizes() -> None:
    assert [show_ago(1000.0, now) for now in (1000.2, 1059, 1061, 8300, 1000 + 40 * 86400, 5)] == [
        "just now",
        "59 s ago",
        "1 min ago",
        "2 h ago",
        "40 d ago",
        "just now",
    ]
    assert [show_bytes(count) for count in (0, 1023, 1536, 5 << 30, 3 << 41)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "6.0 TiB",
    ]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("demo --reuse off", "--reuse on"),
        ("demo --store off", "a store"),
        ("demo --record day.jsonl --stop-s 1", "--stop-s, --record"),
        ("bench engine --reuse off", "--reuse off"),
        ("bench recall --reuse off", "--reuse off"),
        ("bench engine --port 1", "--port"),
        ("bench engine --store x", "--store"),
        ("bench recall --kv q4h", "--kv"),
        ("chat --host localhost --open", "--host, --open"),
    ],
)
def test_what_a_command_cannot_honour_is_refused(arguments: str, named: str) -> None:
    result = run(*arguments.split())
    assert (result.exit_code, named in result.output) == (2, True), result.output
    assert len(result.output.splitlines()) == 1


def test_the_demo_hands_all_settings_on(tmp_path: Path) -> None:
    given = {"kv": "bf16", "max_running": 3, "max_stall_s": 0.5, "max_branches": 20, "normalise": "off"}
    settings = Settings.load({**given, "model": "pocket"})
    env = {f"REKINDLE_{name.upper()}": value for name, value in variables(settings, tmp_path).items()}
    assert Settings.load({}, env) == Settings.load({**given, "model": "pocket", "store": tmp_path})


def test_a_taken_port_is_noticed_before_the_model_is_looked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run("serve", "--port", port, "--model", "/no/such/model")
    assert (result.exit_code, result.stdout) == (3, "loading /no/such/model\n")
    error = result.stderr.splitlines()[-1]  # before it may be a log record: of what an earlier test left, in a thread
    assert error.startswith(f"rekindle: cannot listen on 127.0.0.1:{port}: another program has this port")


def test_variables_of_the_caller_stay_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither tests nor a server they or the demo start see them; its own key reaches the server, and the client."""
    assert [name for name in os.environ if name.startswith("REKINDLE_")] == []
    monkeypatch.setenv("REKINDLE_API_KEY", "theirs")
    monkeypatch.setenv("REKINDLE_KV", "no such format")
    flags = ["--store", str(tmp_path), "--hot-bytes", "32MiB", "--model", "pocket", "--threads", "1"]
    own = ServerSettings(port=0, api_key="ours", served_model_name="me")
    with ForkedServer(flags, log=tmp_path / "log", server=own) as server:
        client = server.wait_ready()
        assert client.json("GET", "/v1/models")["data"][0]["id"] == "me"
        deadline = time.monotonic() + 60
        while "ready" not in (shown := (tmp_path / "log").read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.stop() == 0
    assert "the bundled model" in shown
