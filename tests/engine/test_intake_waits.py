"""What the intake does while nothing comes, and how long nothing has to have come for that."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.gauges import hot_tokens
from rekindle.engine.intake.anticipation import Anticipation
from rekindle.engine.intake.intake import LOOK_AGAIN_S, Intake
from rekindle.engine.memory.retention import EVERY_S, Retention, RetentionRules
from rekindle.engine.request import FinishedTurn
from rekindle.engine.types import GenerationRequest
from rekindle.text.messages import Message
from tests.engine.conftest import Start

NOTHING_S = LOOK_AGAIN_S * 0.9  # too short a time for idle work
Work = Callable[[], None]


class PacedInbox(queue.SimpleQueue[Work | None]):
    """Its time stands still until it is moved, and is moved only while somebody waits for more to come."""

    def __init__(self) -> None:
        self._now = 0.0
        self._is_waited_at = False
        self._changed = threading.Condition()

    def put(self, item: Work | None, block: bool = True, timeout: float | None = None) -> None:
        with self._changed:
            super().put(item)
            self._changed.notify_all()

    def get(self, block: bool = True, timeout: float | None = None) -> Work | None:
        with self._changed:
            until = math.inf if timeout is None else self._now + timeout
            while self.empty():
                if self._now >= until:
                    raise queue.Empty
                self._wait_at(True)
                self._changed.wait()
            self._wait_at(False)
            return super().get_nowait()

    def _wait_at(self, is_waited_at: bool) -> None:
        self._is_waited_at = is_waited_at
        self._changed.notify_all()

    def settle(self) -> None:
        """Return when all that came is done, and somebody waits for more."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_waited_at and self.empty(), timeout=60)

    def move(self, seconds: float) -> None:
        """Let so much time pass in which nothing comes, and return when that has had its effect."""
        self.settle()
        with self._changed:
            self._now += seconds
            self._wait_at(False)
        self.settle()


@contextmanager
def running(
    start: Start, is_busy: Callable[[], bool], *, now: Callable[[], float] = time.time
) -> Iterator[tuple[Intake, PacedInbox, Anticipation]]:
    """An intake over the parts of an engine whose own does nothing, with a turn of which something is to be made."""
    engine = start(store="off")
    parts, own = engine.components, engine.components.intake
    anticipation = Anticipation(
        encoder=parts.encoder,
        memory=parts.memory,
        form=parts.reply_format,
        new_table=parts.core.cache.new_table,
        root=parts.core.cache.root,
        submit=lambda request: None,
        max_context=1024,
        is_busy=is_busy,
    )
    retention = Retention(
        parts.memory,
        RetentionRules(agent_ttl_s=60.0, anonymous_ttl_s=60.0, max_unsaved=100),
        ask_hot=lambda branches: parts.loop.call(lambda core: hot_tokens(core.cache, branches)),
        run=own.run,
        now=now,
        clock=now,
    )
    inbox = PacedInbox()
    intake = Intake(
        preparer=own.preparer,
        memory=parts.memory,
        retention=retention,
        room=own.room,
        anticipation=anticipation,
        inbox=inbox,
    )
    ids, root = np.arange(20, 30, dtype=np.uint32), BlockHash(bytes(32))
    asked = GenerationRequest(messages=(Message("user", "Where?"),), agent="ada")
    turn = FinishedTurn("default", "ada", root, ids, (), root, 0, 0, 10, request=asked, text="There.")
    anticipation.expect(turn)
    intake.run(lambda: anticipation.ended(turn))
    intake.start()
    try:
        yield intake, inbox, anticipation
    finally:
        intake.stop()


def test_next_prompts_are_foreseen_only_when_nothing_has_come_for_a_while(start: Start) -> None:
    with running(start, is_busy=lambda: False) as (intake, inbox, anticipation):
        for _ in range(4):
            inbox.move(NOTHING_S)
            assert anticipation.num_pending == 1, "who asks right behind a turn does not wait for idle work"
            intake.call(lambda: None).result()
        inbox.move(LOOK_AGAIN_S)
        assert anticipation.num_pending == 0


def test_while_the_engine_is_busy_it_is_looked_again_as_often(start: Start) -> None:
    is_busy = True
    with running(start, is_busy=lambda: is_busy) as (_, inbox, anticipation):
        for _ in range(3):
            inbox.move(LOOK_AGAIN_S)
            assert anticipation.num_pending == 1
        is_busy = False
        inbox.move(NOTHING_S)
        assert anticipation.num_pending == 1
        inbox.move(LOOK_AGAIN_S)
        assert anticipation.num_pending == 0


def test_what_is_old_is_forgotten_while_the_engine_is_never_idle(start: Start) -> None:
    now = 1_000_000.0
    with running(start, is_busy=lambda: True, now=lambda: now) as (intake, inbox, anticipation):
        book = intake.memory.book
        ids, root = np.arange(20, 30, dtype=np.uint32), BlockHash(bytes(32))
        bob = FinishedTurn("default", "bob", root, ids, (), root, 0, 0, 10)
        intake.call(lambda: book.end_turn(bob, canonical_tokens=0, now=now)).result()
        for _ in range(3):
            inbox.move(LOOK_AGAIN_S)
            assert book.everybody() == [("default", "bob")]
        now += 2 * EVERY_S
        intake.call(lambda: None).result()
        assert anticipation.num_pending == 1, "there is something to foresee still"
        inbox.settle()
        assert book.everybody() == []
