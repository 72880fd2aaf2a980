"""Purging: nothing of the agent is left in memory or on disk, and everybody else has all they had."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rekindle.engine import agent_admin
from rekindle.engine.api import Engine
from rekindle.engine.core.core import EngineCore
from rekindle.engine.core.purge import HotPurge, withdraw
from rekindle.errors import NotFound, StoreError
from rekindle.store.commands import Delete
from tests.engine.conftest import Start
from tests.engine.holding import held
from tests.engine.test_engine import SYSTEM, talk, user
from tests.engine.test_index_trouble import refused

PAGE = 4096
PIECE = 64  # bytes that no other block's KV has by chance
SECRET = "The vault opens at nine with the word marigold, and nobody else may know of it. " * 2


def rows(core: EngineCore) -> list[bytes]:
    return [row.tobytes() for part in core.cache.arena.parts for row in part.numpy()]


def pieces(data: bytes) -> set[bytes]:
    found = (data[at : at + PIECE] for at in range(0, len(data) - PIECE, PIECE))
    return {piece for piece in found if len(set(piece)) > PIECE // 4}


def hot_pieces(engine: Engine) -> set[bytes]:
    """All that stands in the arena, whoever's it is or was."""
    arena = engine.components.loop.call(rows).result()
    return set[bytes]().union(*map(pieces, arena))


def disk_pieces(directory: Path) -> set[bytes]:
    files = [path for path in directory.rglob("*.safetensors") if path.is_file()]
    assert files
    return set[bytes]().union(*(pieces(page.tobytes()) for path in files for page in written_pages(path)))


def written_pages(path: Path) -> np.ndarray:
    """Pages of records that are not zeros; the file's own header is the first."""
    pages = np.memmap(path, np.uint64, "r").reshape(-1, PAGE // 8)[1:]
    return np.asarray(pages[pages.any(1)])


def test_no_byte_of_a_purged_agent_is_left_and_others_keep_theirs(start: Start, tmp_path: Path) -> None:
    engine, mine, theirs = start(), [SYSTEM], [SYSTEM]
    talk(engine, "bob", theirs, "Where is the red box?")
    engine.flush()
    before = hot_pieces(engine) | disk_pieces(tmp_path)
    for text in (SECRET, "And then? " * 9, "Who else?"):
        talk(engine, "ada", mine, text)
    engine.agent("ada").rewind(1)
    talk(engine, "ada", mine[:3], "Something else?" * 5)
    cancelled = engine.stream("ada", [*mine, user("A prompt that nobody waits for. " * 6)], temperature=0.0)
    next(iter(cancelled))
    cancelled.cancel()
    cancelled.result()
    engine.flush()
    assert len(hot_pieces(engine) - before) > 20 and len(disk_pieces(tmp_path) - before) > 20
    report = engine.agent("ada").purge()
    assert report.slots_freed > 0 and report.bytes_zeroed > 0 and report.hot_blocks_zeroed > 0
    assert report.blocks_shared > 0, "the system prompt is bob's, too"
    assert hot_pieces(engine) <= before
    assert disk_pieces(tmp_path) <= before
    assert [info.agent for info in engine.agents()] == ["bob"]
    again = talk(engine, "bob", theirs, "Thank you.")
    assert again.report.computed_tokens < 40 and again.report.hot_tokens > 64
    engine.check()
    engine.close()
    assert [info.agent for info in start().agents()] == ["bob"]


def test_a_fork_keeps_what_its_source_is_purged_of(start: Start) -> None:
    engine, history = start(), [SYSTEM]
    talk(engine, "ada", history, "Hello!")
    engine.agent("ada").fork("eve")
    engine.agent("ada").purge()
    reply = talk(engine, "eve", history, "Still there?")
    assert reply.report.source == "own" and reply.report.hot_tokens > 64
    engine.flush()
    assert engine.agent("eve").info().saved_tokens == engine.agent("eve").info().num_tokens
    engine.check()


def test_blocks_that_wait_to_be_saved_are_purged_with_the_rest(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    parts = engine.components
    talk(engine, "bob", [SYSTEM], "Hello!")
    engine.flush()
    before = disk_pieces(tmp_path)
    monkeypatch.setattr(parts.core.cache.saving, "pump", lambda: None)
    talk(engine, "ada", [user(SECRET)], "Hm?")
    parts.intake.call(lambda: None).result()
    waiting = parts.loop.call(lambda core: len(core.cache.saving)).result()
    assert waiting > 1

    def withdraw_then_save(core: EngineCore, purge: HotPurge) -> None:
        withdraw(core, purge)
        monkeypatch.undo()

    monkeypatch.setattr(agent_admin, "withdraw", withdraw_then_save)
    engine.agent("ada").purge()
    assert disk_pieces(tmp_path) <= before
    assert parts.store is not None and parts.store.stats().unsaved_evicted == 0
    engine.check()


def test_no_row_keeps_anything_behind_its_tokens(start: Start) -> None:
    engine = start(store="off", hot_bytes=150_000)
    talk(engine, "ada", [user(SECRET * 2)], "Hm?")
    for number in range(8):
        talk(engine, f"agent-{number}", [user(f"{number} speaks of other things. " * 5)], "Hm?")
    engine.agent("ada").purge()
    core = engine.components.core
    tails = [(block, len(core.cache.pool.ids(block))) for block in core.cache.pool.idle_blocks()]
    assert any(num_tokens < 16 for _, num_tokens in tails)
    for block, num_tokens in tails:
        out = np.zeros(core.cache.arena.layout.parts[0].payload_bytes, dtype=np.uint8)
        core.cache.arena.read(block, 0, num_tokens, out)
        assert out.tobytes() == rows(core)[block], f"block {block} holds more than its {num_tokens} tokens"


@pytest.mark.parametrize("used_since", [True, False])
def test_a_turn_whose_blocks_went_with_the_purged_ones_is_saved_again(start: Start, used_since: bool) -> None:
    """One that ended since the purge began; what the disk gave up before, for want of room, stays given up."""
    engine = start()
    parts = engine.components
    for name in ("ada", "bob"):
        talk(engine, name, [user(f"{name} here. " * 12)], "Hello!")
    engine.flush()
    assert parts.store is not None
    parts.store.submit(Delete("default", "bob")).result()
    branch = parts.memory.book.of("default", "bob")[0]
    lost = replace(branch, saved_tokens=0, last_use=branch.last_use + 600 * used_since)
    parts.intake.call(lambda: parts.memory.book.put(lost)).result()
    engine.agent("ada").purge()
    assert engine.agent("bob").info().saved_tokens == engine.agent("bob").info().num_tokens * used_since
    engine.close()
    assert [info.agent for info in start().agents()] == ["bob"] * used_since


def test_a_request_that_runs_goes_on_and_becomes_the_new_memory(start: Start) -> None:
    engine, history = start(), [SYSTEM]
    talk(engine, "ada", history, "Hello!")
    alone = engine.chat(None, [*history, user("Go on.")], temperature=0.0, max_tokens=60, reuse="off")
    with held(engine, lambda request: request.sequence.num_generated > 1):  # else it may be over before the purge
        running = engine.stream("ada", [*history, user("Go on.")], temperature=0.0, max_tokens=60)
        next(iter(running))
        engine.agent("ada").purge()
    assert running.result().token_ids == alone.token_ids
    engine.flush()
    info = engine.agent("ada").info()
    assert info.branches == 1 and info.saved_tokens == info.num_tokens
    engine.check()
    engine.close()
    assert start().agent("ada").info().num_tokens == info.num_tokens


def test_an_agent_that_is_only_on_disk_is_deleted_and_purged(start: Start, tmp_path: Path) -> None:
    engine = start()
    for name in ("ada", "bob", "cy"):
        talk(engine, name, [user(f"{name} here. " * 12)], "Hello!")
    engine.close()
    engine = start()
    engine.agent("ada").delete()
    engine.agent("bob").purge()
    assert [info.agent for info in engine.agents()] == ["cy"]
    engine.agent("cy").purge()
    assert disk_pieces(tmp_path) == set()
    with pytest.raises(NotFound, match="nobody"):
        engine.agent("nobody").purge()
    engine.check()


def test_a_purge_that_the_disk_refuses_is_said_and_can_be_repeated(start: Start) -> None:
    engine = start()
    talk(engine, "ada", [SYSTEM], "Hello!")
    engine.flush()
    with refused(engine, "DELETE ON sequence"), pytest.raises(StoreError, match="purge it again"):
        engine.agent("ada").purge()
    engine.agent("ada").purge()
    assert engine.agents() == []


def test_without_a_store_memory_alone_is_purged(start: Start) -> None:
    engine = start(store="off")
    talk(engine, "ada", [user(SECRET)], "Hello!")
    assert hot_pieces(engine)
    report = engine.agent("ada").purge()
    assert report.hot_blocks_zeroed > 0 and report.slots_freed == 0
    assert hot_pieces(engine) == set()
    assert np.array_equal(np.unique(engine.components.core.cache.arena.parts[0].numpy()), [0])
