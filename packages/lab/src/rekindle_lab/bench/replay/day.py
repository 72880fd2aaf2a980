"""`rekindle bench day OUT.jsonl`: a day of agents, generated from a seed, as a recording for `bench replay`.

    rekindle bench day day.jsonl --seed 7 --scale small

Three sessions that use tools share a long system prompt with the day's date and delegate to sub-agents, which share
it too; four agents talk to one another; two people chat. The day has a pause, a kill, midnight (the date in the
system prompt changes), and a restart. The same seed gives the same file. Every prompt with its longest reply fits
`--context` tokens of the bundled, small tokenizer; other tokenizers need fewer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.console import Console

from rekindle.errors import ConfigError
from rekindle.server.dayfile import Day, DayEvent, DayWriter, Header, RecordedRequest
from rekindle_lab.bench.replay.day_sessions import Scale, Session, Step, Turn, chat, counter, desk, talk

MIDNIGHT = datetime(2026, 11, 21, tzinfo=UTC)
MIN_CONTEXT = 2048
SCALES = {
    "small": Scale(4096, handbook=1000, desk_turns=15, helpers=2, chat_turns=8, rounds=4, report=240),
    "full": Scale(32768, handbook=8000, desk_turns=40, helpers=5, chat_turns=24, rounds=12, report=1000),
}
# The parts of the day, named by the event before each, and the share of every session's turns in each part.
SHARES = {"evening": 0.35, "after the pause": 0.2, "after the kill": 0.2, "after midnight": 0.1, "after the restart": 1}
PAUSE_S, BREAK_S = 1800.0, 30.0


@dataclass(frozen=True, slots=True)
class DayPlan:
    """The day to generate. `context` None: the scale's own."""

    seed: int = 0
    scale: str = "small"
    context: int | None = None

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ConfigError(f"--scale must be one of {', '.join(SCALES)}, not {self.scale!r}")
        if self.context is not None and self.context < MIN_CONTEXT:
            raise ConfigError(f"--context must be at least {MIN_CONTEXT} tokens, not {self.context}")


def make_day(plan: DayPlan) -> Day:
    """Generate the day of a plan. Deterministic."""
    scale = SCALES[plan.scale].within(plan.context)
    count = counter()
    sessions = [desk(plan.seed, number, scale, count) for number in (1, 2, 3)]
    sessions += [talk(plan.seed, scale, count)]
    sessions += [chat(plan.seed, number, scale, count) for number in (1, 2)]
    clock = _Clock(random.Random(f"{plan.seed} times"))
    requests: list[RecordedRequest] = []
    events: list[DayEvent] = []
    midnight_s = 0.0
    parts = {session.name: parts_of(session.turns) for session in sessions}
    for index, part in enumerate(SHARES):
        if part == "after the pause":
            events.append(DayEvent(clock.now, "pause", PAUSE_S))
            clock.now += PAUSE_S
        elif part in ("after the kill", "after the restart"):
            events.append(DayEvent(clock.now, "kill" if part == "after the kill" else "restart"))
        elif part == "after midnight":
            midnight_s = clock.now
        late = part in ("after midnight", "after the restart")
        date = MIDNIGHT if late else MIDNIGHT - timedelta(days=1)
        requests += clock.part([(session, parts[session.name][index]) for session in sessions], date)
    about = {"seed": plan.seed, "scale": plan.scale, "context": scale.context, "midnight_s": midnight_s}
    header = Header(MIDNIGHT.timestamp() - midnight_s, "pocket", about)
    return Day(header, tuple(sorted(requests, key=lambda request: request.at_s)), tuple(events))


class _Clock:
    """Gives every request its time; sessions run concurrently."""

    def __init__(self, chooser: random.Random) -> None:
        self._chooser = chooser
        self.now = 0.0

    def part(self, parts: Sequence[tuple[Session, Sequence[Turn]]], date: datetime) -> list[RecordedRequest]:
        """Return the requests of one part of the day, and advance the clock past the last of them."""
        requests, last = [], self.now
        for session, turns in parts:
            at = self.now + self._chooser.uniform(0, 20)
            for turn in turns:
                for step in turn:
                    requests.append(self._request(session, step, date, at))
                    at += 2 + self._chooser.uniform(0, 2)
                at += self._chooser.uniform(10, 60)
            last = max(last, at)
        self.now = round(last + BREAK_S, 1)
        return requests

    def _request(self, session: Session, step: Step, date: datetime, at: float) -> RecordedRequest:
        system = step.system.replace("{date}", f"{date:%A, %d %B %Y}")
        body = {"messages": [{"role": "system", "content": system}, *step.messages], "temperature": 0}
        body |= {"max_tokens": step.max_tokens} | ({"tools": list(step.tools)} if step.tools else {})
        reason = "tool_calls" if step.answer.get("tool_calls") else "stop"
        return RecordedRequest(
            round(at, 1),
            body,
            step.answer,
            session=session.name,
            agent=step.agent,
            headers={"x-agent-id": step.agent},
            finish_reason=reason,
        )


def parts_of(turns: Sequence[Turn]) -> list[Sequence[Turn]]:
    """Split turns into the parts of the day: at least one per part if there are enough."""
    found, taken = [], 0
    for index, share in enumerate(SHARES.values()):
        left, parts_left = len(turns) - taken, len(SHARES) - index
        count = left if parts_left == 1 else min(max(round(share * len(turns)), 1), max(left - parts_left + 1, 0))
        found.append(turns[taken : taken + count])
        taken += count
    return found


def write_day(path: Path, day: Day) -> None:
    """Write a whole day to a new file, its lines in order of time."""
    path.unlink(missing_ok=True)
    with DayWriter(path, day.header) as writer:
        items: list[RecordedRequest | DayEvent] = [*day.requests, *day.events]
        for item in sorted(items, key=lambda item: item.at_s):
            if isinstance(item, DayEvent):
                writer.event(item)
            else:
                writer.request(item)


def run_day(path: Path, plan: DayPlan, console: Console) -> int:
    """Generate and write the day, print a summary, and return 0."""
    day = make_day(plan)
    write_day(path, day)
    sessions = {request.session for request in day.requests}
    agents = {request.agent for request in day.requests}
    hours = max(request.at_s for request in day.requests) / 3600
    console.print(
        f"{path}: {len(day.requests)} requests of {len(agents)} agents in {len(sessions)} sessions over {hours:.1f} "
        f"hours; {', '.join(event.kind for event in day.events)}; {path.stat().st_size / 1e6:.1f} MB",
        soft_wrap=True,
        highlight=False,
    )
    return 0
