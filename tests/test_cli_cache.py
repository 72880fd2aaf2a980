"""cache: what the stores hold, whether it is sound, what comes back, what may go; on real stores, damaged for real."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rekindle import Engine
from rekindle.cli import app

TEXT = "You look after the lighthouse, count the ships that pass, and write down each one's name and its port. " * 4


def run(*arguments: str, store: Path) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["cache", *arguments, "--store", str(store)])


def found(*arguments: str, store: Path, code: int = 0) -> Any:
    """What a command says as JSON."""
    result = run(*arguments, "--json", store=store)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def engine(store: Path, **settings: Any) -> Engine:
    return Engine.from_pretrained("pocket", store=store, hot_bytes="64MiB", threads=1, **settings)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("cache") / "store"
    with engine(store) as model:
        for agent in ("ada", "bo"):
            model.chat(agent, [{"role": "user", "content": f"You are {agent}. {TEXT}"}], max_tokens=4)
    return store


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    """A store of its own for every test."""
    return Path(shutil.copytree(made, tmp_path / "store"))


def fingerprint(store: Path) -> str:
    (name,) = (path.name for path in store.iterdir() if path.is_dir())
    return name


def damage(store: Path) -> None:
    """Flip a bit in the middle of the first record."""
    path = store / fingerprint(store) / "blocks-0-000.safetensors"
    with path.open("r+b") as file:
        data = file.read(1 << 20)
        at = data.index(b"RKBLOCK\n") + 3000
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))


def test_stats(store: Path) -> None:
    (info,) = found("stats", store=store)
    assert info["fingerprint"] == fingerprint(store)
    assert (info["model"], info["num_agents"], info["in_use_by"]) == ("pocket", 2, None)
    assert info["num_blocks"] > 4 and info["budget_bytes"] > info["bytes"] > 0
    assert abs(info["last_use"] - time.time()) < 3600
    assert info["written"] > info["num_blocks"] * 4096 or time.time() % 86400 < 3600
    shown = run("stats", store=store).output
    assert "pocket" in shown and info["fingerprint"][:12] in shown
    (limited,) = found("stats", "--disk-bytes", "1GiB", store=store)
    assert limited["budget_bytes"] == 1 << 30


def test_a_store_in_use_is_named_and_left_alone(store: Path) -> None:
    with engine(store):
        (info,) = found("stats", store=store)
        assert str(os.getpid()) in info["in_use_by"]
        assert str(os.getpid()) in run("stats", store=store).output
        for command in (["check"], ["rebuild"]):
            result = run(*command, store=store)
            assert (result.exit_code, "in use by" in result.output) == (1, True), result.output
        assert found("gc", "--older-than", "0s", store=store) == []
    assert len(found("stats", store=store)) == 1


def test_a_sound_store_passes_the_check(store: Path) -> None:
    (report,) = found("check", store=store)
    assert (report["damaged"], report["agents_affected"], report["index_problem"]) == ([], [], None)
    assert "all sound" in run("check", store=store).output


def test_damage_is_found_with_what_it_costs_whom(store: Path) -> None:
    damage(store)
    (report,) = found("check", store=store, code=1)
    ((name, reason),) = report["damaged"]
    affected = report["agents_affected"]
    assert "checksum" in reason and affected
    assert all(tokens_left % 64 == 0 for _, _, _, tokens_left in affected)
    result = run("check", fingerprint(store)[:6], store=store)
    assert result.exit_code == 1
    assert name[:12] in result.output and affected[0][1] in result.output
    assert f"{affected[0][3]:,} tokens are left" in result.output


def test_rebuild_says_what_came_back(store: Path) -> None:
    damage(store)
    (before,) = found("check", store=store, code=1)
    (report,) = found("rebuild", "pocket", store=store)
    assert report["num_blocks"] + report["num_lost"] == before["num_blocks"]
    assert report["num_lost"] >= 1
    assert found("check", store=store)[0]["damaged"] == []
    with engine(store) as model:
        model.check()


def test_a_store_that_is_not_there_is_named(store: Path, tmp_path: Path) -> None:
    result = run("check", "nothing", store=store)
    assert (result.exit_code, "pocket" in result.output) == (2, True)
    assert found("stats", store=tmp_path / "none") == []
    assert run("check", store=tmp_path / "none").exit_code == 0
    assert not (tmp_path / "none").exists()


def test_gc_takes_what_is_old_and_only_says_so_in_a_dry_run(store: Path) -> None:
    assert found("gc", store=store) == []
    assert "30 d" in run("gc", store=store).output
    assert [info["model"] for info in found("gc", "--older-than", "0s", "--dry-run", store=store)] == ["pocket"]
    assert "would remove pocket" in run("gc", "--older-than", "0s", "--dry-run", store=store).output
    assert len(found("stats", store=store)) == 1
    assert "removed pocket" in run("gc", "--older-than", "0s", store=store).output
    assert found("stats", store=store) == []
    assert run("gc", "--older-than", "soon", store=store).exit_code == 2


def test_an_encrypted_store_needs_its_key_and_the_key_is_changed(tmp_path: Path) -> None:
    store, one, two = tmp_path / "store", tmp_path / "one.key", tmp_path / "two.key"
    for key, digits in ((one, "1a" * 32), (two, "2b" * 32)):
        key.write_text(digits)
    with engine(store, store_key_file=one) as model:
        model.chat("ada", [{"role": "user", "content": TEXT}], max_tokens=4)
        rekeyed = run("rekey", "--to", str(two), "--store-key-file", str(one), store=store)
        assert rekeyed.exit_code == 0 and "--finish" in rekeyed.output
        model.chat("bo", [{"role": "user", "content": TEXT}], max_tokens=4)
    for key in (one, two):
        assert found("check", "--store-key-file", str(key), store=store)[0]["num_blocks"] > 2
    assert run("rekey", "--finish", "--store-key-file", str(two), store=store).exit_code == 0
    refused = run("check", "--store-key-file", str(one), store=store)
    assert refused.exit_code != 0 and "another key" in refused.output
    assert run("check", store=store).exit_code != 0
    (info,) = found("stats", store=store)  # figures need no key
    assert info["num_agents"] == 2
    for wrong in (("--to", str(one), "--finish"), ()):
        assert "either" in run("rekey", *wrong, "--store-key-file", str(two), store=store).output
    assert "needs the key" in run("rekey", "--finish", store=store).output
    nowhere = run("rekey", "--finish", "--store-key-file", str(two), store=tmp_path / "nowhere")
    assert "no store" in nowhere.output and not (tmp_path / "nowhere").exists()
    agents = CliRunner(env={"REKINDLE_STORE_KEY": "2b" * 32}).invoke(
        app, ["agents", "list", "--json", "--store", str(store)]
    )
    assert '"ada"' in agents.output and '"bo"' in agents.output, agents.output
    with engine(store, store_key="2b" * 32) as model:
        reply = model.chat("ada", [{"role": "user", "content": TEXT}], max_tokens=4)
        assert reply.report.reused_tokens
