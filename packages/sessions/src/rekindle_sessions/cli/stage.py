"""Shows a scene on the terminal: speakers, text as it streams, what each turn reused, votes and games.

Of concurrent turns, one is shown as it streams, the others whole when they end. If the output is not a terminal, the
same is printed without colours. Owns only the text waiting to be shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape

from rekindle_sessions.scenes.scenario import Scenario
from rekindle_sessions.service.events import SessionEvent

COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "bright_red", "bright_cyan", "bright_magenta", "bright_yellow")
DOES = {"speak": "", "pick": " picks", "ballot": " votes"}


@dataclass(slots=True)
class Shown:
    """A turn that has begun: its text not yet printed, and how it ended."""

    speaker: str
    purpose: str
    to: list[str] | None
    waiting: str = ""
    is_open: bool = False  # its heading has been printed
    end: Mapping[str, Any] | None = None
    error: str | None = None


@dataclass(slots=True)
class Totals:
    """Figures of all turns."""

    num_turns: int = 0
    num_tokens: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    taken_in_tokens: int = 0
    gaps_ms: list[float] | None = None

    def add(self, end: Mapping[str, Any]) -> None:
        """Count a turn that has ended."""
        self.num_turns += 1
        self.num_tokens += end["num_tokens"]
        self.taken_in_tokens += end["taken_in_tokens"]
        report = end["rekindle"] or {"reused_tokens": 0, "prompt_tokens": 0}
        self.reused_tokens += report["reused_tokens"]
        self.computed_tokens += report["prompt_tokens"] - report["reused_tokens"]
        if end["gap_ms"] is not None:
            self.gaps_ms = [*(self.gaps_ms or ()), end["gap_ms"]]

    def summary(self) -> str:
        """The totals in one line."""
        prompts = self.reused_tokens + self.computed_tokens
        parts = [
            f"{self.num_turns:,} turns, {self.num_tokens:,} tokens generated",
            f"of {prompts:,} tokens of prompts {self.reused_tokens:,} reused, {self.computed_tokens:,} computed",
        ]
        if self.taken_in_tokens:
            parts.append(f"{self.taken_in_tokens:,} prefilled while others spoke")
        if self.gaps_ms:
            parts.append(f"median gap {median(self.gaps_ms):.0f} ms")
        return "; ".join(parts)


class Stage:
    """Shows the events of one scene, in order."""

    def __init__(self, scenario: Scenario, console: Console) -> None:
        self.totals = Totals()
        self._console = console
        self._host = scenario.plan.host
        names = [each.name for each in scenario.plan.participants]
        self._colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}
        self._turns: dict[int, Shown] = {}

    def show(self, event: SessionEvent) -> None:
        """Print an event, now or once earlier turns are printed."""
        data = event.data
        match event.kind:
            case "scene":
                self._begin(data["layout"])
            case "phase":
                self._print(f"\n[bold]── {escape(data['name'])}[/] [dim]{escape(', '.join(data['agents']))}[/]")
            case "message":
                self._message(data["utterance"])
            case "turn_start":
                self._turns[data["turn"]] = Shown(data["speaker"], data["purpose"], data["to"])
                self._print_turns()
            case "token":
                self._turns[data["turn"]].waiting += data["text"]
                self._print_turns()
            case "turn_complete":
                self.totals.add(data)
                self._turns[data["turn"]].end = data
                self._print_turns()
            case "turn_failed":
                self._turns[data["turn"]].error = data["error"]
                self._print_turns()
            case "decision":
                self._print(f"[bold]→ {escape(decision_line(data))}[/]")
            case "scores":
                self._print(f"[bold]→ {escape(scores_line(data))}[/]")
            case "outcome":
                self._outcome(data["verdicts"])
            case "error":
                self._print(f"[red]{escape(data['message'])}[/]")

    def stop(self) -> None:
        """End the current line."""
        if any(turn.is_open for turn in self._turns.values()):
            self._console.print()
        self._turns.clear()

    def _begin(self, layout: Mapping[str, Any]) -> None:
        if not layout["extends"]:
            lost = f"{layout['lost_share']:.0%} of a growing prompt is computed again"
            self._print(f"[dim]This model's template does not let prompts only grow ({layout['why']}): {lost}.[/]")

    def _message(self, utterance: Mapping[str, Any]) -> None:
        heading = self._heading(utterance["by"], "speak", utterance["to"])
        self._print(f"{heading} {escape(utterance['text'])}")

    def _heading(self, by: str, purpose: str, to: list[str] | None) -> str:
        style = f"bold {self._colours[by]}" if by in self._colours else "bold"
        return f"[{style}]{escape(by)}[/]{DOES[purpose]}{escape(audience(to) if purpose == 'speak' else '')}:"

    def _print_turns(self) -> None:
        """Print turns in order: those that have ended, then the text so far of the first that has not."""
        for number, turn in list(self._turns.items()):
            if not turn.is_open:
                self._console.print(self._heading(turn.speaker, turn.purpose, turn.to), end=" ", highlight=False)
                turn.is_open = True
            if turn.waiting:
                self._console.print(
                    turn.waiting, end="", markup=False, highlight=False, soft_wrap=True, style=_style(turn)
                )
                turn.waiting = ""
            if turn.end is None and turn.error is None:
                return
            self._console.print()
            line = figures(turn.end) if turn.end is not None else f"could not speak: {turn.error}"
            self._print(f"  [dim]{escape(line)}[/]")
            del self._turns[number]

    def _outcome(self, verdicts: list[dict[str, Any]]) -> None:
        if verdicts:
            self._print("\n[bold]── outcome[/]")
        for verdict in verdicts:
            sign = "" if not verdict["of"] else "[green]✓[/] " if verdict["holds"] else "[red]✗[/] "
            self._print(f"{sign}{escape(verdict['text'])}")
        self._print(f"\n[dim]{escape(self.totals.summary())}[/]")

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def _style(turn: Shown) -> str:
    return "italic" if turn.to is not None and turn.purpose == "speak" else ""


def audience(to: list[str] | None) -> str:
    """The addressees of a message, if not all agents."""
    if to is None:
        return ""
    if not to:
        return " (to the host alone)"
    return f" (whispers to {to[0]})" if len(to) == 1 else f" (to {', '.join(to)})"


def figures(end: Mapping[str, Any]) -> str:
    """Figures of a turn: the share of its prompt that was reused, the time to its first token, the gap before it."""
    report = end["rekindle"]
    parts = []
    if report is not None and report["prompt_tokens"]:
        share = report["reused_tokens"] / report["prompt_tokens"]
        parts.append(f"{share:.0%} of {report['prompt_tokens']:,} tokens reused")
    if end["first_token_ms"] is not None:
        parts.append(f"first token after {end['first_token_ms']:.0f} ms")
    if end["gap_ms"] is not None:
        parts.append(f"gap {end['gap_ms']:.0f} ms")
    if end["cut"]:
        parts.append("interrupted")
    return ", ".join(parts)


def decision_line(decision: Mapping[str, Any]) -> str:
    """The outcome of a vote, with the last count, ties and abstentions."""
    question = decision["question"]
    if question["mode"] == "moves":
        made = (f"{each['voter']}: {each['ranking'][0] if each['ranking'] else '–'}" for each in decision["ballots"])
        return f"moves: {', '.join(made)}"
    votes = decision["counts"][-1]["votes"] if decision["counts"] else []
    counted = ", ".join(f"{option} {count}" for option, count in votes)
    outcome = f"decided: {decision['outcome']}" if decision["outcome"] is not None else "nothing decided"
    parts = [outcome, question["mode"], counted]
    if decision["tied"]:
        parts.append(f"tied: {', '.join(decision['tied'])}")
    if decision["abstained"]:
        parts.append(f"abstained: {', '.join(decision['abstained'])}")
    return "; ".join(part for part in parts if part)


def scores_line(data: Mapping[str, Any]) -> str:
    """Points of a round of a game, and in total."""
    shown = (f"{name} +{more} = {data['scores'][name]}" for name, more in data["points"].items())
    return f"round {data['round']}: {', '.join(shown)}"
