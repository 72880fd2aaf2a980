"""Who leaves a full disk, and when: recency, anonymity, abandoned prompts, pins, budgets, clocks."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.config import RESPONSES_FILE, SESSIONS_FILE
from rekindle.store.commands import Delete, Pin
from rekindle.store.maintenance import opening
from rekindle.store.rows.retention import RUNNING_S
from rekindle.store.warm import WarmStore
from tests.store.chains import BLOCK_BYTES, FINGERPRINT, SIZE, Chain, one_batch, open_store, save, warm_tokens

Opened = Callable[..., WarmStore]


class Clock:
    """Wall time that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def keep(
    store: WarmStore,
    clock: Clock,
    agent: str,
    num_blocks: int = 1,
    *,
    ids: list[int] | None = None,
    namespace: str = "default",
) -> Chain:
    """Save blocks of the agent's own, used a second after all before."""
    clock.now += 1.0
    seed = sum(agent.encode()) + 1000
    own = [seed + number for number in range(num_blocks * SIZE)]
    chain = Chain.of(store, own if ids is None else ids, namespace)
    with one_batch(store):
        for block in chain.blocks:
            assert store.stage(block)
        store.save_turn(chain.record(agent, last_use=clock.now, namespace=namespace))
    return chain


def abandon(store: WarmStore, clock: Clock, token: int, num_blocks: int = 1) -> None:
    """Blocks of a prompt that never became a turn."""
    clock.now += 1.0
    with one_batch(store):
        for block in Chain.of(store, [token] * SIZE * num_blocks).blocks:
            assert store.stage(block)


def agents(store: WarmStore) -> set[str]:
    return {record.agent for record in store.sequences()}


def budget(num_blocks: int) -> int:
    return num_blocks * BLOCK_BYTES


def test_the_least_recently_used_leaves_first(opened: Opened, clock: Clock) -> None:
    store = opened(disk_bytes=budget(4), clock=clock)
    for agent in ("a", "b", "c", "d"):
        keep(store, clock, agent)
    clock.now += 1
    store.touch("default", "a", 0, clock.now)
    for agent in ("e", "f"):
        keep(store, clock, agent)
    assert agents(store) == {"a", "d", "e", "f"}
    store.touch("default", "d", 0, clock.now)
    keep(store, clock, "g")
    assert agents(store) == {"d", "e", "f", "g"}
    stats = store.stats()
    assert (stats.blocks_evicted, stats.sequences_evicted, stats.blocks_refused) == (3, 3, 0)
    assert stats.used_bytes == stats.disk_bytes


def test_sessions_and_responses_take_their_room_from_the_blocks(opened: Opened, clock: Clock, tmp_path: Path) -> None:
    store = opened(disk_bytes=budget(6), clock=clock)
    for agent in ("a", "b", "c"):
        keep(store, clock, agent)
    place = tmp_path / "store"
    (place / RESPONSES_FILE).write_bytes(bytes(budget(1)))
    (place / f"{RESPONSES_FILE}-wal").write_bytes(bytes(budget(1)))
    (place / SESSIONS_FILE).write_bytes(bytes(budget(1)))
    keep(store, clock, "d")
    assert agents(store) == {"b", "c", "d"}
    assert store.stats().used_bytes == budget(3)
    (place / SESSIONS_FILE).unlink()
    keep(store, clock, "e")
    assert agents(store) == {"b", "c", "d", "e"}


def test_a_touch_survives_a_close_and_nothing_is_written_for_it_before(opened: Opened, clock: Clock) -> None:
    store = opened(disk_bytes=budget(2), clock=clock)
    keep(store, clock, "a")
    keep(store, clock, "b")
    store.touch("default", "a", 0, 1500.0)
    store.touch("default", "nobody", 3, 1500.0)
    assert {record.agent: record.last_use for record in store.sequences()} == {"a": 1001.0, "b": 1002.0}
    store.close()
    clock.now = 1600.0
    store = opened(disk_bytes=budget(2), clock=clock)
    assert {record.agent: record.last_use for record in store.sequences()} == {"a": 1500.0, "b": 1002.0}
    keep(store, clock, "c")
    assert agents(store) == {"a", "c"}


def test_a_branch_is_shortened_from_its_end_and_that_is_told(opened: Opened, clock: Clock) -> None:
    told: list[tuple[str, str, int, int]] = []
    store = opened(disk_bytes=budget(6), clock=clock, on_lost=lambda *lost: told.append(lost))
    clock.now += 1
    old = Chain.of(store, range(4 * SIZE + 3))
    for block in old.blocks:
        store.stage(block)
    store.save_turn(replace(old.record("old", last_use=clock.now), turn_ends=(20, 67)))
    assert store.flush(10)
    keep(store, clock, "new", 3)
    assert told == [("default", "old", 0, 3 * SIZE)]
    left = next(record for record in store.sequences() if record.agent == "old")
    assert (left.num_tokens, left.canonical_tokens, left.turn_ends) == (3 * SIZE, 3 * SIZE, (20,))
    assert left.head == old.full_names[2]
    assert warm_tokens(store, old) == 3 * SIZE
    keep(store, clock, "newer", 3)
    assert told[1:] == [("default", "old", 0, 0)]
    assert agents(store) == {"new", "newer"}
    store.check("records")


def test_a_shared_prefix_leaves_last(opened: Opened, clock: Clock) -> None:
    store = opened(disk_bytes=budget(6), clock=clock)
    system = [1] * 2 * SIZE
    for number in range(3):
        keep(store, clock, f"agent {number}", ids=system + [50 + number] * SIZE)
    for number in range(3, 9):
        keep(store, clock, f"agent {number}", ids=system + [50 + number] * SIZE)
        assert warm_tokens(store, Chain.of(store, system)) == 2 * SIZE
    # those whose own block has left still stand on the shared ones
    assert len(agents(store)) == 9 and store.stats().sequences_evicted == 0


@pytest.mark.parametrize("reopen", [False, True])
def test_anonymous_agents_leave_before_named_ones_and_recovered_ones_are_not_anonymous(
    opened: Opened, clock: Clock, reopen: bool
) -> None:
    store = opened(disk_bytes=budget(4), clock=clock)
    for agent in ("named", "\x01recovered-3", "\x01one", "\x01two"):
        keep(store, clock, agent)
    if reopen:
        store.close()
        store = opened(disk_bytes=budget(4), clock=clock)
    keep(store, clock, "x")
    assert agents(store) == {"named", "\x01recovered-3", "\x01two", "x"}
    keep(store, clock, "y")
    assert agents(store) == {"named", "\x01recovered-3", "x", "y"}
    keep(store, clock, "z")
    assert agents(store) == {"\x01recovered-3", "x", "y", "z"}


@pytest.mark.parametrize("reopen", [False, True])
def test_what_cancelled_prompts_left_leaves_first_of_all(opened: Opened, clock: Clock, reopen: bool) -> None:
    store = opened(disk_bytes=budget(6), clock=clock)
    for agent in ("named", "\x01anonymous"):
        keep(store, clock, agent)
    abandon(store, clock, 7, 3)
    keep(store, clock, "full")
    clock.now += RUNNING_S + 1
    if reopen:
        store.close()
        store = opened(disk_bytes=budget(6), clock=clock)
    keep(store, clock, "x", 3)
    assert agents(store) == {"named", "\x01anonymous", "full", "x"}
    assert store.stats().blocks_evicted == 3


def test_blocks_of_a_running_request_do_not_leave_before_old_turns(opened: Opened, clock: Clock) -> None:
    store = opened(disk_bytes=budget(4), clock=clock)
    keep(store, clock, "old")
    keep(store, clock, "older than running")
    abandon(store, clock, 7, 2)
    keep(store, clock, "x", 2)
    assert agents(store) == {"x"} and warm_tokens(store, Chain.of(store, [7] * 2 * SIZE)) == 2 * SIZE
    # the order is there now: time alone must move what was not continued to its front
    clock.now += RUNNING_S + 2
    keep(store, clock, "y")
    assert agents(store) == {"x", "y"} and warm_tokens(store, Chain.of(store, [7] * 2 * SIZE)) == SIZE


@pytest.mark.parametrize("reopen", [False, True])
def test_pinned_agents_never_leave_until_the_pin_ends(opened: Opened, clock: Clock, reopen: bool) -> None:
    store = opened(disk_bytes=budget(6), clock=clock)
    keep(store, clock, "early")
    keep(store, clock, "pinned", 2)
    keep(store, clock, "for a while")
    for number in range(4):
        keep(store, clock, f"fill {number}")  # the order is in memory before anything is pinned
    assert store.submit(Pin("default", "nobody", math.inf)).result(10) is False
    assert store.submit(Pin("default", "fill 3", math.inf)).result(10) is True
    assert store.submit(Pin("default", "fill 2", clock.now + 50)).result(10) is True
    if reopen:
        store.close()
        store = opened(disk_bytes=budget(6), clock=clock)
    assert store.pins() == {("default", "fill 3"): math.inf, ("default", "fill 2"): 1007.0 + 50}
    assert store.stats().pinned_blocks == 2
    for number in range(4, 12):
        keep(store, clock, f"fill {number}", 2)
    assert {"fill 2", "fill 3"} <= agents(store)
    clock.now += 50
    assert store.pins() == {("default", "fill 3"): math.inf}
    keep(store, clock, "x", 2)
    keep(store, clock, "y", 2)
    assert "fill 2" not in agents(store) and "fill 3" in agents(store)
    assert store.submit(Pin("default", "fill 3", 0.0)).result(10)
    keep(store, clock, "z", 5)
    assert "fill 3" not in agents(store) and store.pins() == {} and store.stats().pinned_blocks == 0
    store.check("records")


def test_a_pin_holds_the_whole_chain(opened: Opened, clock: Clock) -> None:
    store = opened(disk_bytes=budget(5), clock=clock)
    chain = keep(store, clock, "pinned", 4)
    assert store.submit(Pin("default", "pinned", math.inf)).result(10)
    for number in range(5):
        keep(store, clock, f"other {number}")
    assert warm_tokens(store, chain) == 4 * SIZE
    refused = store.stats().blocks_refused
    keep(store, clock, "too long", 3)
    stats = store.stats()
    assert stats.blocks_refused == refused + 2 and stats.turns_unsaved == 1 and stats.last_error is None
    assert warm_tokens(store, chain) == 4 * SIZE


def test_a_batch_longer_than_the_budget_keeps_its_own_beginning(opened: Opened, clock: Clock) -> None:
    store = opened(disk_bytes=budget(5), clock=clock)
    keep(store, clock, "old", 2)
    for _ in range(3):
        long = keep(store, clock, "long", 9)
    assert warm_tokens(store, long) == 5 * SIZE
    assert store.stats().used_bytes == budget(5)
    clock.now += RUNNING_S + 1
    keep(store, clock, "short", 5)
    assert agents(store) == {"short"}
    store.check("records")


def test_a_branch_that_fills_the_disk_is_not_shortened_for_its_own_next_turn(opened: Opened, clock: Clock) -> None:
    store = opened(disk_bytes=budget(4), clock=clock)
    keep(store, clock, "only", ids=list(range(3 * SIZE + 5)))
    assert agents(store) == {"only"}
    longer = Chain.of(store, range(5 * SIZE + 5))
    with one_batch(store):
        for block in longer.blocks:
            assert store.stage(block)
        store.save_turn(longer.record("only", last_use=clock.now + 1))
    (record,) = store.sequences()
    assert record.num_tokens == 3 * SIZE + 5 and store.stats().turns_unsaved == 1
    assert warm_tokens(store, Chain.of(store, range(3 * SIZE + 5))) == 3 * SIZE + 5


def test_a_budget_made_smaller_is_kept_from_the_start(opened: Opened, clock: Clock) -> None:
    store = opened(clock=clock)
    for number in range(6):
        keep(store, clock, f"agent {number}")
    store.close()
    store = opened(disk_bytes=budget(2) + 1, clock=clock)
    assert store.flush(10)
    assert agents(store) == {"agent 4", "agent 5"}
    assert store.stats().used_bytes == budget(2)
    store.check("records")


def test_the_disk_never_holds_more_records_than_the_budget(opened: Opened, clock: Clock, tmp_path: Path) -> None:
    store = opened(disk_bytes=budget(5), clock=clock, shard_bytes=1 << 20)
    for number in range(30):
        keep(store, clock, f"agent {number % 7}", 1 + number % 4)
    held = [path.stat().st_blocks * 512 for path in (tmp_path / "store").rglob("blocks-*")]
    assert sum(held) <= budget(5) + 2 * 4096
    assert store.stats().failed_saves == 0
    store.check("records")


def test_a_use_in_the_future_makes_nobody_immortal(opened: Opened, clock: Clock) -> None:
    clock.now = 1e6
    store = opened(disk_bytes=budget(3), clock=clock)
    for agent in ("a", "b", "c"):
        keep(store, clock, agent)
    keep(store, clock, "d")  # fills the order
    clock.now = 2000.0  # the clock was a week ahead
    for number in range(3):
        keep(store, clock, f"new {number}")
        assert f"new {number}" in agents(store)
    assert agents(store) == {"new 0", "new 1", "new 2"}
    store.close()
    clock.now = 10.0
    store = opened(disk_bytes=budget(3), clock=clock)
    assert {record.last_use for record in store.sequences()} == {9.99}
    for number in range(3):
        keep(store, clock, f"newer {number}")
    assert agents(store) == {"newer 0", "newer 1", "newer 2"}


def test_a_damaged_row_of_a_branch_does_not_stop_eviction(opened: Opened, clock: Clock, tmp_path: Path) -> None:
    store = opened(disk_bytes=budget(3), clock=clock)
    keep(store, clock, "a", 2)
    keep(store, clock, "c")
    store.close()
    with sqlite3.connect(tmp_path / "store" / FINGERPRINT.hex() / "index.db") as connection:
        connection.execute("UPDATE sequence SET num_tokens = 'x', last_use = 'yesterday'")
    connection.close()
    store = opened(disk_bytes=budget(3), clock=clock)
    for number in range(4):
        keep(store, clock, f"new {number}")
    assert store.stats().failed_saves == 0
    assert agents(store) == {"new 1", "new 2", "new 3"}


def test_opening_a_large_index_reads_no_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "QUICKLY_CHECKED_BYTES", 0)
    store = open_store(tmp_path / "store")
    store.start()
    save(store, Chain.of(store, range(50)))
    store.close()
    asked: list[str] = []
    real = sqlite3.connect

    def connect(*args: object, **kwargs: object) -> sqlite3.Connection:
        connection = real(*args, **kwargs)
        connection.set_trace_callback(asked.append)
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect)
    store = open_store(tmp_path / "store")
    store.start()
    assert len(store.sequences()) == 1
    store.close()
    assert any("sequence" in query for query in asked)
    rows = [query for query in asked if " block" in query and "MAX(slot)" not in query]
    assert not rows, "rows of blocks are read"


@pytest.mark.parametrize("reopen", [False, True])
def test_a_namespace_beyond_its_share_gives_way_before_others(opened: Opened, clock: Clock, reopen: bool) -> None:
    settings = {"disk_bytes": budget(6), "namespace_share": 0.5}
    store = opened(clock=clock, **settings)
    keep(store, clock, "early")
    for agent in ("a", "b", "c", "d", "e"):
        keep(store, clock, agent, namespace="flood")
    if reopen:
        store.close()
        store = opened(clock=clock, **settings)
    keep(store, clock, "f", namespace="flood")
    assert agents(store) == {"early", "b", "c", "d", "e", "f"}, "of all, `early` was used longest ago"
    for agent in ("x", "y"):
        keep(store, clock, agent)
    assert agents(store) == {"early", "d", "e", "f", "x", "y"}
    keep(store, clock, "z")
    assert agents(store) == {"d", "e", "f", "x", "y", "z"}, "within the shares the one used longest ago leaves"


def test_shares_are_of_the_room_there_is_and_not_of_the_room_there_was(opened: Opened, clock: Clock) -> None:
    store = opened(clock=clock)
    keep(store, clock, "early")
    for agent in "abcdefghijk":
        keep(store, clock, agent, namespace="flood")
    store.close()
    store = opened(clock=clock, disk_bytes=budget(6), namespace_share=0.5)
    assert store.flush(10)
    assert agents(store) == {"early", *"ghijk"}, "a flood of eleven of the twelve gives way"
    keep(store, clock, "l", namespace="flood")
    assert agents(store) == {"early", *"hijkl"}, "five of six: its own make room"
    for agent in ("x", "y"):
        keep(store, clock, agent)
    assert agents(store) == {"early", *"jklxy"}
    keep(store, clock, "z")
    assert agents(store) == {*"jklxyz"}, "three of six are its share"


def test_shares_grow_with_the_number_of_blocks(opened: Opened, clock: Clock) -> None:
    store = opened(clock=clock, disk_bytes=budget(12), namespace_share=0.5)
    for agent in "ab":
        keep(store, clock, agent)
    for agent in "AB":
        keep(store, clock, agent, namespace="many")
    keep(store, clock, "long", 9, namespace="guest")  # the first shortage, of four blocks: two are half
    assert agents(store) == {*"bAB", "long"}
    store.submit(Delete("guest", "long")).result(10)
    for agent in "CDE":
        keep(store, clock, agent, namespace="many")
    for agent in "vwxyz":
        keep(store, clock, agent, namespace="other")
    keep(store, clock, "c")
    keep(store, clock, "d")
    assert agents(store) == {*"ABCDEvwxyzcd"}, "nobody has more than six of twelve: who was used longest ago leaves"


def test_a_shared_end_is_as_good_as_the_best_that_ends_there(opened: Opened, clock: Clock) -> None:
    store = opened(disk_bytes=budget(3), clock=clock)
    shared = keep(store, clock, "named", ids=[5] * SIZE)
    keep(store, clock, "other")
    keep(store, clock, "\x01hidden", ids=[5] * SIZE)
    keep(store, clock, "x")
    keep(store, clock, "y")
    assert agents(store) == {"other", "x", "y"}, "the named one was used before the other"
    shared = keep(store, clock, "named", ids=[5] * SIZE)
    keep(store, clock, "\x01hidden", ids=[5] * SIZE)
    keep(store, clock, "z")
    assert warm_tokens(store, shared) == SIZE
