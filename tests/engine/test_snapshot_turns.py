"""Turns of agents of models with recurrent layers: what they share, take back and lose, and two failures of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.engine.api import Engine
from rekindle.errors import ConfigError
from rekindle.parts import LEAST_STATES
from tests.engine.turns import asked, purged, with_template
from tests.tiny_models import tiny_model_dir

Start = Callable[..., Engine]
SIZE = 16


@pytest.fixture(scope="module", params=["lfm2", "qwen3.5"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hybrid")
    return with_template(tiny_model_dir(request.param, "fp32", directory, max_position_embeddings=8192))


def num_snapshots(engine: Engine) -> int:
    """How many are on disk."""
    assert engine.components.store is not None
    with engine.components.store.index.reading() as connection:
        return int(connection.execute("SELECT COUNT(*) FROM block WHERE part = 1").fetchone()[0])


def test_agents_share_their_system_text_after_a_restart(start: Start, hybrid: Path) -> None:
    engine = start(hybrid)
    first = asked(engine, "ada", "What is on the table? " * 8)
    engine.flush()
    engine = start(hybrid)
    second = asked(engine, "bob", "Where does the river end?")
    assert second.warm_tokens > 0 and second.source == "shared"
    assert second.prompt_tokens - 40 - SIZE < second.reused_tokens < first.prompt_tokens - 40
    third = asked(engine, "cyd", "Where does the river end?")
    assert third.computed_tokens <= SIZE, "those after the end of its last block"


def test_a_turn_whose_last_words_differ_resumes_where_its_message_began(start: Start, hybrid: Path) -> None:
    engine = start(hybrid)
    turns = ["What is on the table? " * 6, "A book.", "And in the river? " * 6]
    asked(engine, "ada", *turns[:1])
    before = asked(engine, "ada", *turns)
    again = asked(engine, "ada", *turns[:2], turns[2][:-30] + "or in the sea?")
    assert again.outcome == "diverge"
    assert again.reused_tokens >= before.reused_tokens - SIZE, "the snapshot at the end of the turn before is there"


def test_a_fork_and_a_rewound_agent_go_on_after_a_restart(start: Start, hybrid: Path) -> None:
    engine = start(hybrid)
    first = asked(engine, "ada", "Hello " * 20)
    asked(engine, "ada", "Hello " * 20, "Yes.", "And then?")
    engine.agent("ada").fork("eve")
    engine.agent("ada").rewind(1)
    engine.flush()
    engine = start(hybrid)
    eve = asked(engine, "eve", "Hello " * 20, "Yes.", "And then?")
    assert eve.computed_tokens <= SIZE and eve.warm_tokens > first.prompt_tokens - SIZE
    assert asked(engine, "ada", "Hello " * 20).reused_tokens > 0
    engine.components.loop.call(lambda core: core.check()).result()
    assert engine.components.store is not None
    engine.components.store.check("records")


@pytest.mark.parametrize("how", ["offload", "delete"])
def test_an_agent_that_leaves_memory_leaves_no_snapshot_behind(start: Start, hybrid: Path, how: str) -> None:
    engine = start(hybrid)
    report = asked(engine, "ada", "Hello " * 20)
    engine.flush()
    assert num_snapshots(engine) > 0
    if how == "offload":
        engine.agent("ada").offload()
        again = asked(engine, "ada", "Hello " * 20)
        assert again.warm_tokens >= report.prompt_tokens - SIZE
    else:
        engine.agent("ada").delete()
        assert engine.components.store is not None and engine.components.store.flush(10)
        assert num_snapshots(engine) == 0
    engine.components.loop.call(lambda core: core.check()).result()


def test_no_state_of_a_purged_agent_is_left(start: Start, hybrid: Path, tmp_path: Path) -> None:
    assert purged(start(hybrid), tmp_path, least=500).computed_tokens <= SIZE


@pytest.mark.parametrize("place", ["hot", "warm"])
def test_what_many_prompts_begin_with_is_reused_when_they_part(start: Start, hybrid: Path, place: str) -> None:
    """6,476 shared tokens and 376 others: a peer reuses none of it, as its snapshot is after the end of the prompt."""
    engine = start(hybrid, block_tokens=64, hot_bytes=64 << 20)
    system = fitted(engine, "The lighthouse keeper wrote the number down. ", 6476)
    first = asked(engine, "ada", fitted(engine, "What is on the table? ", 376), system=system)
    if place == "warm":
        engine.flush()
        engine = start(hybrid, block_tokens=64, hot_bytes=64 << 20)
    second = asked(engine, "bob", fitted(engine, "Where does the river end? ", 376), system=system)
    assert first.prompt_tokens >= 6476 + 376 <= second.prompt_tokens
    assert second.reused_tokens >= 0.98 * 6476


def test_a_short_prompt_is_reused(start: Start, hybrid: Path) -> None:
    """480 tokens: a peer whose snapshots need blocks of 528 tokens reuses nothing."""
    engine = start(hybrid, block_tokens=64)
    text = fitted(engine, "What is on the table? ", 480)
    messages = [{"role": "user", "content": text}]
    for agent in ("ada", "bob"):
        report = engine.chat(agent, messages, temperature=0.0, max_tokens=4).report
    assert report.reused_tokens >= 0.8 * report.prompt_tokens


def fitted(engine: Engine, text: str, num_tokens: int) -> str:
    """The text, repeated until it has this many tokens, or a few more."""
    messages = [{"role": "user", "content": text * 100}]
    count = engine.chat("counting", messages, max_tokens=1, reuse="off").report.prompt_tokens / 100
    return text * round(1.01 * num_tokens / count + 0.5)


def test_snapshots_of_a_hundred_agents_stay_within_their_budget(start: Start, tmp_path: Path) -> None:
    directory = with_template(tiny_model_dir("lfm2", "fp32", tmp_path / "model"))
    engine = start(directory)
    (slots,) = engine.components.loop.call(lambda core: core.cache.pool.windows).result()
    assert LEAST_STATES < slots.num_slots < 20
    for number in range(100):
        asked(engine, f"agent {number}", f"What is {number} and {number}?")
    engine.flush()
    assert num_snapshots(engine) <= 1 + 2 * 100, "one of the system text, two of each conversation"
    old = asked(engine, "agent 3", "What is 3 and 3?")
    assert old.computed_tokens <= SIZE, "its snapshot was read from disk"


def test_hot_memory_for_too_few_snapshots_is_refused(start: Start, tmp_path: Path) -> None:
    directory = tiny_model_dir("qwen3.5", "fp32", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"less than 8 blocks with snapshots .* give at least"):
        start(directory, hot_bytes=100_000)
