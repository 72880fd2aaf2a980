"""`rekindle bench replay DAY.jsonl --against URL`: replay a recorded day against any OpenAI-compatible server.

    rekindle bench day day.jsonl --seed 7
    rekindle bench replay day.jsonl --against http://127.0.0.1:7354 --restart-cmd './again.sh' --out replay.jsonl

Sessions run concurrently, as recorded; within a session a request follows the previous answer after the recorded think
time, divided by `speed`. A pause, restart or kill waits for all sessions, and all sessions wait for it.
docs/replay.md describes the modes and how to restart servers.
"""

from __future__ import annotations

import math
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rekindle.errors import ConfigError, RekindleError
from rekindle.server.dayfile import Day, DayEvent, RecordedRequest
from rekindle_lab.bench.replay.chats import as_chat
from rekindle_lab.bench.replay.client import START_S, Answer, OpenAIServer
from rekindle_lab.bench.replay.live import LiveReplies, Mode


@dataclass(frozen=True, slots=True)
class Pace:
    """How to replay a day: `speed` times as fast as recorded (inf: no think time), mode, and commands.

    A command is run by the shell and must return once the old server is gone; None skips such events.
    """

    speed: float = 100.0
    mode: Mode = "live"
    restart_cmd: str | None = None
    kill_cmd: str | None = None

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise ConfigError(f"--speed must be above 0 (inf: no think time), not {self.speed}")

    def command(self, event: DayEvent) -> str | None:
        """Return the command for an event; a kill without its own command uses the restart command."""
        return self.restart_cmd if event.kind == "restart" else self.kill_cmd or self.restart_cmd


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request of the day and its answer; `sent` is the body, `after` the last restart or kill that was executed.

    `since_s`: recorded seconds since that event.
    """

    request: RecordedRequest
    sent: dict[str, Any]
    answer: Answer
    after: str | None = None
    since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EventOutcome:
    """An event of the day; `seconds` until the server answered again, None if it was skipped."""

    event: DayEvent
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Replayed:
    """A whole replay: exchanges in recorded order, events, and counts of live and recorded replies in prompts."""

    exchanges: tuple[Exchange, ...]
    events: tuple[EventOutcome, ...]
    num_replaced: int
    num_kept: int
    num_skipped: int
    wall_s: float


class Replay:
    """Replays one day against one server."""

    def __init__(
        self,
        day: Day,
        server: OpenAIServer,
        pace: Pace,
        *,
        on_answer: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._server = server
        self._pace = pace
        self._on_answer = on_answer
        self._clock = clock
        self._sleep = sleep
        self._events = day.events
        self.requests = tuple(chat for request in day.requests if (chat := as_chat(request)) is not None)
        self._num_skipped = len(day.requests) - len(self.requests)
        self._live = {request.session: LiveReplies(pace.mode) for request in self.requests}
        self._lock = threading.Lock()
        self._exchanges: list[Exchange] = []
        self._last: DayEvent | None = None

    def run(self) -> Replayed:
        """Replay the whole day; RekindleError if the server does not come back after an event."""
        began = self._clock()
        outcomes = []
        start_s = ready_s = 0.0
        for event in (*self._events, None):
            end_s = math.inf if event is None else event.at_s
            self._stretch([request for request in self.requests if start_s <= request.at_s < end_s], ready_s)
            if event is not None:
                outcomes.append(EventOutcome(event, self._happen(event)))
                start_s, ready_s = event.at_s, event.at_s + event.seconds
        exchanges = sorted(self._exchanges, key=lambda item: item.request.at_s)
        live = self._live.values()
        replaced, kept = sum(item.num_replaced for item in live), sum(item.num_kept for item in live)
        return Replayed(tuple(exchanges), tuple(outcomes), replaced, kept, self._num_skipped, self._clock() - began)

    def _stretch(self, requests: Sequence[RecordedRequest], ready_s: float) -> None:
        """Send the requests between two events, each session in a thread, starting at recorded second `ready_s`."""
        sessions = sorted(requests, key=lambda request: request.session)
        chains = [list(chain) for _, chain in groupby(sessions, key=lambda request: request.session)]
        if not chains:
            return
        with ThreadPoolExecutor(len(chains), thread_name_prefix="session") as threads:
            for done in [threads.submit(self._chain, chain, ready_s) for chain in chains]:
                done.result()

    def _chain(self, requests: Sequence[RecordedRequest], ready_s: float) -> None:
        live = self._live[requests[0].session]
        for request in requests:
            self._sleep(max(request.at_s - ready_s, 0.0) / self._pace.speed)
            body = live.body(request)
            answer = self._server.chat(body, headers=request.headers)
            if answer.error is None:
                live.answered(request, answer.message)
            ready_s = request.at_s + request.duration_s
            since_s = request.at_s - self._last.at_s if self._last else 0.0
            with self._lock:
                after = self._last.kind if self._last else None
                self._exchanges.append(Exchange(request, body, answer, after, since_s))
                self._on_answer()

    def _happen(self, event: DayEvent) -> float | None:
        if event.kind == "pause":
            self._sleep(event.seconds / self._pace.speed)
            return event.seconds / self._pace.speed
        command = self._pace.command(event)
        if command is None:
            return None
        began = self._clock()
        run_command(command)
        self._server.wait_answering()
        self._last = event
        return self._clock() - began


def run_command(command: str) -> None:
    """Run an operator's command in the shell; RekindleError if it fails or does not return."""
    try:
        done = subprocess.run(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=START_S,
        )
    except subprocess.TimeoutExpired:
        message = f"{command!r} did not return: start the server in the background, with its output in a file"
        raise RekindleError(message) from None
    if done.returncode:
        raise RekindleError(f"{command!r} ended with exit code {done.returncode}")
