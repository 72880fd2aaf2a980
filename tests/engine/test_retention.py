"""What is forgotten unasked, what a pin keeps, and that memories on this side are bounded; time is the test's."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rekindle.agent_ids import new_conversation, recovered
from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.api import Engine
from rekindle.engine.memory.branches import Branch, BranchBook, KnownBranch
from rekindle.engine.memory.memory import AgentMemory
from rekindle.engine.memory.retention import EVERY_S, Retention, RetentionRules
from rekindle.engine.request import FinishedTurn
from rekindle.errors import BadRequest, NotFound, StoreError
from rekindle.matching.matcher import Matcher
from rekindle.store.commands import StoreCommand
from rekindle.text.prompt import PromptEncoder
from rekindle_pocket import MODEL_DIR
from tests.engine.conftest import Start
from tests.engine.test_engine import SYSTEM, talk, user
from tests.engine.test_index_trouble import refused

ROOT = BlockHash(b"r" * 32)
UNNAMED = new_conversation()


class SessionContext:
    """A memory without store and engine: `hot` says what is in memory, `now` is the wall clock."""

    def __init__(self, *, agent_ttl_s: float | None = None, max_unsaved: int = 100) -> None:
        self.now, self.clock = 1_000_000.0, 0.0
        self.hot: dict[str, int] = {}
        self.orders: list[StoreCommand] = []
        self.encoder = PromptEncoder.from_dir(MODEL_DIR)
        self.memory = AgentMemory(
            encoder=self.encoder,
            matcher=Matcher(self.encoder),
            book=BranchBook(max_branches=8),
            store=None,
            block_tokens=16,
            save=self.orders.append,
            demote=lambda branch, num_kept: None,
            now=lambda: self.now,
            vocab_size=self.encoder.vocab_size,
        )
        self.retention = Retention(
            self.memory,
            RetentionRules(agent_ttl_s, 3600.0, max_unsaved),
            ask_hot=self.ask_hot,
            run=lambda work: work(),
            now=lambda: self.now,
            clock=lambda: self.clock,
        )

    def ask_hot(self, branches: list[Branch]) -> Future[list[int]]:
        answer: Future[list[int]] = Future()
        answer.set_result([self.hot.get(branch.agent, branch.num_tokens) for branch in branches])
        return answer

    def turn(self, agent: str, text: str = "Hello!") -> None:
        ids = np.asarray(self.encoder.encode(self.encoder.render_text(text)), dtype=np.uint32)
        self.memory.end_turn(FinishedTurn("default", agent, ROOT, ids, (), ROOT, 0, None, 1))
        self.retention.bound()

    def agents(self) -> set[str]:
        return {agent for _, agent in self.memory.book.everybody()}

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.clock += seconds
        self.retention.idle()
        self.memory.check()


def test_agents_are_forgotten_by_age_unnamed_ones_sooner() -> None:
    desk = SessionContext(agent_ttl_s=86_400)
    desk.turn("ada")
    desk.turn(UNNAMED)
    desk.later(3_500)
    assert desk.agents() == {"ada", UNNAMED}
    desk.later(200)
    assert desk.agents() == {"ada"}
    desk.later(86_400)
    assert desk.agents() == set()
    assert SessionContext().memory.book.num_unsaved == 0


def test_without_a_ttl_named_agents_stay_and_a_recovered_one_is_not_anonymous() -> None:
    desk = SessionContext()
    desk.turn("ada")
    desk.turn(recovered(1))
    desk.later(10 * 365 * 86_400)
    assert desk.agents() == {"ada", recovered(1)}


def test_a_pin_keeps_an_agent_for_its_time() -> None:
    desk = SessionContext(agent_ttl_s=100)
    for name in ("ada", "bob"):
        desk.turn(name)
    desk.memory.book.pin("default", "ada", desk.now + 1_000)
    desk.later(900)
    assert desk.agents() == {"ada"}
    desk.later(200)
    assert desk.agents() == set() and desk.memory.book.num_pinned(desk.now) == 0


def test_a_use_in_the_future_counts_as_now_and_ages_from_there() -> None:
    desk = SessionContext(agent_ttl_s=1_000)
    desk.turn("ada")
    desk.now -= 500_000  # the clock goes back
    desk.later(500)
    assert desk.agents() == {"ada"}
    desk.later(900)
    assert desk.agents() == {"ada"}
    desk.later(200)
    assert desk.agents() == set()


def test_idle_work_is_due_once_a_minute() -> None:
    desk = SessionContext(agent_ttl_s=1)
    desk.turn("ada")
    desk.now += 100
    assert desk.retention.idle() == pytest.approx(EVERY_S) and desk.agents() == {"ada"}
    desk.clock += EVERY_S
    desk.retention.idle()
    assert desk.agents() == set()


def test_without_a_store_who_is_in_memory_no_more_is_forgotten() -> None:
    desk = SessionContext()
    for name in ("ada", "bob"):
        desk.turn(name)
    desk.hot["ada"] = 0
    desk.later(EVERY_S)
    assert desk.agents() == {"bob"}


def test_branches_with_nothing_durable_are_bounded_unnamed_and_oldest_first() -> None:
    desk = SessionContext(max_unsaved=20)
    desk.turn("first")
    desk.memory.book.pin("default", "first", math.inf)
    for number in range(60):
        desk.now += 1
        desk.turn(new_conversation() if number % 2 else f"agent-{number}", f"Number {number} speaks.")
        assert desk.memory.book.num_unsaved <= 20
    assert {"first", "agent-58", "agent-56", "agent-44"} <= desk.agents() and "agent-0" not in desk.agents()
    desk.memory.check()


def wait_for(holds: Callable[[], bool], engine: Engine) -> None:
    """Flush and expire until it holds; what follows a save reaches the book a moment after it."""
    intake = engine.components.intake
    for _ in range(200):
        engine.flush()
        intake.call(intake.retention.expire).result()
        if holds():
            return
    raise AssertionError("it does not come to hold")


def disk_for(engine: Engine, blocks: int) -> int:
    stats = engine.stats().store
    assert stats is not None
    return blocks * (stats["used_bytes"] // stats["num_blocks"])


def test_agents_the_disk_gave_up_are_forgotten_or_shortened_and_pinned_ones_stay(start: Start) -> None:
    engine = start()
    talk(engine, "first", [user("To begin with. " * 20)], "Hello!")
    engine.flush()
    room = disk_for(engine, 40)
    engine.agent("first").purge()
    engine = start(disk_bytes=room, hot_bytes=150_000)
    talk(engine, "pinned", [user("I am to stay here. " * 12)], "Hello!")
    engine.agent("pinned").pin()
    length = engine.agent("pinned").info().num_tokens
    histories = {}
    for number in range(20):
        name = f"agent-{number}"
        histories[name] = [user(f"This is what number {number} has to say. " * 6)]
        talk(engine, name, histories[name], "Hm?")
        engine.flush()
    stats = engine.stats()
    assert stats.store is not None and stats.store["blocks_evicted"] > 0 and stats.store["blocks_refused"] == 0
    wait_for(lambda: len(engine.agents()) < 8, engine)
    infos = {info.agent: info for info in engine.agents()}
    assert infos["pinned"].saved_tokens == length and infos["pinned"].pinned_until == math.inf
    assert infos["agent-19"].saved_tokens == infos["agent-19"].num_tokens
    assert sum(info.num_tokens < 100 for info in infos.values()) <= 1, "what all share is remembered for many"
    again = talk(engine, "agent-19", histories["agent-19"], "And?")
    assert again.report.computed_tokens < 40
    cold = talk(engine, "agent-0", histories["agent-0"], "And?")
    alone = engine.chat(None, histories["agent-0"][:-1], temperature=0.0, max_tokens=7, reuse="off")
    assert cold.report.reused_tokens <= 32 and cold.text == alone.text
    engine.check()


def test_a_turn_that_is_there_already_keeps_its_agent_on_disk(start: Start) -> None:
    engine = start()
    talk(engine, "first", [user("To begin with. " * 20)], "Hello!")
    engine.flush()
    room = disk_for(engine, 30)
    engine.agent("first").purge()
    engine = start(disk_bytes=room, hot_bytes=500_000)
    prompt = [user("The one that is asked again and again. " * 5)]
    for number in range(20):
        engine.chat("loyal", prompt, temperature=0.0, max_tokens=4)
        talk(engine, f"agent-{number}", [user(f"Number {number} says this. " * 8)], "Hm?")
        engine.flush()
        assert engine.agent("loyal").info().saved_tokens == engine.agent("loyal").info().num_tokens
    assert engine.agent("loyal").offload() > 0
    report = engine.chat("loyal", prompt, temperature=0.0, max_tokens=4).report
    assert report.outcome == "exact" and report.computed_tokens < 20


def test_a_pin_outlives_a_restart_and_ends(start: Start) -> None:
    engine = start(agent_ttl_s=1_000_000)
    for name in ("ada", "bob", "cy"):
        talk(engine, name, [SYSTEM], f"I am {name}.")
    engine.agent("ada").pin()
    engine.agent("bob").pin(ttl_s=3_600)
    engine.agent("cy").pin()
    engine.agent("cy").unpin()
    bob = engine.agent("bob").info().pinned_until
    assert engine.agent("ada").info().pinned_until == math.inf and bob is not None and bob < math.inf
    assert engine.agent("cy").info().pinned_until is None and engine.stats().num_pinned_agents == 2
    engine.close()
    engine = start()
    assert engine.agent("ada").info().pinned_until == math.inf and engine.agent(
        "bob"
    ).info().pinned_until == pytest.approx(bob)
    engine.agent("ada").delete()
    talk(engine, "ada", [SYSTEM], "I am new.")
    engine.flush()
    assert engine.agent("ada").info().pinned_until is None
    with pytest.raises(NotFound):
        engine.agent("nobody").pin()
    for wrong in (0, -1, math.nan):
        with pytest.raises(BadRequest, match="more than 0"):
            engine.agent("bob").pin(ttl_s=wrong)
    engine.check()


def test_an_agent_that_could_not_be_saved_is_pinned_once_it_can_be(start: Start) -> None:
    engine, history = start(), [SYSTEM]
    with refused(engine, "INSERT ON sequence"):
        talk(engine, "ada", history, "Hello!")
        engine.flush()
        assert engine.agent("ada").info().saved_tokens == 0 and "saving has failed" in engine.health().problems[0]
        with pytest.raises(StoreError, match="cannot be saved"):
            engine.agent("ada").pin()
        assert engine.agent("ada").info().pinned_until is None
    engine.agent("ada").pin()
    assert engine.agent("ada").info().saved_tokens > 0 and engine.health().ok
    engine.close()
    assert start().agent("ada").info().pinned_until == math.inf


def test_turns_that_do_not_fit_beside_the_pinned_ones_are_said(start: Start) -> None:
    engine = start(disk_bytes=12 * 12_288)
    for number in range(12):
        talk(engine, f"agent-{number}", [user(f"Number {number} has a story to tell. " * 8)], "Hm?")
        with nullcontext() if number < 2 else pytest.raises(StoreError, match="is not pinned"):
            engine.agent(f"agent-{number}").pin()
    stats = engine.stats()
    assert stats.store is not None and stats.store["blocks_refused"] > 0
    assert not engine.health().ok and "pinned" in engine.health().problems[0]
    for number in range(11):
        engine.agent(f"agent-{number}").unpin()
    talk(engine, "late", [user("I came late and have a story to tell. " * 4)], "Hm?")
    engine.flush()
    assert engine.agent("late").info().saved_tokens > 0 and engine.health().ok


def test_conversations_without_a_store_are_no_more_than_memory_has_blocks(start: Start) -> None:
    engine = start(store="off", hot_bytes=100_000)
    for number in range(60):
        engine.chat(None, [user(f"{number} says something short.")], max_tokens=2)
    stats = engine.stats()
    assert 0 < stats.num_agents <= stats.num_blocks < 60
    engine.check()


def test_ids_of_durable_branches_are_dropped_with_their_text_and_read_again(start: Start) -> None:
    engine = start(text_index_bytes=4_000)
    histories: dict[str, list[dict[str, str]]] = {}
    for number in range(12):
        name = f"agent-{number}"
        histories[name] = [user(f"Number {number} has a story to tell. " * 8)]
        talk(engine, name, histories[name], "Hm?")
    engine.flush()
    memory = engine.components.memory

    def known() -> int:
        return sum(isinstance(branch, KnownBranch) for branch in memory.book.branches())

    wait_for(lambda: engine.components.intake.call(known).result() < 6, engine)
    again = talk(engine, "agent-0", histories["agent-0"], "Still there?")
    assert again.report.source == "own" and again.report.computed_tokens < 40
    assert engine.agent("agent-1").info().hot_tokens > 0
    engine.check()


def test_a_branch_the_disk_has_just_shortened_is_read_at_its_length_not_forgotten(start: Start) -> None:
    engine, history = start(), [SYSTEM]
    talk(engine, "ada", history, "Hello!")
    engine.flush()
    memory, intake = engine.components.memory, engine.components.intake
    (branch,) = intake.call(lambda: memory.book.of("default", "ada")).result()
    stale = replace(branch.without_ids(), head=BlockHash(b"x" * 32), num_tokens=branch.num_tokens + 40)
    intake.call(lambda: memory.book.put(stale)).result()
    assert talk(engine, "ada", history, "And?").report.source == "own"
    kept = intake.call(lambda: memory.book.get("default", "ada", branch.number)).result()
    assert kept is not None and branch.num_tokens <= kept.num_tokens != stale.num_tokens
    engine.check()


def test_a_store_that_was_taken_away_is_no_secret(start: Start, tmp_path: Path) -> None:
    engine = start()
    assert engine.health().ok and engine.health().problems == ()
    talk(engine, "ada", [SYSTEM], "Hello!")
    engine.flush()
    assert engine.agent("ada").info().saved_tokens > 0
    shutil.rmtree(tmp_path / "store")
    health = engine.health()
    assert not health.ok and "removed" in health.problems[0]
    info = engine.agent("ada").info()
    assert info.saved_tokens == info.warm_tokens == 0 and info.hot_tokens > 0
    assert talk(engine, "bob", [SYSTEM], "Hello!").text
    engine.close()
    assert engine.health().problems == ("the engine is not running: start it",)
