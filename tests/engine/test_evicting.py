"""Who gives way in hot memory: what `namespace_share` says, when more is asked than memory holds."""

from __future__ import annotations

import pytest

from rekindle.engine.api import Engine
from rekindle.engine.types import GenerationRequest
from rekindle.model.params import SamplingParams
from rekindle.text.messages import normalise_messages
from tests.engine.conftest import Start

BLOCKS = 40
PARAMS = SamplingParams(temperature=0.0, max_tokens=2)


def reused(engine: Engine, agent: str, namespace: str = "default") -> int:
    """Ask for some eight blocks of the agent's own; the tokens of them that were in memory."""
    told = normalise_messages([{"role": "user", "content": f"{agent} {namespace} " * 10}])
    generation = engine.submit(GenerationRequest(messages=told, agent=agent, namespace=namespace, params=PARAMS))
    return generation.result().report.reused_tokens


def fitting(start: Start, **settings: object) -> Engine:
    """An engine that holds `BLOCKS` blocks and has no disk."""
    stats = start(store="off").stats()
    return start(store="off", hot_bytes=BLOCKS * stats.hot_bytes // stats.num_blocks, **settings)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_namespace_beyond_its_share_gives_way_before_others(start: Start, share: float) -> None:
    engine = fitting(start, namespace_share=share)
    assert reused(engine, "early", "quiet") == 0
    for number in range(12):
        assert reused(engine, f"agent-{number}", "flood") == 0
    assert engine.stats().num_evictions > BLOCKS / 2
    assert (reused(engine, "early", "quiet") > 0) == (share < 1), "used longest ago of all"
    assert reused(engine, "agent-11", "flood") > 0
    engine.check()
