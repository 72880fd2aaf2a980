"""A scene as Markdown: messages and their addressees, votes, games and the outcome, with the figures of each turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle_sessions.cli.stage import DOES, audience, decision_line, figures, scores_line
from rekindle_sessions.scenes.scenario import Scenario
from rekindle_sessions.service.events import SessionEvent


class Transcript:
    """Collects the events of one scene; turns that are incomplete when it stops are not included."""

    def __init__(self, scenario: Scenario) -> None:
        self._parts = [f"# {scenario.title}", scenario.about]
        for each in scenario.plan.participants:
            role = f", {each.role}" if each.role else ""
            self._parts.append(f"- {each.name}{role}")

    def add(self, event: SessionEvent) -> None:
        """Note an event, if it has content for a reader."""
        data = event.data
        match event.kind:
            case "phase":
                self._parts.append(f"## {data['name']}")
            case "message":
                message = data["utterance"]
                self._parts.append(_entry(message["by"], "speak", message["to"], message["text"]))
            case "turn_complete":
                entry = _entry(data["speaker"], data["purpose"], data["to"], data["text"])
                self._parts.append(f"{entry}\n\n<sub>{figures(data)}</sub>")
            case "turn_failed":
                self._parts.append(f"*{data['speaker']} could not speak: {data['error']}*")
            case "decision":
                self._parts.append(f"> {decision_line(data)}")
            case "scores":
                self._parts.append(f"> {scores_line(data)}")
            case "outcome":
                self._outcome(data["verdicts"])

    def text(self, totals: str) -> str:
        """The whole document so far; `totals` is its last line."""
        return "\n\n".join([*self._parts, f"<sub>{totals}</sub>"]) + "\n"

    def _outcome(self, verdicts: list[Mapping[str, Any]]) -> None:
        if verdicts:
            self._parts.append("## Outcome")
        for verdict in verdicts:
            sign = "" if not verdict["of"] else "✓ " if verdict["holds"] else "✗ "
            self._parts.append(f"- {sign}{verdict['text']}")


def _entry(by: str, purpose: str, to: list[str] | None, text: str) -> str:
    heading = f"**{by}**{DOES[purpose]}{audience(to) if purpose == 'speak' else ''}:"
    return f"{heading} {text}"
