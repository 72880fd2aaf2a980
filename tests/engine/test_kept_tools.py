"""Tools of agents are kept once each, within bounds, and forgotten with their agent."""

from __future__ import annotations

from typing import Any

from rekindle.engine.memory.branches import BranchBook
from rekindle.engine.memory.kept_tools import MOST_AGENTS, MOST_KINDS, KeptTools, names_of
from rekindle.engine.memory.memory import AgentMemory
from rekindle.matching.matcher import Matcher
from tests.text.families import encoder_for


def tools(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "parameters": {}}} for name in names]


def test_the_last_tools_of_an_agent_are_its_tools() -> None:
    kept = KeptTools()
    kept.put("a", "ada", tools("look"))
    kept.put("a", "eve", tools("look"))
    kept.put("b", "ada", tools("add"))
    assert kept.get("a", "ada") is kept.get("a", "eve"), "equal ones are kept once"
    assert kept.get("b", "ada") == tools("add") and kept.get("b", "eve") is None
    kept.put("a", "ada", tools("look", "add"))
    assert kept.get("a", "ada") == tools("look", "add") and kept.get("a", "eve") == tools("look")
    kept.drop("a", "ada")
    kept.drop("a", "nobody")
    assert kept.get("a", "ada") is None
    kept.check()


def test_many_agents_and_many_kinds_push_out_the_oldest() -> None:
    kept = KeptTools()
    for number in range(MOST_AGENTS + 10):
        kept.put("a", f"agent-{number}", tools("look"))
    kept.check()
    assert kept.get("a", "agent-9") is None and kept.get("a", "agent-10") is not None
    for number in range(MOST_KINDS + 10):
        kept.put("b", f"other-{number}", tools(f"tool-{number}"))
    kept.check()
    assert kept.get("b", "other-9") is None and kept.get("b", f"other-{MOST_KINDS + 9}") is not None


def test_names_are_for_reports() -> None:
    assert names_of([*tools("look", "add"), {"name": "flat"}, {"function": 3}]) == "look, add, flat"


def test_a_forgotten_agents_tools_are_forgotten() -> None:
    encoder = encoder_for("hermes")
    memory = AgentMemory(
        encoder=encoder, matcher=Matcher(encoder), book=BranchBook(max_branches=8), store=None, block_tokens=16,
        save=lambda command: None, demote=lambda branch, num_kept: None, now=lambda: 0.0,
        vocab_size=encoder.vocab_size,
    )  # fmt: skip
    memory.tools.put("a", "ada", tools("look"))
    memory.take_out("a", "ada")
    assert memory.tools.get("a", "ada") is None
    memory.check()
