"""cache and agents on a store with slots, which no server uses and which was made with a secret."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rekindle import Engine
from rekindle.cli import app
from rekindle.cli.disk_probes import probe_lock, probe_space, probe_stores
from rekindle.config import StoreSettings

TEXT = "You look after the lighthouse, count the ships that pass, and write down each one's name and its port. " * 4


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store whose slots 0 and 1 know bo."""
    for slot in (0, 1):
        with engine(tmp_path, slot) as each:
            each.chat("bo", [{"role": "user", "content": TEXT}], temperature=0, max_tokens=2)
    return tmp_path


def engine(store: Path, slot: int | str) -> Engine:
    return Engine.from_pretrained(store=store, slot=slot, secret="seventeen letters", hot_bytes="64MiB", threads=1)


def said(*arguments: str, store: Path, code: int = 0) -> str:
    env = {"COLUMNS": "200", "REKINDLE_STORE": str(store), "REKINDLE_PORT": "9"}
    result = CliRunner(env=env).invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def test_a_directory_shows_its_slots_and_a_slot_is_a_store(store: Path) -> None:
    assert sorted(each["slot"] for each in json.loads(said("cache", "stats", "--json", store=store))) == [0, 1]
    table = said("cache", "stats", store=store).splitlines()
    assert table[0].split()[1] == "SLOT" and sorted(line.split()[1] for line in table[1:3]) == ["slot-0", "slot-1"]
    (report,) = json.loads(said("cache", "check", "slot-1", "--json", store=store))
    assert (report["slot"], report["damaged"]) == (1, [])
    assert said("cache", "check", store=store).count("all sound") == 2
    assert said("cache", "rebuild", "slot-0", store=store).count("came back") == 1
    assert "slot-1): " in said("cache", "gc", "--older-than", "0s", "--dry-run", store=store)
    (alone,) = json.loads(said("cache", "check", "--json", store=store / "slot-1"))
    assert (alone["slot"], alone["damaged"]) == (None, [])
    assert [each["id"] for each in json.loads(said("agents", "--json", store=store / "slot-1"))] == ["bo"]


def test_a_purge_reaches_every_slot(store: Path) -> None:
    assert [each["id"] for each in json.loads(said("agents", "--json", store=store))] == ["bo", "bo"]
    with closing(engine(store, 1)):
        assert "is in use by process" in said("agents", "purge", "bo", store=store, code=1)
    said("agents", "purge", "bo", store=store)
    assert json.loads(said("agents", "--json", store=store)) == []


def test_the_doctor_knows_slots(store: Path) -> None:
    assert sorted(each.topic[-6:] for each in probe_stores(store)) == ["slot-0", "slot-1"]
    with closing(engine(store, 1)) as running:
        fingerprint = running.spec.fingerprint
        found = [probe_lock(StoreSettings(dir=store, slot=slot), fingerprint, is_served=False) for slot in "01"]
        assert found[0] is None and found[1] is not None and found[1].verdict == "warn"
        assert probe_lock(StoreSettings(dir=store, slot="auto"), fingerprint, is_served=False) is None
    assert "each slot may take" in probe_space(StoreSettings(dir=store, slot="auto")).said
