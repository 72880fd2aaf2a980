"""Events as bytes, one line each whatever a payload says; and the loop runs between those that come at once."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

from starlette.requests import Request
from starlette.types import Message

from rekindle.engine.types import GenerationRequest
from rekindle.model.params import SamplingParams
from rekindle.server.answers.sse import event, watched
from tests.server.conftest import Served

TEXT = "a\nb\r\u0085c\u2028d\u2029e\x0b\x0c\x1cf é 🙂"


def test_no_reader_of_lines_splits_an_event() -> None:
    lines = event({"text": TEXT}, "delta").decode().splitlines()
    assert lines[0] == "event: delta"
    assert json.loads(lines[1].removeprefix("data: ")) == {"text": TEXT}
    assert lines[2:] == [""]


def test_the_loop_runs_between_tokens_that_are_there_already(served: Served) -> None:
    """Else a client that left is noticed after all of them, each of which the loop tries to send in vain."""
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    generation = served.engine.submit(GenerationRequest(text="Hello!", params=params))
    turns, at_items = 0, list[int]()

    def turn() -> None:
        nonlocal turns
        turns += 1
        asyncio.get_running_loop().call_soon(turn)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("the client stays")

    async def read() -> None:
        asyncio.get_running_loop().call_soon(turn)
        async for _ in watched(Request({"type": "http"}, receive), [generation]):
            at_items.append(turns)

    served.until_idle()
    asyncio.run(read())
    assert len(at_items) >= 2
    assert all(later > earlier for earlier, later in pairwise(at_items))
