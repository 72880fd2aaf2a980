"""What the demo's agents say: a shared handbook, facts drawn from a seed, and questions about them.

The same script for every model. Only the bundled one was trained to answer it, so recall is shown, never judged.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from rekindle.pocket import conversations

HANDBOOK_SENTENCES = 190  # about 1,700 tokens; every agent's system prompt, word for word
AGENTS = ("Alice", "Bob", "Carla", "Dmitri")


@dataclass(frozen=True, slots=True)
class Line:
    """One user message; `wanted` is the right answer where a fact is asked for."""

    text: str
    wanted: str | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One agent's lines before the restart and after it."""

    agent: str
    before: tuple[Line, ...]
    after: tuple[Line, ...]


def system_prompt(seed: int) -> str:
    """The long system prompt that all agents have in common."""
    r = random.Random(f"{seed} handbook")
    return conversations.system_prompt(r, conversations.Memory("Nadia", "archivist"), HANDBOOK_SENTENCES)


def part(agent: str, seed: int) -> Part:
    """Two facts told and one asked, then, after the restart, the other asked, a third told, the first asked again."""
    r = random.Random(f"{seed} {agent}")
    memory = conversations.Memory("Nadia", "archivist")
    facts: list[tuple[str, str]] = []
    while len(facts) < 3:
        subject, text = conversations.fact(r, memory)
        if subject not in memory.facts:
            memory.learn(subject, conversations.sentence(text))
            facts.append((subject, text))

    def tell(index: int) -> Line:
        return Line(f"Remember that {facts[index][1]}.")

    def ask(index: int) -> Line:
        subject = facts[index][0]
        return Line(conversations.question(subject), wanted=conversations.answer(memory, subject))

    return Part(agent, (tell(0), tell(1), ask(0)), (ask(1), tell(2), ask(2)))
