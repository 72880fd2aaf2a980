"""What is said of a request: how its text relates to the agent's own, what was reused, and why not more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rekindle.engine.api import Engine
from rekindle.engine.memory.branches import KnownBranch
from rekindle.engine.types import GenerationRequest, Report
from rekindle.model.params import SamplingParams

Start = Callable[..., Engine]
OPENING = "You are a careful assistant. Answer in one short sentence, and remember what you are told. " * 2
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def asked(engine: Engine, agent: str, *texts: str) -> Report:
    roles = ("system", "user", "assistant", "user")
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return engine.chat(agent, messages, temperature=0.0, max_tokens=4).report


def with_ids(engine: Engine, agent: str, ids: tuple[int, ...]) -> Report:
    return engine.submit(GenerationRequest(token_ids=ids, agent=agent, params=GREEDY)).result().report


def test_ids_given_as_they_are_relate_to_the_agents_ids(start: Start) -> None:
    engine, ids = start(), tuple(range(20, 90))
    assert with_ids(engine, "ada", ids).outcome == "miss"
    again = with_ids(engine, "ada", ids)
    assert (again.outcome, again.source, again.computed_tokens, again.reuse) == ("exact", "own", 1, "continuation")
    assert again.matched_bytes > 0
    assert with_ids(engine, "ada", ids[:40]).outcome == "exact"
    assert with_ids(engine, "ada", (*ids[:40], *ids[:40])).outcome == "diverge"


def test_text_that_is_stored_stays_exact_where_some_of_its_blocks_are_gone(start: Start) -> None:
    engine = start(store="off")
    first = asked(engine, "ada", OPENING, "Hello!")
    engine.flush()
    pool = engine.components.core.cache.pool
    loop = engine.components.loop
    branch = engine.components.memory.book.of("default", "ada")[0]
    assert isinstance(branch, KnownBranch)
    names, ids = branch.hashes, branch.ids

    def lose_the_end(_: object) -> int:
        tail = pool.find_child(names[-1], ids[len(names) * 16 :])
        assert tail is not None and pool.evict(tail[0])
        block = pool.find(names[-1], ids[(len(names) - 1) * 16 : len(names) * 16])
        assert block is not None and pool.evict(block)
        return len(names) - 1

    left = loop.call(lose_the_end).result()
    again = asked(engine, "ada", OPENING, "Hello!")
    assert (again.outcome, again.reused_tokens) == ("exact", min(left * 16, first.prompt_tokens - 1))
    assert again.explanation is not None and again.explanation.cause == "evicted"


def test_an_agent_with_other_memories_misses_also_where_anothers_blocks_serve(start: Start) -> None:
    engine = start()
    asked(engine, "bob", "Numbers only.", "1 2 3")
    asked(engine, "ada", OPENING, "Hello!")
    report = asked(engine, "bob", OPENING, "Hello?")
    assert (report.outcome, report.source) == ("miss", "shared")
    assert report.reused_tokens >= 48
    assert report.explanation is not None and report.explanation.cause == "not_stored"
    assert "first request of a conversation" in report.explanation.detail


def test_numbers_of_a_report_add_up_on_every_path(start: Start) -> None:
    engine = start()
    for texts in ((OPENING, "A"), (OPENING, "A"), (OPENING, "B"), (OPENING, "A", "x", "C"), ("x",)):
        report = asked(engine, "ada", *texts)
        assert report.reused_tokens == report.hot_tokens + report.warm_tokens
        assert report.prompt_tokens == report.reused_tokens + report.computed_tokens
        assert report.computed_tokens >= 1
        assert (report.source is None) == (report.reused_tokens == 0)
