"""`engine.agent("ada")`: everything that concerns one agent, without saying its name each time."""

from __future__ import annotations

import asyncio

import pytest

from rekindle.engine.types import Delta
from rekindle.errors import BadRequest, NotFound, RekindleError
from tests.engine.conftest import Start

HELLO = [{"role": "user", "content": "Hello, who are you and what do you remember?"}]


def test_a_handle_chats_forks_and_looks(start: Start) -> None:
    engine = start()
    ada = engine.agent("ada", namespace="team")
    assert repr(ada) == "Agent(id='ada', namespace='team')" and ada == engine.agent("ada", namespace="team")
    assert engine.agents() == [], "making a handle makes no agent"
    with pytest.raises(NotFound):
        ada.info()
    said = ada.chat(HELLO, temperature=0, max_tokens=5)
    more = [*HELLO, {"role": "assistant", "content": said.text}, *HELLO]
    assert ada.generate("Once upon", temperature=0, max_tokens=2).report.completion_tokens == 2
    assert ada.stream(more, temperature=0, max_tokens=3).result().report.source == "own"
    assert ada.prefill(more).prompt_tokens > 0 and ada.load().computed_tokens == 0
    eve = ada.fork("eve")
    assert (eve.id, eve.namespace) == ("eve", "team") and eve.info().num_tokens == ada.info().num_tokens
    assert eve.rewind() < ada.info().num_tokens
    with pytest.raises(BadRequest):
        ada.fork("eve")
    engine.check()


def test_a_handle_keeps_drops_and_forgets(start: Start) -> None:
    engine = start()
    ada = engine.agent("ada")
    ada.chat(HELLO, temperature=0, max_tokens=5)
    ada.pin()
    assert ada.info().pinned_until == float("inf") == engine.agent("ada").info().pinned_until
    ada.unpin()
    assert ada.info().pinned_until is None and ada.offload() > 0 and ada.info().hot_tokens == 0
    ada.fork("eve").delete()
    with pytest.raises(NotFound):
        engine.agent("eve").info()
    assert ada.purge().agent == "ada" and engine.agents() == []
    engine.check()


def test_why_has_the_last_reports_and_forgets_with_the_agent(start: Start) -> None:
    engine = start(store="off")
    ada = engine.agent("ada")
    with pytest.raises(NotFound):
        ada.why()
    reports = [ada.chat(HELLO, temperature=0, max_tokens=3).report for _ in range(9)]
    ada.prefill(HELLO)
    assert ada.why() == reports[:0:-1], "eight, the newest first, of replies alone"
    assert ada.why()[0].outcome == "exact"
    other = [{"role": "user", "content": "Something else, and nothing of what was said before."}]
    explanation = ada.chat(other, temperature=0, max_tokens=3).report.explanation
    assert explanation is not None and ada.why()[0].explanation == explanation
    for forget in (ada.delete, ada.purge):
        forget()
        with pytest.raises(NotFound):
            ada.why()
        ada.chat(HELLO, temperature=0, max_tokens=3)
        assert len(ada.why()) == 1


def test_a_handle_waits_without_blocking_the_loop(start: Start) -> None:
    ada = start(store="off").agent("ada")

    async def both() -> tuple[str, list[Delta]]:
        whole = await ada.achat(HELLO, temperature=0, max_tokens=4)
        return whole.text, [delta async for delta in ada.astream(HELLO, temperature=0, max_tokens=4)]

    text, deltas = asyncio.run(both())
    assert "".join(delta.text for delta in deltas) == text and deltas[-1].finish_reason is not None


def test_an_invalid_id_is_refused(start: Start) -> None:
    with pytest.raises(BadRequest):
        start(store="off").agent("")


def test_an_engine_and_its_handles_outlive_it_quietly(start: Start) -> None:
    engine = start(store="off")
    ada = engine.agent("ada")
    assert repr(engine).startswith("<Engine ") and "running, 1,024 tokens of context, store off>" in repr(engine)
    engine.close()
    assert repr(engine).endswith(": not running>")
    with pytest.raises(RekindleError, match="not running"):
        ada.chat(HELLO)
