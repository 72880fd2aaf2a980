"""Replicas of one model on one directory: a killed one's successor is warm."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rekindle import Engine
from rekindle.errors import ConfigError
from tests.engine.conftest import Start
from tests.engine.replica_process import MESSAGE
from tests.needs import ROOT
from tests.proofs import proved

SECRET = "seventeen letters"


@contextmanager
def replica(store: Path) -> Iterator[tuple[str, str, int]]:
    """A process that serves from a slot; what it said. It is killed at the end."""
    command = [sys.executable, "-m", "tests.engine.replica_process", str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


def made(model: Path | None, store: Path | str, **settings: Any) -> Engine:
    given = {"threads": 1, "hot_bytes": 4 << 20, "block_tokens": 16, "anticipate": "off", **settings}
    return proved(Engine(model=model, store=store, **given))


def root_of(engine: Engine) -> bytes:
    """The root of the names of blocks."""
    return engine.components.loop.call(lambda core: core.cache.root("default")).result()


def test_the_successor_of_a_killed_replica_goes_on_with_its_memory(tmp_path: Path) -> None:
    with closing(made(None, tmp_path, slot="auto")) as first:
        with replica(tmp_path) as (slot, text, num_tokens):
            assert (first.settings.store.slot, slot) == ("0", "1")
            assert repr(first).endswith(f"store {tmp_path / 'slot-0'}>")
        with closing(made(None, tmp_path, slot="auto")) as heir:
            assert (heir.settings.store.slot, heir.num_warm_agents) == ("1", 1)
            assert root_of(heir) == root_of(first)
            said = [MESSAGE, {"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
            report = heir.chat("ada", said, temperature=0, max_tokens=2).report
            assert report.outcome == "extend" and report.reused_tokens >= num_tokens
            assert first.chat("ada", said, temperature=0, max_tokens=2).report.outcome == "miss"


def test_an_engine_that_starts_again_looks_for_a_slot_again(tiny_llama: Path, tmp_path: Path) -> None:
    with made(tiny_llama, tmp_path, slot="auto") as engine:
        assert engine.settings.store.slot == "0"
    with closing(made(tiny_llama, tmp_path, slot=0)), engine:
        assert engine.settings.store.slot == "1"


def test_without_blocks_the_secret_is_made_and_no_slot_claimed(tiny_llama: Path, tmp_path: Path) -> None:
    with made(tiny_llama, tmp_path, slot="auto", secret=SECRET, reuse="off") as engine:
        assert engine.settings.store.sessions_path() == tmp_path / "sessions.db"
    with made(tiny_llama, tmp_path, slot="auto", secret=SECRET) as engine:
        assert engine.settings.store.sessions_path() == tmp_path / "slot-0" / "sessions.db"


def test_wrong_values_are_refused_in_words(start: Start) -> None:
    with pytest.raises(ConfigError, match="slot: must be off, auto, or a number from 0 to 1023"):
        start(slot="next")
    with pytest.raises(ConfigError, match="secret: must have at least 16 characters"):
        start(secret="short")
