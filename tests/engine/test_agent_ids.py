"""What is no agent's id is refused by every method of the library; the engine's own hidden ids stay its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rekindle.agent_ids import breakpoint_prefix, new_conversation
from rekindle.engine.api import Engine
from rekindle.engine.types import GenerationRequest
from rekindle.errors import BadRequest
from tests.engine.conftest import Start

HELLO = [{"role": "user", "content": "Hello!"}]
WAYS: dict[str, Callable[[Engine, str], object]] = {
    "chat": lambda engine, agent: engine.chat(agent, HELLO, max_tokens=1),
    "stream": lambda engine, agent: engine.stream(agent, HELLO, max_tokens=1),
    "submit": lambda engine, agent: engine.submit(GenerationRequest(text="Hello!", agent=agent)),
    "parent": lambda engine, agent: engine.submit(GenerationRequest(text="Hello!", agent="ada", parent=agent)),
    "several": lambda engine, agent: engine.submit_many(GenerationRequest(text="Hello!", agent=agent), 2),
    "prefilling": lambda engine, agent: engine.prefilling(agent, HELLO),
    "prefill": lambda engine, agent: engine.prefill(agent, HELLO),
    "load": lambda engine, agent: engine.agent(agent).load(),
    "fork source": lambda engine, agent: engine.agent(agent).fork("eve"),
    "fork target": lambda engine, agent: engine.agent("ada").fork(agent),
    "rewind": lambda engine, agent: engine.agent(agent).rewind(),
    "agent": lambda engine, agent: engine.agent(agent).info(),
    "offload": lambda engine, agent: engine.agent(agent).offload(),
    "delete": lambda engine, agent: engine.agent(agent).delete(),
    "purge": lambda engine, agent: engine.agent(agent).purge(),
    "pin": lambda engine, agent: engine.agent(agent).pin(),
    "unpin": lambda engine, agent: engine.agent(agent).unpin(),
}


def test_a_control_character_is_refused_everywhere(start: Start) -> None:
    engine = start()
    engine.chat("ada", HELLO, max_tokens=1)
    for way, ask in WAYS.items():
        for bad in (new_conversation(), f"{breakpoint_prefix('ada')}0", "a\nb", "\x9f", "a" * 257, "", "\ud800"):
            with pytest.raises(BadRequest, match="agent's id") as caught:
                ask(engine, bad)
            assert caught.value.param in ("agent", "parent", "source", "target"), way
    assert [info.agent for info in engine.agents()] == ["ada"]
    assert engine.agent("ada").info().num_tokens > 0


def test_unnamed_conversations_and_marked_beginnings_go_on_under_hidden_ids(start: Start) -> None:
    engine = start()
    first = engine.chat(None, HELLO, max_tokens=4, temperature=0.0)
    grown = [*HELLO, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And?"}]
    again = engine.chat(None, grown, max_tokens=1, temperature=0.0)
    assert again.report.reused_tokens >= first.report.prompt_tokens - 1
    assert engine.agents() == []
