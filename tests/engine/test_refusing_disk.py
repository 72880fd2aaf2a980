"""What is asked of agents is durable when it is answered; what the disk refuses is said, and has changed nothing."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from rekindle.engine.api import Engine
from rekindle.engine.components import Components
from rekindle.errors import NotFound, PurgeUnproved, StoreError
from rekindle.store.commands import Move
from rekindle.store.files.shards import Shards
from rekindle.store.warm import SequenceRecord
from tests.engine.conftest import Start
from tests.engine.test_index_trouble import refused

FIRST = [{"role": "user", "content": "Remember me, please, for a while. " * 3}]


def two_turns(engine: Engine, agent: str = "ada") -> list[dict[str, str]]:
    """Have an agent answer twice, each turn saved; what was said."""
    said: list[dict[str, str]] = [*FIRST]
    for _ in range(2):
        said.append({"role": "assistant", "content": engine.chat(agent, said, max_tokens=5, temperature=0).text})
        said.append({"role": "user", "content": "And then?"})
        assert engine.flush()
    return said[:-1]


def stored(engine: Engine) -> dict[str, list[int]]:
    """Tokens of each branch on disk, by agent."""
    store = engine.components.store
    assert store is not None
    found: dict[str, list[int]] = {}
    for record in store.sequences():
        found.setdefault(record.agent, []).append(record.num_tokens)
    return found


def state(engine: Engine, agent: str = "ada") -> tuple[Any, ...]:
    """All that is known of an agent but when it was used."""
    info = engine.agent(agent).info()
    return (*astuple(info)[:-3], info.pinned_until, [astuple(each)[:-2] for each in info.branch_infos], stored(engine))


def unsaved_turn(engine: Engine, said: list[dict[str, str]]) -> None:
    """A turn that the disk does not take."""
    engine.chat("ada", [*said, {"role": "user", "content": "Tell me more. " * 5}], max_tokens=5, temperature=0)
    engine.flush()
    info = engine.agent("ada").info()
    assert info.saved_tokens < info.num_tokens <= info.hot_tokens + 1


CHANGES: dict[str, Callable[[Engine], object]] = {
    "fork": lambda engine: engine.agent("ada").fork("eve"),
    "rewind": lambda engine: engine.agent("ada").rewind(1),
    "rewind all": lambda engine: engine.agent("ada").rewind(2),
    "delete": lambda engine: engine.agent("ada").delete(),
    "purge": lambda engine: engine.agent("ada").purge(),
    "pin": lambda engine: engine.agent("ada").pin(ttl_s=500.0),
    "unpin": lambda engine: engine.agent("ada").unpin(),
}
AFTER: dict[str, Callable[[dict[str, list[int]], int], bool]] = {
    "fork": lambda found, length: found["eve"] == found["ada"] == [length],
    "rewind": lambda found, length: 0 < found["ada"][0] < length,
    "rewind all": lambda found, length: "ada" not in found,
    "delete": lambda found, length: "ada" not in found,
    "purge": lambda found, length: "ada" not in found,
}


@pytest.mark.parametrize("change", AFTER)
def test_a_change_is_durable_when_it_is_answered(start: Start, change: str) -> None:
    engine = start()
    two_turns(engine)
    length, store = engine.agent("ada").info().num_tokens, engine.components.store
    assert store is not None
    go = threading.Event()
    store.writer.call(lambda _: go.wait())  # a disk that is slow to answer
    thread = threading.Thread(target=CHANGES[change], args=(engine,))
    thread.start()
    thread.join(0.5)
    was_answered = not thread.is_alive()
    go.set()
    thread.join()
    assert not was_answered, "before the disk had it"
    assert AFTER[change](stored(engine), length), stored(engine)
    engine.check()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_the_disk_refuses_changes_nothing(start: Start, change: str) -> None:
    engine = start()
    said = two_turns(engine)
    engine.agent("ada").pin()
    before = state(engine)
    with refused(engine, "INSERT ON sequence", "DELETE ON sequence", "INSERT ON agent"):
        with pytest.raises(StoreError, match="no more today"):
            CHANGES[change](engine)
        assert state(engine) == before
        with pytest.raises(NotFound):
            engine.agent("eve").info()
    again = engine.chat("ada", [*said, {"role": "user", "content": "Once more."}], max_tokens=2, temperature=0)
    assert again.report.source == "own" and again.report.reused_tokens > before[3] - 16
    if change in AFTER:
        CHANGES[change](engine)
    engine.check()
    engine = start()
    assert ("eve" in stored(engine)) == (change == "fork")


def test_a_turn_that_ends_during_an_offload_stays_and_is_no_trouble_of_the_disk(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    said, go, flush = two_turns(engine), threading.Event(), Components.flush
    store = engine.components.store
    assert store is not None

    def and_a_turn(parts: Components, timeout_s: float) -> bool:
        is_flushed = flush(parts, timeout_s)
        monkeypatch.undo()
        store.writer.call(lambda _: go.wait())  # a disk that is slow to answer
        engine.chat("ada", [*said, {"role": "user", "content": "Tell me more."}], max_tokens=5, temperature=0)
        return is_flushed

    monkeypatch.setattr(Components, "flush", and_a_turn)
    try:
        assert engine.agent("ada").offload() == 0
        info = engine.agent("ada").info()
        assert info.saved_tokens < info.num_tokens <= info.hot_tokens + 1
    finally:
        go.set()
    assert engine.flush() and engine.agent("ada").offload() > 0
    engine.check()


def test_offloading_what_cannot_be_saved_drops_nothing(start: Start) -> None:
    engine = start()
    said = two_turns(engine)
    with refused(engine, "INSERT ON block"):
        unsaved_turn(engine, said)
        before = state(engine)
        with pytest.raises(StoreError, match="none of it was offloaded"):
            engine.agent("ada").offload()
        assert state(engine) == before
    assert engine.agent("ada").offload() > 0, "saved once the disk takes it"
    info = engine.agent("ada").info()
    assert info.saved_tokens == info.num_tokens and info.warm_tokens > 0
    engine.check()


def test_an_agent_of_which_nothing_can_be_saved_is_neither_pinned_nor_forked(start: Start) -> None:
    engine = start()
    with refused(engine, "INSERT ON block"):
        engine.chat("ada", FIRST, max_tokens=5, temperature=0)
        before = state(engine)
        for change in (CHANGES["pin"], CHANGES["fork"], lambda engine: engine.agent("ada").offload()):
            with pytest.raises(StoreError, match="cannot be saved"):
                change(engine)
            assert state(engine) == before
    engine.agent("ada").pin()
    assert engine.agent("ada").info().pinned_until == math.inf
    engine.agent("ada").fork("eve")
    assert stored(engine)["eve"] == [engine.agent("ada").info().num_tokens]
    engine.close()
    engine = start()
    assert engine.agent("ada").info().pinned_until == math.inf


@pytest.mark.parametrize("change", ["delete", "purge"])
def test_a_deletion_that_the_disk_refuses_keeps_what_is_not_saved(start: Start, change: str) -> None:
    engine = start()
    said = two_turns(engine)
    with refused(engine, "INSERT ON block"):
        unsaved_turn(engine, said)
        before = state(engine)
        with refused(engine, "DELETE ON sequence"), pytest.raises(StoreError, match=f"{change} it again"):
            CHANGES[change](engine)
        assert state(engine) == before
    CHANGES[change](engine)
    with pytest.raises(NotFound):
        engine.agent("ada").info()
    engine.check()


@pytest.mark.parametrize("change", ["offload", "fork", "rewind", "pin"])
def test_a_store_that_was_taken_away_keeps_nothing(start: Start, tmp_path: Path, change: str) -> None:
    engine = start()
    two_turns(engine)
    hot = engine.agent("ada").info().hot_tokens
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(StoreError, match="removed"):
        engine.agent("ada").offload() if change == "offload" else CHANGES[change](engine)
    assert engine.agent("ada").info().hot_tokens == hot
    assert engine.agent("ada").info().pinned_until is None


def test_a_purge_that_cannot_be_proved_leaves_nothing_in_memory_and_is_asked_for_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    two_turns(engine)
    real = Shards.is_zero
    monkeypatch.setattr(Shards, "is_zero", lambda *_: False)
    with pytest.raises(PurgeUnproved, match="do not read as zeros"):
        engine.agent("ada").purge()
    monkeypatch.setattr(Shards, "is_zero", real)
    (info,) = engine.agents()
    assert info.hot_tokens == 0 and stored(engine) == {}
    with pytest.raises(NotFound):  # looked for on the disk
        engine.agent("ada").info()
    engine.agent("ada").purge()
    with pytest.raises(NotFound):
        engine.agent("ada").purge()
    assert engine.agents() == []
    engine.check()


def test_a_store_moves_all_branches_or_none(start: Start) -> None:
    engine = start()
    two_turns(engine)
    store = engine.components.store
    assert store is not None
    (record,) = store.sequences()
    twin = SequenceRecord(**{name: getattr(record, name) for name in record.__slots__} | {"agent": "eve"})
    nowhere = SequenceRecord(
        **{name: getattr(record, name) for name in record.__slots__} | {"agent": "eve", "branch": 1, "head": b"?" * 16}
    )
    assert store.submit(Move("default", "eve", "fork", (twin, nowhere))).result(60) is False
    assert store.sequences() == [record]
    assert store.submit(Move("default", "eve", "fork", (twin,))).result(60) is True
    assert len(store.sequences()) == 2
