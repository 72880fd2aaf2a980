"""The caller's end: order, errors, cancelling before and after the engine knows, and the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rekindle.engine.generation import Generation
from rekindle.engine.types import Delta, Report, Timings
from rekindle.errors import RequestFailed

REPORT = Report("miss", None, 0, 3, 0, 0, 0, 3, 2, "canonical", Timings(0, 0, 0, 0, 0), None)


def spoken(generation: Generation) -> None:
    generation.put(Delta("a", (1,)))
    generation.put(Delta("b", (2,), finish_reason="stop", report=REPORT))


def test_deltas_add_up_to_the_result() -> None:
    generation = Generation()
    threading.Thread(target=spoken, args=(generation,)).start()
    result = generation.result()
    assert (result.text, result.token_ids, result.finish_reason) == ("ab", (1, 2), "stop")


def test_result_after_iterating_half_is_still_the_whole() -> None:
    generation = Generation()
    spoken(generation)
    assert next(iter(generation)).text == "a"
    assert generation.result().text == "ab"


def test_async_consumer_is_woken_from_another_thread() -> None:
    async def consume() -> list[str]:
        generation = Generation()
        threading.Timer(0.01, spoken, args=(generation,)).start()
        return [delta.text async for delta in generation]

    assert asyncio.run(asyncio.wait_for(consume(), 60)) == ["a", "b"]


def test_an_error_ends_it() -> None:
    generation = Generation()
    generation.put(RequestFailed("no"))
    with pytest.raises(RequestFailed, match="no"):
        generation.result()


def test_a_cancel_asked_before_the_engine_listens_is_not_lost() -> None:
    called: list[str] = []
    generation = Generation()
    generation.cancel()
    generation.on_cancel(lambda: called.append("late"))
    assert called == ["late"]
    generation.cancel()
    assert called == ["late", "late"]
