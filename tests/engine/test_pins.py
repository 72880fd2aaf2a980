"""How much a tenant may pin: others keep their part of the disk, whatever is pinned and however it grows."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest

from rekindle.cache.blocks.hashing import BlockHash, chain_hashes
from rekindle.engine.memory.branches import BranchBook
from rekindle.engine.memory.pins import Pins, most_pinned
from rekindle.engine.request import FinishedTurn
from rekindle.errors import QuotaExceeded
from rekindle.store.commands import Pin, StoreCommand
from tests.engine.conftest import Start
from tests.engine.test_engine import talk, user
from tests.engine.test_retention import disk_for

ROOT = BlockHash(b"r" * 32)
SIZE = 16


class SessionContext:
    """A book and its pins; `orders` are for the store, `now` is the wall clock."""

    def __init__(self, max_blocks: float, book: BranchBook | None = None) -> None:
        self.now = 1000.0
        self.orders: list[StoreCommand] = []
        self.book = book or BranchBook(max_branches=8)
        self.pins = Pins(
            self.book, block_tokens=SIZE, max_blocks=max_blocks, save=self.orders.append, now=lambda: self.now
        )
        self.pins.know()

    def turn(self, agent: str, num_tokens: int, *, first: int = 0, namespace: str = "a") -> None:
        """A turn after which the agent has so many tokens; agents that begin with the same one share blocks."""
        self.now += 1
        ids = np.array([first, *range(1, num_tokens)], dtype=np.uint32)
        names = tuple(chain_hashes(ROOT, ids, SIZE))
        turn = FinishedTurn(namespace, agent, ROOT, ids, names, names[-1], num_tokens, None, num_tokens)
        self.book.end_turn(turn, canonical_tokens=num_tokens, now=self.now)
        self.pins.grown(namespace, agent)

    def pinned(self) -> set[str]:
        return {agent for space, agent in self.book.pins() if self.book.pinned_until(space, agent, self.now)}


def test_a_tenant_that_is_alone_may_pin_everything_and_others_half_of_their_part() -> None:
    assert most_pinned(100, 1, 1.0) == math.inf
    assert most_pinned(100, 1, 0.5) == 25
    assert most_pinned(120, 3, 1.0) == most_pinned(120, 3, 0.5) == 20
    assert most_pinned(120, 3, 0.1) == 6


def test_what_would_be_too_much_is_refused_and_shared_blocks_count_once() -> None:
    desk = SessionContext(10)
    for agent in ("one", "same"):
        desk.turn(agent, 6 * SIZE)
        desk.pins.pin("a", agent, math.inf)
    desk.turn("large", 5 * SIZE, first=99)
    with pytest.raises(
        QuotaExceeded, match=r"of namespace 'a' may have 160 tokens on disk, with 'large' .* 176: unpin"
    ):
        desk.pins.pin("a", "large", math.inf)
    desk.turn("mine", 5 * SIZE, first=99, namespace="b")
    desk.pins.pin("b", "mine", math.inf)
    desk.pins.pin("a", "same", 0.0)
    desk.pins.pin("a", "one", 0.0)
    desk.pins.pin("a", "large", desk.now + 100)
    desk.turn("late", 9 * SIZE, first=98)
    with pytest.raises(QuotaExceeded):
        desk.pins.pin("a", "late", math.inf)
    desk.now += 200  # the pin of the other has ended
    desk.pins.pin("a", "late", math.inf)


def test_agents_that_grow_beyond_it_are_let_go_the_one_used_longest_ago_first(caplog: pytest.LogCaptureFixture) -> None:
    desk = SessionContext(10)
    for number, agent in enumerate(("old", "middle", "new")):
        desk.turn(agent, 3 * SIZE, first=50 + number)
        desk.pins.pin("a", agent, math.inf)
    desk.turn("free", 90 * SIZE, first=60)
    assert desk.pinned() == {"old", "middle", "new"}
    with caplog.at_level(logging.WARNING):
        desk.turn("new", 5 * SIZE, first=52)
    assert desk.pinned() == {"middle", "new"}
    assert desk.orders[-1:] == [Pin("a", "old", 0.0)]
    assert "agent old of a is no longer pinned" in caplog.text
    desk.turn("middle", 40 * SIZE, first=51)
    assert desk.pinned() == set()


def test_what_was_pinned_before_stays() -> None:
    before = SessionContext(math.inf)
    for number in range(5):
        before.turn(f"agent-{number}", 4 * SIZE, first=50 + number)
        before.pins.pin("a", f"agent-{number}", math.inf)
    desk = SessionContext(10, before.book)
    desk.now = before.now
    desk.turn("agent-0", 4 * SIZE, first=50)
    assert len(desk.pinned()) == 5
    desk.turn("more", 4 * SIZE, first=70)
    with pytest.raises(QuotaExceeded):
        desk.pins.pin("a", "more", math.inf)


def test_pins_of_one_tenant_do_not_take_the_disk_from_another(start: Start) -> None:
    engine = start()
    talk(engine, "first", [user("To begin with. " * 20)], "Hello!")
    engine.flush()
    settings = {"disk_bytes": disk_for(engine, 60), "api_keys": {"a": "key-a", "b": "key-b"}}
    engine.agent("first").purge()
    engine = start(**settings)
    talk(engine, "mine", [user("I was here before. " * 8)], "Hello!", namespace="b")
    engine.flush()
    length = engine.agent("mine", namespace="b").info().num_tokens
    refused = 0
    for number in range(14):
        talk(engine, f"a{number}", [user(f"This is what number {number} has to say. " * 6)], "Hm?", namespace="a")
        try:
            engine.agent(f"a{number}", namespace="a").pin()
        except QuotaExceeded:
            refused += 1
        talk(engine, "mine", [user("I was here before. " * 8)], "Hello!", namespace="b")
        engine.flush()
    assert 0 < refused < 14
    assert engine.agent("mine", namespace="b").info().saved_tokens == length
    stats = engine.stats()
    assert stats.store is not None and stats.store["pinned_blocks"] < 20, "less than its part"
    engine.check()
