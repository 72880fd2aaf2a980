"""The demo's script: a shared handbook, facts drawn from a seed, and questions about them.

It is the same for every model. Only the bundled one was trained to answer it, so recall is shown, never judged.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from rekindle.errors import ConfigError
from rekindle.pocket import MISSING

try:
    from rekindle_pocket import conversations
except ModuleNotFoundError:
    raise ConfigError(f"{MISSING}, which has the demo's facts") from None

HANDBOOK_SENTENCES = 190  # about 1,700 tokens; every agent's system prompt, word for word
AGENTS = ("Alice", "Bob", "Carla", "Dmitri")


@dataclass(frozen=True, slots=True)
class Line:
    """One user message; `wanted` is the right answer if it asks for a fact."""

    text: str
    wanted: str | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One agent's lines before the restart and after it."""

    agent: str
    before: tuple[Line, ...]
    after: tuple[Line, ...]


def system_prompt(seed: int) -> str:
    """Return the long system prompt shared by all agents."""
    r = random.Random(f"{seed} handbook")
    return conversations.system_prompt(r, conversations.Memory("Nadia", "archivist"), HANDBOOK_SENTENCES)


def part(agent: str, seed: int) -> Part:
    """Return an agent's lines: state two facts and ask one; after the restart ask the other, state a third, ask it."""
    r = random.Random(f"{seed} {agent}")
    memory = conversations.Memory("Nadia", "archivist")
    facts: list[tuple[str, str]] = []
    while len(facts) < 3:
        subject, text = conversations.fact(r, memory)
        if subject not in memory.facts:
            memory.learn(subject, conversations.sentence(text))
            facts.append((subject, text))

    def state(index: int) -> Line:
        return Line(f"Remember that {facts[index][1]}.")

    def ask(index: int) -> Line:
        subject = facts[index][0]
        return Line(conversations.question(subject), wanted=conversations.answer(memory, subject))

    return Part(agent, (state(0), state(1), ask(0)), (ask(1), state(2), ask(2)))
