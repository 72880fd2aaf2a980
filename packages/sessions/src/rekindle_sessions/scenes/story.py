"""History of a scene so far: words, decisions, moves and points, and the values its texts may use.

Owns the scores and the data that rules evaluate. Knows no session: the player reports to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle_sessions.machine.decisions import Decision
from rekindle_sessions.scenes.games import Game, number


@dataclass(frozen=True, slots=True)
class Line:
    """Something an agent said in a phase, to any audience."""

    phase: str
    by: str
    text: str


class Story:
    """Updated phase by phase; `values` returns what a text may use now."""

    def __init__(self, variables: Mapping[str, Any], agents: Iterable[str]) -> None:
        self._variables = dict(variables)
        self.lines: list[Line] = []
        self.decisions: dict[str, Decision] = {}
        self.scores: dict[str, float] = dict.fromkeys(agents, 0.0)
        self.moves: dict[str, str | None] = {}

    def said(self, phase: str, by: str, text: str) -> None:
        """Record what an agent said."""
        self.lines.append(Line(phase, by, text))

    def decided(self, phase: str, decision: Decision) -> None:
        """Record the decision of a phase's vote."""
        self.decisions[phase] = decision

    def moved(self, game: Game, players: tuple[str, ...], decision: Decision) -> dict[str, float]:
        """Record a round of a game: add its points to the scores and return them."""
        made = {ballot.voter: ballot.ranking[0] for ballot in decision.ballots if ballot.ranking}
        self.moves = {name: made.get(name, game.default) for name in players}
        points = dict(zip(players, game.points(tuple(self.moves.values())), strict=True))
        for name, more in points.items():
            self.scores[name] += more
        return points

    def values(self, **more: Any) -> dict[str, Any]:
        """Return variables, `decisions`, `scores`, `words` (each agent's last) and `agents`."""
        words = dict.fromkeys(self.scores, "")
        words |= {line.by: line.text for line in self.lines}
        return {
            **self._variables,
            "agents": list(self.scores),
            "decisions": {phase: _shown(decision) for phase, decision in self.decisions.items()},
            "scores": {name: number(score) for name, score in self.scores.items()},
            "words": words,
            **more,
        }


def _shown(decision: Decision) -> dict[str, Any]:
    """Return a decision as texts see it: `tally` is the last count."""
    return {
        "outcome": decision.outcome,
        "tally": dict(decision.counts[-1].votes) if decision.counts else {},
        "tied": list(decision.tied),
        "abstained": list(decision.abstained),
        "num_rounds": decision.num_rounds,
    }
