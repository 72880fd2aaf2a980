"""Work that fails as badly as work can, and ways to end the threads of a running engine from inside."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rekindle.engine.api import Engine
from rekindle.engine.core.loop import _Call
from rekindle.engine.intake.intake import Work
from rekindle.engine.types import GenerationRequest
from rekindle.model.params import SamplingParams
from rekindle.store.writer import Order
from rekindle.worker import Death, Worker
from tests.tiny_models import tiny_model_dir

WAIT_S = 60.0  # far more than an answer takes: without one, a test fails
THREADS = ["intake", "engine", "store-writer", "store-reader-0"]
TOO_HARD = "a" * 40
REASON = "Panic: out of the depths"


class Panic(BaseException):
    """As libraries written in Rust raise it: no Exception."""


class Fatal(Future[Any]):
    """An answer that cannot be given: whoever works on it fails, and fails again when it says so."""

    def set_running_or_notify_cancel(self) -> bool:
        raise Panic("out of the depths")


def raising(kind: type[BaseException]) -> Callable[..., Any]:
    """Work that ends so, whatever it is given."""

    def work(*_: object) -> None:
        raise kind("out of the depths")

    return work


class _Poison:
    """A load that fails as soon as it is looked at."""

    @property
    def locations(self) -> object:
        raise Panic("out of the depths")


def poison(engine: Engine, thread: str) -> Worker:
    """Queue what ends the loop of a thread when it is its turn; the thread."""
    parts, panic = engine._running, raising(Panic)
    if thread == "intake":
        parts.intake._put(Work(panic, panic))
        return parts.intake.worker
    if thread == "engine":
        parts.loop._put(_Call(panic, Fatal()))
        return parts.loop.worker
    assert parts.store is not None
    if thread == "store-writer":
        parts.store._writer._put(Order(panic, panic, Fatal()))
        return parts.store._writer.worker
    assert len(parts.store._readers.workers) == 1, "else another one may take it"
    parts.store._readers._queue.put(_Poison())
    return parts.store._readers.workers[0]


def died(worker: Worker) -> Death:
    """Wait for the end of a thread that was poisoned."""
    worker.join(WAIT_S)
    assert worker.death is not None
    return worker.death


def hello() -> GenerationRequest:
    return GenerationRequest(text="Hello.", agent="ada", params=SamplingParams(max_tokens=2, ignore_eos=True))


def answers(engine: Engine) -> bool:
    """Whether requests and questions get their answers."""
    assert engine.submit(hello()).result().token_ids
    assert engine._running.intake.call(lambda: 3).result(WAIT_S) == 3
    return engine.stats().num_running == 0 and engine.health().ok


def panicking_model(parent: Path) -> Path:
    """A tiny model whose tokenizer panics at `TOO_HARD`: the library gives up on a pattern that goes back too often."""
    directory = tiny_model_dir("llama", "fp32", parent)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(?:a|aa)+$b"}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, tokenizer["pre_tokenizer"]]}
    path.write_text(json.dumps(tokenizer))
    return directory
