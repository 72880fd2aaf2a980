"""What a request marks stays stored for its time, under the name of nobody, and goes with its agent."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from rekindle.agent_ids import kind_of
from rekindle.cache.blocks.hashing import BlockHash, chain_hashes
from rekindle.engine.api import Engine
from rekindle.engine.gauges import hot_tokens
from rekindle.engine.memory.branches import BranchBook
from rekindle.engine.memory.breakpoints import MOST_OF_AGENT, Breakpoints
from rekindle.engine.memory.retention import Retention, RetentionRules
from rekindle.engine.request import CachedBreakpoint, FinishedTurn
from rekindle.engine.types import Breakpoint, GenerationRequest, Report
from rekindle.errors import NotFound
from rekindle.model.params import SamplingParams
from rekindle.store.commands import Delete, Pin, StoreCommand
from rekindle.store.values import SequenceRecord
from rekindle.text.messages import Message
from tests.engine.conftest import Start
from tests.engine.test_engine import talk, user
from tests.engine.test_retention import disk_for, wait_for

ROOT = BlockHash(b"r" * 32)
SIZE = 16


class SessionContext:
    """A book and what is kept in it; `orders` are for the store, `now` is the wall clock."""

    def __init__(self, max_tokens: float = math.inf) -> None:
        self.now = 1000.0
        self.orders: list[StoreCommand] = []
        self.book = BranchBook(max_branches=8)
        self.keeping = Breakpoints(
            self.book, block_tokens=SIZE, max_tokens=max_tokens, save=self.orders.append, now=lambda: self.now
        )

    def turn(
        self,
        ids: list[int],
        *marks: tuple[int, float],
        agent: str = "a",
        head_tokens: int | None = None,
        namespace: str = "default",
    ) -> None:
        array = np.array(ids, dtype=np.uint32)
        names = tuple(chain_hashes(ROOT, array, SIZE))
        head = names[-1] if names else ROOT
        turn = FinishedTurn(
            namespace=namespace,
            agent=agent,
            root=ROOT,
            ids=array,
            hashes=names,
            head=head,
            head_tokens=len(ids) if head_tokens is None else head_tokens,
            num_replies=None,
            canonical_prompt=len(ids),
            breakpoints=tuple(CachedBreakpoint(num, ttl) for num, ttl in marks),
        )
        self.keeping.turn_ended(turn)
        self.book.check()
        self.keeping.check()

    def kept(self, agent: str = "a") -> dict[int, float]:
        """Tokens of what is kept, and until when."""
        found = self.keeping.of("default", agent)
        return {each.num_tokens: self.book.pinned_until("default", each.agent, self.now) or 0.0 for each in found}


def test_a_mark_is_a_pinned_sequence_on_the_same_blocks() -> None:
    desk = SessionContext()
    desk.turn(list(range(50)), (40, 300.0))
    assert desk.kept() == {40: 1300.0}
    record, pin = desk.orders
    assert isinstance(record, SequenceRecord) and isinstance(pin, Pin)
    assert (record.num_tokens, record.head) == (40, chain_hashes(ROOT, np.arange(48, dtype=np.uint32), SIZE)[2])
    assert not kind_of(record.agent).is_memory and pin.agent == record.agent
    assert (pin.until, list(desk.book.agents()), len(desk.book), desk.book.num_pinned(desk.now)) == (1300.0, [], 0, 0)


def test_only_whole_blocks_that_are_stored_are_kept() -> None:
    desk = SessionContext()
    desk.turn(list(range(50)), (50, 300.0))
    assert list(desk.kept()) == [48]
    desk.turn(list(range(100, 110)), (10, 300.0), agent="b")
    assert desk.kept("b") == {}
    desk.turn(list(range(50)), (40, 300.0), agent="c", head_tokens=32)
    assert list(desk.kept("c")) == [32]
    desk.turn(list(range(50)), (40, 300.0), agent="d", head_tokens=0)
    assert desk.kept("d") == {}


def test_a_longer_one_stands_for_the_shorter_unless_that_is_kept_longer() -> None:
    desk = SessionContext()
    desk.turn(list(range(64)), (20, 300.0), (40, 300.0), (60, 300.0))
    assert list(desk.kept()) == [60]
    desk.turn(list(range(128)), (30, 3600.0), (100, 300.0))
    assert desk.kept() == {30: 4600.0, 100: 1300.0}
    assert sum(isinstance(order, Delete) for order in desk.orders) == 1


def test_marked_again_it_is_pinned_anew_and_not_saved_again() -> None:
    desk = SessionContext()
    desk.turn(list(range(64)), (60, 300.0))
    (branch,) = desk.keeping.of("default", "a")
    desk.book.mark_saved("default", branch.agent, 0, 60)
    desk.orders.clear()
    desk.now += 5.0
    desk.turn(list(range(64)), (60, 300.0))
    assert desk.orders == [], "a pin is not written again for a few seconds"
    desk.now += 100.0
    desk.turn(list(range(64)), (60, 300.0))
    assert [type(order) for order in desk.orders] == [Pin]
    assert desk.kept() == {60: desk.now + 300.0}


def test_another_text_and_another_agent_have_their_own_and_they_are_few() -> None:
    desk = SessionContext()
    desk.turn(list(range(64)), (60, 300.0))
    desk.turn([9, *range(63)], (60, 400.0))
    desk.turn(list(range(64)), (60, 500.0), agent="b")
    assert len(desk.keeping.of("default", "a")) == 2
    assert desk.kept("b") == {60: 1500.0}
    for first in range(100, 130):
        desk.turn([first, *range(63)], (60, 600.0))
    assert len(desk.keeping.of("default", "a")) == MOST_OF_AGENT
    assert set(desk.kept().values()) == {1600.0}
    assert len(desk.keeping.take_out("default", "a")) == MOST_OF_AGENT
    assert (desk.kept(), len(desk.kept("b"))) == ({}, 1)


def test_all_together_take_a_share_of_the_disk_and_no_more() -> None:
    desk = SessionContext(max_tokens=100)
    desk.turn(list(range(64)), (60, 300.0), agent="a")
    desk.turn(list(range(64)), (40, 200.0), agent="b")
    assert (desk.kept("a"), desk.kept("b")) == ({60: 1300.0}, {40: 1200.0})
    desk.turn(list(range(64)), (30, 900.0), agent="c")
    assert (desk.kept("a"), desk.kept("b"), desk.kept("c")) == ({60: 1300.0}, {}, {30: 1900.0})
    desk.turn(list(range(160)), (150, 9000.0), agent="d")
    assert [desk.kept(agent) for agent in "abcd"] == [{}] * 4


def test_what_one_tenant_marks_ends_nothing_of_anothers() -> None:
    desk = SessionContext(max_tokens=100)
    desk.turn(list(range(64)), (60, 300.0), agent="a")
    for number in range(4):
        desk.turn([number, *range(63)], (60, 9000.0), agent=f"b{number}", namespace="other")
    assert desk.kept("a") == {60: 1300.0}
    assert sum(len(desk.keeping.of("other", f"b{number}")) for number in range(4)) == 1


SYSTEM = "You are a careful assistant. Answer in one short sentence, and remember what you are told. " * 2
MARKS = (Breakpoint(0, None, 3600.0), Breakpoint(1, None, 300.0))


def asked(engine: Engine, agent: str | None, *texts: str, marks: tuple[Breakpoint, ...] = MARKS) -> Report:
    roles = ("system", "user", "assistant", "user")
    messages = tuple(Message(role, text) for role, text in zip(roles, texts, strict=False))
    params = SamplingParams(temperature=0.0, max_tokens=4)
    return (
        engine.submit(GenerationRequest(messages=messages, agent=agent, params=params, breakpoints=marks))
        .result()
        .report
    )


def kept(engine: Engine) -> list[int]:
    """Tokens of all that is kept and pinned, as the store has it."""
    engine.flush()
    store = engine.components.store
    assert store is not None
    pinned = [agent for _, agent in store.pins()]
    return sorted(
        record.num_tokens
        for record in store.sequences()
        if not kind_of(record.agent).is_memory and record.agent in pinned
    )


def test_positions_are_told_and_pinned_and_last_over_a_restart(start: Start) -> None:
    engine = start()
    report = asked(engine, "ada", SYSTEM, "Hello!")
    first, last = report.breakpoint_tokens
    prompt = tuple(engine.encoder.encode(engine.render(GenerationRequest(messages=(Message("system", SYSTEM),)))))
    assert 0 < first < last == report.marked_tokens < report.prompt_tokens
    assert engine.encoder.decode(prompt[:first]).endswith(SYSTEM.strip())
    assert kept(engine) == [first, last]
    engine = start()
    assert kept(engine) == [first, last]
    assert [info.agent for info in engine.agents()] == ["ada"]
    assert engine.stats().num_agents == 1
    engine.check()
    engine.agent("ada").delete()
    assert kept(engine) == []
    engine.check()


def test_a_purge_takes_them_too(start: Start) -> None:
    engine = start()
    asked(engine, "ada", SYSTEM, "Hello!")
    asked(engine, "bob", SYSTEM, "Hello?")
    assert len(kept(engine)) == 4
    engine.agent("ada").purge()
    engine.check()
    assert len(kept(engine)) == 2
    engine.agent("bob").purge()
    engine.flush()
    store = engine.components.store
    assert store is not None
    assert (list(store.sequences()), store.stats().num_blocks) == ([], 0)


def test_unnamed_conversations_do_not_go_on_from_them(start: Start) -> None:
    engine = start()
    asked(engine, "ada", SYSTEM, "Hello!")
    engine.flush()
    asked(engine, None, SYSTEM, "Hello!", "Well.", "And?")
    engine.flush()
    hidden = {agent for _, agent in engine.components.memory.book.everybody() if agent != "ada"}
    assert len({agent for agent in hidden if kind_of(agent).is_memory}) == 1


def test_they_go_when_their_time_is_over(start: Start) -> None:
    engine = start()
    asked(engine, "ada", SYSTEM, "Hello!")
    assert len(kept(engine)) == 2
    parts = engine.components
    later = Retention(
        parts.memory,
        RetentionRules(None, 3600.0, max_unsaved=100),
        ask_hot=lambda branches: parts.loop.call(lambda core: hot_tokens(core.cache, branches)),
        run=parts.intake.run,
        now=lambda: time.time() + 400.0,
    )
    parts.intake.call(later.expire).result()
    assert len(kept(engine)) == 1
    engine.check()


def test_without_marks_and_without_a_store_nothing_is_kept(start: Start) -> None:
    engine = start()
    report = asked(engine, "ada", SYSTEM, "Hello!", marks=())
    assert (report.marked_tokens, report.breakpoint_tokens, kept(engine)) == (0, (), [])
    engine = start(store="off")
    report = asked(engine, "ada", SYSTEM, "Hello!")
    assert report.marked_tokens > 0
    engine.flush()
    assert engine.stats().num_pinned_agents == 0
    assert [agent for _, agent in engine.components.memory.book.everybody()] == ["ada"]


def test_a_full_disk_gives_up_the_rest_first_and_the_agent_remembers_what_is_kept(start: Start) -> None:
    engine = start()
    talk(engine, "first", [user("To begin with. " * 20)], "Hello!")
    engine.flush()
    room = disk_for(engine, 40)
    engine.agent("first").purge()
    engine = start(disk_bytes=room, hot_bytes=150_000)
    story = "This is only said once. " * 12
    report = asked(engine, "ada", SYSTEM, story, marks=(Breakpoint(0, None, 3600.0),))
    asked(engine, "eve", SYSTEM.replace("careful", "curious"), story, marks=())
    for number in range(20):
        talk(engine, f"agent-{number}", [user(f"This is what number {number} has to say. " * 6)], "Hm?")
        engine.flush()
    wait_for(lambda: "eve" not in {info.agent for info in engine.agents()}, engine)
    left = engine.agent("ada").info()
    assert report.marked_tokens <= left.num_tokens < report.prompt_tokens
    again = asked(engine, "ada", SYSTEM, "Another question.", marks=())
    assert (again.source, again.reused_tokens >= report.marked_tokens) == ("own", True)
    engine.check()


@pytest.mark.parametrize("way", ["purge", "delete"])
def test_they_go_with_an_agent_of_which_nothing_else_is_left(start: Start, way: str) -> None:
    engine = start()
    asked(engine, "ada", SYSTEM, "Hello!")
    engine.agent("ada").rewind(1)
    assert len(kept(engine)) == 2
    getattr(engine.agent("ada"), way)()
    engine.flush()
    store = engine.components.store
    assert store is not None
    assert (list(store.sequences()), store.stats().num_blocks) == ([], 0)
    engine.check()
    with pytest.raises(NotFound):
        getattr(engine.agent("ada"), way)()
