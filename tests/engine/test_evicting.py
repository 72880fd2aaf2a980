"""Who gives way in hot memory: what `namespace_share` says, when more is asked than memory holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.engine.api import Engine
from rekindle.engine.types import GenerationRequest, Report
from rekindle.model.params import SamplingParams
from rekindle.text.messages import normalise_messages
from tests.engine.conftest import Start
from tests.engine.turns import asked, with_template
from tests.tiny_models import tiny_model_dir

BLOCKS = 40
SIZE = 16
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


@pytest.fixture(scope="module", params=["gemma3", "lfm2"])
def ending(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with windows or states, of which hot memory has fewer than blocks."""
    return with_template(tiny_model_dir(request.param, "fp32", tmp_path_factory.mktemp("ending")))


def flood(engine: Engine) -> list[Report]:
    """Short conversations of many agents of one tenant, whose blocks all fit."""
    reports = [asked(engine, f"agent-{number}", f"What is {number}?", namespace="flood") for number in range(20)]
    assert engine.stats().num_evictions == 0
    engine.check()
    return reports


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_its_windows_and_states_give_way_as_well(start: Start, ending: Path, share: float) -> None:
    engine = start(ending, store="off", hot_bytes=1 << 20, namespace_share=share)
    asked(engine, "early", "Hello", namespace="quiet")
    flood(engine)
    again = asked(engine, "early", "Hello", namespace="quiet")
    kept = again.prompt_tokens - SIZE if share < 1 else 0
    assert kept <= again.reused_tokens <= (kept and again.prompt_tokens), "used longest ago of all"
    assert asked(engine, "agent-19", "What is 19?", namespace="flood").reused_tokens >= again.prompt_tokens - SIZE


def test_windows_and_states_that_are_read_count_for_their_namespace(start: Start, ending: Path) -> None:
    for _ in range(2):
        engine = start(ending, hot_bytes=1 << 20, namespace_share=0.5)
        reports = flood(engine)
        engine.flush()
    assert reports[0].warm_tokens > 0
