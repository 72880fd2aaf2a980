"""A thread that dies leaves nobody waiting: what waits for it fails at once, what comes later too, and a close ends."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from typing import Any

import pytest

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.api import Engine
from rekindle.engine.core.core import EngineCore
from rekindle.engine.core.loop import EngineLoop
from rekindle.engine.generation import Generation
from rekindle.engine.intake.intake import Intake
from rekindle.errors import RekindleError, StoreError, Unavailable
from rekindle.store.commands import Delete, Pin
from tests.engine.conftest import Start
from tests.engine.dying import REASON, THREADS, WAIT_S, Panic, died, hello, poison
from tests.engine.holding import held
from tests.exactness.rig import Rig, load

HELLO = [{"role": "user", "content": "Hello. " * 20}]


class BreakingInbox(queue.SimpleQueue[Any]):
    """Fails, instead of giving anything out, once it is broken."""

    def __init__(self) -> None:
        self._broken = threading.Event()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item = super().get(block, timeout)
        if self._broken.is_set():
            raise Panic("out of the depths")
        return item

    def break_(self) -> None:
        """From the next item on."""
        self._broken.set()


def refused(generation: Generation) -> bool:
    """Whether a request was refused since a thread has died."""
    with pytest.raises(Unavailable, match="thread has ended; restart"):
        asyncio.run(asyncio.wait_for(generation.aresult(), WAIT_S))
    return True


@pytest.mark.parametrize("thread", THREADS)
def test_a_dead_thread_is_reported_and_refuses_what_comes(
    start: Start, thread: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(readers=1)
    engine.chat("ada", HELLO, max_tokens=4)
    assert engine.deaths() == () and engine.health().ok
    death = died(poison(engine, thread))
    assert engine.deaths() == (death,)
    assert str(death) == f"the {thread} thread has ended: {REASON}; restart the server"
    assert str(death) in engine.health().problems
    assert refused(engine.submit(hello()))
    for question in (
        engine.agents,
        engine.stats,
        lambda: engine.agent("ada").pin(),
        lambda: engine.agent("ada").delete(),
    ):
        try:
            question()
        except RekindleError as error:
            assert f"the {thread} thread has ended" in str(error)
    is_saving_alive = thread == "store-reader-0"
    assert engine.flush() == is_saving_alive
    engine.close()
    errors = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert not [each for each in errors if "within" in each], "nothing was waited for in vain"
    assert [each.getMessage() for each in caplog.records if each.levelno == logging.CRITICAL] == [str(death)]


@pytest.mark.parametrize("thread", THREADS)
def test_what_was_saved_before_is_warm_afterwards(start: Start, thread: str) -> None:
    engine = start(readers=1)
    engine.chat("ada", HELLO, max_tokens=4)
    if thread != "store-reader-0":
        assert engine.flush()
    died(poison(engine, thread))
    engine.close()
    assert start().chat("ada", HELLO, max_tokens=1).report.warm_tokens > 0


def test_what_waits_for_the_intake_fails_when_it_dies(start: Start) -> None:
    engine, go_on = start(max_waiting=3), threading.Event()
    intake = engine.components.intake
    intake.run(lambda: go_on.wait(WAIT_S) and None)
    worker = poison(engine, "intake")
    waiting, asked = [*engine.submit_many(hello(), 2), engine.submit(hello())], intake.call(lambda: 3)
    go_on.set()
    assert all(refused(generation) for generation in waiting)
    with pytest.raises(Unavailable):
        asked.result(WAIT_S)
    assert died(worker) and intake.room.num_waiting == 0


def test_what_runs_goes_on_when_the_intake_dies(start: Start) -> None:
    engine = start()
    with held(engine, lambda request: request.sequence.num_generated > 2):
        running = engine.stream("ada", HELLO, max_tokens=6, ignore_eos=True)
        next(iter(running))
        died(poison(engine, "intake"))
    assert len(running.result().token_ids) == 6


def test_what_runs_and_waits_fails_when_the_engine_dies(start: Start) -> None:
    engine = start()
    parts, order = engine.components, Pin("default", "ada", 0.0)
    with held(engine, lambda request: request.sequence.num_generated > 2):
        running = engine.stream("ada", HELLO, max_tokens=600, ignore_eos=True)
        next(iter(running))
        go_on = threading.Event()
        parts.loop.call(lambda core: go_on.wait(WAIT_S))
        worker = poison(engine, "engine")
        asked, waiting = parts.loop.call(lambda core: 3), engine.submit(hello())
        assert parts.intake.call(lambda: 3).result(WAIT_S), "it is handed over"
        parts.loop.save(order)
        go_on.set()
        assert refused(running) and refused(waiting)
    for future in (asked, order.done):
        with pytest.raises(Unavailable):
            future.result(WAIT_S)
    assert died(worker) and not parts.loop.is_running
    with pytest.raises(Unavailable):
        parts.loop.call(lambda core: 3).result(WAIT_S)


def test_orders_fail_when_the_writer_dies_and_the_engine_goes_on(start: Start) -> None:
    engine, go_on = start(staging_bytes=1), threading.Event()
    parts = engine.components
    assert parts.store is not None
    parts.store.writer.call(lambda ledger: go_on.wait(WAIT_S))
    worker = poison(engine, "store-writer")
    parts.store.writer.call(lambda ledger: None)  # ends the batch: later blocks are still queued at the thread's end
    engine.chat("ada", HELLO, max_tokens=4)
    while not parts.store.staging.num_waiting:
        assert parts.loop.call(lambda core: True).result(WAIT_S)
    running = engine.stream("eve", HELLO, max_tokens=40, ignore_eos=True)
    order = parts.store.submit(Delete("default", "ada"))
    go_on.set()
    with pytest.raises(StoreError, match="the store-writer thread has ended"):
        order.result(WAIT_S)
    assert died(worker) and len(running.result().token_ids) == 40
    assert not engine.flush() and not len(parts.core.cache.saving), "the queue runs empty all the same"
    assert not engine.stats().store["saving_ok"]
    assert parts.store.staging.num_waiting == 0


def test_loads_bring_nothing_when_the_readers_die(start: Start) -> None:
    start(readers=1).chat("ada", HELLO, max_tokens=4)
    engine, go_on = start(readers=1), threading.Event()
    parts = engine.components
    assert parts.store is not None
    parts.store.load((), lambda *_: None, lambda num_good: go_on.wait(WAIT_S))
    worker = poison(engine, "store-reader-0")
    running = engine.stream("ada", HELLO, max_tokens=4)
    while not len(parts.core.cache.loads):
        assert parts.loop.call(lambda core: True).result(WAIT_S)
    go_on.set()
    report = running.result().report
    assert died(worker) and (report.warm_tokens, report.computed_tokens) == (0, report.prompt_tokens)


def test_a_failing_inbox_ends_the_intake(start: Start) -> None:
    parts, inbox = start(store="off").components, BreakingInbox()
    own = parts.intake
    intake = Intake(preparer=own.preparer, memory=parts.memory, retention=own.retention, room=own.room, inbox=inbox)
    intake.start()
    assert intake.call(lambda: 3).result(WAIT_S) == 3
    inbox.break_()
    intake.run(lambda: None)
    assert died(intake.worker).reason == REASON
    generation = Generation()
    intake.submit(hello(), [generation])
    assert refused(generation)
    with pytest.raises(Unavailable):
        intake.call(lambda: 3).result(WAIT_S)
    intake.stop()


def test_a_failing_inbox_ends_the_engine(tiny_llama: Any) -> None:
    inbox, rig = BreakingInbox(), Rig(load(tiny_llama, "fp32", "q4h"))
    loop = EngineLoop(check_when_idle=True, inbox=inbox)
    loop.start(rig.core)
    assert loop.call(lambda core: 3).result(WAIT_S) == 3
    inbox.break_()
    loop.wake()
    assert died(loop.worker).reason == REASON
    request = rig.unqueued([5, 6, 7], 4)
    loop.submit(request)
    assert refused(request.reply.generation)
    loop.stop()


def test_an_engine_whose_books_are_wrong_says_so(start: Start) -> None:
    engine: Engine = start(check_when_idle=True)
    engine.chat("ada", HELLO, max_tokens=1)

    def misname(core: EngineCore) -> None:
        core.cache.pool.hash_fn = lambda *_: BlockHash(bytes(32))

    engine.components.loop.call(misname).result(WAIT_S)
    engine.components.loop.worker.join(WAIT_S)
    (death,) = engine.deaths()
    assert death.thread == "engine" and "Error" in death.reason
    engine.close()
