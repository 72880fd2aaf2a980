"""Long prompts are prepared where they hold up nobody: not the intake, no other namespace; agents keep order."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rekindle.config import Settings
from rekindle.engine.api import Engine
from rekindle.engine.intake.fairness import FairWorkers
from rekindle.engine.intake.long_prompts import LONG_CHARS
from rekindle.engine.types import GenerationRequest
from rekindle.errors import PromptTooLong
from rekindle.model.params import SamplingParams
from rekindle.text.messages import Message
from tests.engine.conftest import Start
from tests.engine.rewriting import with_template

WAIT_S = 60.0  # nothing here is timed; this bounds a failure
LONG = "word " * LONG_CHARS
# Of long prompts only the beginning is written; where one says so, the template waits.
TEMPLATE = "{{ strftime_now('') if 'HOLD' in messages[-1].content }}{{ messages[-1].content[:60] }}"
ONE = SamplingParams(max_tokens=1, temperature=0)


class Gate:
    """Work that waits to be let through, and says when it has begun."""

    def __init__(self) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> str:
        self.begun.set()
        assert self.opened.wait(WAIT_S)
        return ""


def test_namespaces_do_not_wait_for_each_other_and_each_keeps_its_order() -> None:
    workers, gate, done = FairWorkers("test"), Gate(), list[str]()
    first = workers.submit("left", gate)
    assert gate.begun.wait(WAIT_S)
    second = workers.submit("left", lambda: done.append("left"))
    workers.submit("right", lambda: done.append("right")).result(WAIT_S)
    workers.submit("right", lambda: done.append("right again")).result(WAIT_S)
    assert not second.done()
    workers.check()
    gate.opened.set()
    first.result(WAIT_S)
    second.result(WAIT_S)
    assert done == ["right", "right again", "left"]
    workers.stop()
    workers.check()


def test_namespaces_take_turns() -> None:
    workers, gate, done = FairWorkers("test", most=1), Gate(), list[str]()
    workers.submit("left", gate)
    assert gate.begun.wait(WAIT_S)
    futures = [workers.submit("left", lambda at=at: done.append(f"left {at}")) for at in range(5)]
    futures += [workers.submit("right", lambda at=at: done.append(f"right {at}")) for at in range(2)]
    gate.opened.set()
    for future in futures:
        future.result(WAIT_S)
    assert done == ["right 0", "left 0", "right 1", "left 1", "left 2", "left 3", "left 4"]
    workers.stop()


def test_what_is_queued_is_done_before_the_end_and_what_comes_later_by_who_asks() -> None:
    workers, gate, done = FairWorkers("test"), Gate(), list[int]()
    workers.submit("left", gate)
    futures = [workers.submit(name, lambda: done.append(1)) for name in ("left", "left", "right")]
    gate.opened.set()
    workers.stop()
    assert all(future.done() for future in futures) and len(done) == 3
    assert workers.submit("left", lambda: "late").result() == "late"
    workers.stop()


def test_an_error_is_its_futures() -> None:
    workers = FairWorkers("test")
    with pytest.raises(ZeroDivisionError):
        workers.submit("left", lambda: 1 // 0).result(WAIT_S)
    assert workers.submit("left", lambda: 2).result(WAIT_S) == 2
    workers.stop()


class Body:
    """What a request takes in memory."""


@contextmanager
def no_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_work_that_failed_is_gone_with_its_error() -> None:
    def refuse(body: Body) -> None:
        raise PromptTooLong(f"too long: {body}")

    def refused(body: Body) -> weakref.ref[Body]:
        with pytest.raises(PromptTooLong):
            workers.submit("left", partial(refuse, body)).result(WAIT_S)
        return weakref.ref(body)

    workers = FairWorkers("test")
    with no_garbage_collector():
        gone = refused(Body())
        workers.stop()
        assert gone() is None


def test_the_intake_keeps_nothing_of_what_it_has_done(start: Start) -> None:
    def told(body: Body) -> weakref.ref[Body]:
        intake.run(partial(id, body))
        return weakref.ref(body)

    with start(store="off") as engine, no_garbage_collector():
        intake = engine.components.intake
        gone, until = told(Body()), time.monotonic() + WAIT_S
        while gone() is not None and time.monotonic() < until:
            time.sleep(0.001)
        assert gone() is None


Held = tuple[Engine, Gate]


@pytest.fixture
def held(tiny_llama: Path, tmp_path: Path) -> Iterator[Held]:
    """An engine whose chat template waits where a message says so, until it is let through: it asks for the date."""
    gate = Gate()

    def clock() -> datetime:
        gate()
        return datetime(2024, 1, 31)

    model = with_template(tiny_llama, TEMPLATE, tmp_path / "model")
    settings = Settings.load({"model": str(model), "store": "off", "threads": 1, "hot_bytes": 4 << 20})
    with Engine(settings, clock=clock) as engine:
        try:
            yield engine, gate
        finally:
            gate.opened.set()


def chat(text: str, *, agent: str | None = None, namespace: str = "default") -> GenerationRequest:
    return GenerationRequest(messages=(Message("user", text),), params=ONE, agent=agent, namespace=namespace)


def test_a_long_prompt_in_its_template_holds_up_nobody(held: Held) -> None:
    engine, gate = held
    long = engine.submit(chat("HOLD " + LONG, namespace="left"))
    assert gate.begun.wait(WAIT_S)
    assert engine.submit(chat("Hello?", namespace="right")).result().finish_reason == "length"
    assert engine.submit(chat("Hello?", namespace="left")).result().finish_reason == "length", "nor its own tenant"
    assert engine.submit(chat("1 " + LONG, namespace="right")).result().finish_reason == "length"
    engine.agents()
    gate.opened.set()
    assert long.result().finish_reason == "length"


def test_a_request_waits_for_the_long_one_of_its_agent(held: Held) -> None:
    engine, gate = held
    begun: list[str] = []
    long = engine.submit(chat("HOLD " + LONG, agent="ada"))
    assert gate.begun.wait(WAIT_S)
    short = engine.submit(chat("Hello?", agent="ada"))
    long.on_begin(lambda: begun.append("long"))
    short.on_begin(lambda: begun.append("short"))
    assert engine.submit(chat("Hello?", agent="eve")).result().finish_reason == "length"
    assert not begun, "it came before eve's, and its agent has another that is not prepared yet"
    gate.opened.set()
    assert short.result().finish_reason == long.result().finish_reason == "length"
    assert sorted(begun) == ["long", "short"]


def test_what_cannot_fit_arrives_as_an_error_of_its_request(start: Start) -> None:
    with start(store="off") as engine:
        with pytest.raises(PromptTooLong, match="prompt is too long"):
            engine.submit(chat("1" * 200_000)).result()
        assert engine.submit(chat("Hello?")).result().finish_reason == "length"
        engine.check()
