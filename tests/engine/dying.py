"""Work that fails as badly as work can, and ways to end the threads of a running engine from inside."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rekindle.engine.api import Engine
from rekindle.engine.generation import Generation
from rekindle.engine.request import Request
from rekindle.engine.types import GenerationRequest
from rekindle.model.params import SamplingParams
from rekindle.store.values import Place, SequenceRecord
from rekindle.worker import Death, Worker
from tests.tiny_models import tiny_model_dir

WAIT_S = 60.0  # far more than an answer takes: without one, a test fails
THREADS = ["intake", "engine", "store-writer", "store-reader-0"]
TOO_HARD = "a" * 40
REASON = "Panic: out of the depths"


class Panic(BaseException):
    """As libraries written in Rust raise it: no Exception."""


class Unspeakable(BaseException):
    """An error that cannot be reported."""

    def __str__(self) -> str:
        raise Panic("out of the depths")

    __repr__ = __str__


def raising(kind: type[BaseException]) -> Callable[..., Any]:
    """Work that ends so, whatever it is given."""

    def work(*_: object) -> None:
        raise kind("out of the depths")

    return work


# What follows fails as soon as it is worked on, and again when that is reported.


class FatalGeneration(Generation):
    """For the intake."""

    cancel_asked = property(raising(Panic))  # type: ignore[assignment]
    put = raising(Panic)


class FatalRequest(Request):
    """For the engine."""

    namespace = property(raising(Panic))  # type: ignore[assignment]
    reply = property(raising(Panic))  # type: ignore[assignment]

    def __init__(self) -> None:
        """Without all that a request has."""


class FatalRecord(SequenceRecord):
    """For the store's writer."""

    head = property(raising(Unspeakable))  # type: ignore[assignment]

    def __init__(self) -> None:
        """Without all that a record has."""


class FatalBlock:
    """For a reader of the store."""

    places = (Place(0, 0, 0),)
    identity = property(raising(Panic))


def poison(engine: Engine, thread: str) -> Worker:
    """Queue what ends the loop of a thread when it is its turn; the thread."""
    parts = engine.components
    if thread == "intake":
        parts.intake.submit(GenerationRequest(text="", waits_aside=True), [FatalGeneration()])
        return parts.intake.worker
    if thread == "engine":
        parts.loop.submit(FatalRequest())
        return parts.loop.worker
    assert parts.store is not None
    writer, *readers = parts.store.workers
    if thread == "store-writer":
        parts.store.save_turn(FatalRecord())
        return writer
    (reader,) = readers  # of several another one may take it
    block: Any = FatalBlock()
    parts.store.load([block], lambda *_: None, lambda num_good: None)
    return reader


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
    assert engine.components.intake.call(lambda: 3).result(WAIT_S) == 3
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
