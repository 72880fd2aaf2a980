"""One replica of `benchmarks.tier.agents`, in a process of its own: lets agents speak, exports, says what was stored.

    python -m benchmarks.tier.talker < PLAN

Its plan is a line of JSON on standard input. It writes a line when its model is loaded, one after each round, and waits
for a line before each, so that all replicas begin a round together. At the end it writes what it did, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.tier.replicas import export, replica
from rekindle.engine.api import Engine
from rekindle.engine.generation import Generation

AT_ONCE = 8
FIGURES = ("exported_heads", "exported_objects", "exported_bytes", "head_conflicts", "imported_objects", "failures")
NAMESPACE = "default"
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a replica does: in each round every agent named in it gets a message, and answers with `tokens` tokens."""

    flags: dict[str, Any]
    directory: str
    slot: int
    system: dict[str, str]  # of each agent
    rounds: list[dict[str, str]]
    tokens: int


@dataclass(slots=True)
class Done:
    """What a replica did: each agent's messages, the ids stored after each turn, figures of its tier."""

    messages: dict[str, Messages] = field(default_factory=dict)
    texts: dict[str, list[list[int]]] = field(default_factory=dict)
    figures: dict[str, int] = field(default_factory=dict)


class Talker:
    """Lets the agents of a plan speak, several at once."""

    def __init__(self, engine: Engine, plan: Plan) -> None:
        self._engine = engine
        self._plan = plan
        self._under_way: deque[tuple[str, Generation]] = deque()
        self.done = Done()

    def round(self, number: int) -> None:
        """Let every agent of a round speak; return once all of it is exported."""
        for agent, text in self._plan.rounds[number].items():
            if len(self._under_way) == AT_ONCE:
                self._finish()
            system = {"role": "system", "content": self._plan.system[agent]}
            messages = self.done.messages.setdefault(agent, [system])
            messages.append({"role": "user", "content": text})
            stream = self._engine.stream(agent, messages, temperature=0.0, max_tokens=self._plan.tokens)
            self._under_way.append((agent, stream))
        while self._under_way:
            self._finish()
        export(self._engine)
        for agent, ids in self._engine.components.intake.call(self._stored).result().items():
            self.done.texts.setdefault(agent, []).append(ids)

    def _stored(self) -> dict[str, list[int]]:
        """Return the ids of each agent's latest text; on the intake thread."""
        memory = self._engine.components.memory
        known = {agent: memory.know_agent(NAMESPACE, agent)[0] for agent in self.done.messages}
        return {agent: branch.ids.tolist() for agent, branch in known.items()}

    def _finish(self) -> None:
        agent, stream = self._under_way.popleft()
        self.done.messages[agent].append({"role": "assistant", "content": stream.result().text})


def main() -> None:
    """Carry out the plan on standard input."""
    plan = Plan(**json.loads(sys.stdin.readline()))
    with replica(plan.flags, Path(plan.directory), plan.slot, Path(plan.directory) / "tier") as engine:
        talker = Talker(engine, plan)
        for number in range(len(plan.rounds)):
            print("ready", flush=True)
            sys.stdin.readline()
            talker.round(number)
        tier = engine.stats().tier
        assert tier is not None, "a replica has a tier"
        talker.done.figures = {name: tier[name] for name in FIGURES}
    print(json.dumps(asdict(talker.done)), flush=True)


if __name__ == "__main__":
    main()
