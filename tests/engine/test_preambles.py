"""System texts and tools of agents are kept once each, within bounds, and forgotten with their agent."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.engine.memory.branches import BranchBook
from rekindle.engine.memory.memory import AgentMemory
from rekindle.engine.memory.preambles import MOST_AGENTS, MOST_SYSTEMS, MOST_TOOLS, Preamble, Preambles, names_of
from rekindle.matching.matcher import Matcher
from rekindle.text.messages import Message
from tests.text.families import encoder_for


def tools(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "parameters": {}}} for name in names]


def preamble(*names: str, system: str = "You help.") -> Preamble:
    return Preamble((system,), tools(*names))


def test_the_last_preamble_of_an_agent_is_its_preamble() -> None:
    kept = Preambles()
    kept.put("a", "ada", preamble("look"))
    kept.put("a", "eve", preamble("look", system="You look."))
    kept.put("b", "ada", preamble("add"))
    ada, eve = kept.get("a", "ada"), kept.get("a", "eve")
    assert ada == preamble("look") and eve == preamble("look", system="You look.")
    assert ada is not None and eve is not None and ada.tools is eve.tools, "equal ones are kept once"
    assert kept.get("b", "ada") == preamble("add") and kept.get("b", "eve") is None
    kept.put("a", "ada", preamble("look", "add"))
    assert kept.get("a", "ada") == preamble("look", "add") and kept.get("a", "eve") == eve
    kept.drop("a", "ada")
    kept.drop("a", "nobody")
    assert kept.get("a", "ada") is None
    kept.check()


@pytest.mark.parametrize(("what", "most"), [("tools", MOST_TOOLS), ("system", MOST_SYSTEMS)])
def test_many_agents_and_many_kinds_push_out_the_oldest(what: str, most: int) -> None:
    kept = Preambles()
    for number in range(MOST_AGENTS + 10):
        kept.put("a", f"agent-{number}", preamble("look"))
    kept.check()
    assert kept.get("a", "agent-9") is None and kept.get("a", "agent-10") is not None
    for number in range(most + 10):
        other = preamble(f"tool-{number}") if what == "tools" else preamble("look", system=f"You are {number}.")
        kept.put("b", f"other-{number}", other)
    kept.check()
    assert kept.get("b", "other-9") is None and kept.get("b", f"other-{most + 9}") is not None


def test_names_are_for_reports() -> None:
    assert names_of([*tools("look", "add"), {"name": "flat"}, {"function": 3}]) == "look, add, flat"


def test_a_forgotten_agents_preamble_is_forgotten() -> None:
    encoder = encoder_for("hermes")
    memory = AgentMemory(
        encoder=encoder, matcher=Matcher(encoder), book=BranchBook(max_branches=8), store=None, block_tokens=16,
        save=lambda command: None, demote=lambda branch, num_kept: None, now=lambda: 0.0,
        vocab_size=encoder.vocab_size,
    )  # fmt: skip
    memory.preambles.put("a", "ada", preamble("look"))
    memory.histories.put("a", "ada", [Message("user", "Look.")])
    memory.take_out("a", "ada")
    assert memory.preambles.get("a", "ada") is None and not memory.histories.get("a", "ada")
    memory.check()
