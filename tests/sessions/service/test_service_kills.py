"""SIGKILLs in the middle of rounds: the session goes on, and no message is lost, doubled or out of order.

A process holds a session and says of each turn that it was told complete; it is killed at a random moment. The next one
tells what it found and goes on. `SESSION_KILLS=50` makes it fifty.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from rekindle import Engine
from rekindle_sessions.service.coordinator import Coordinator
from tests.forks import forking
from tests.sessions.service.held import NAMES, SPACE, held, holding, of_kind, plan_of, settings_in, told

NUM_KILLS = int(os.environ.get("SESSION_KILLS", "3"))
MOST_KILLS = 10  # of one session: it grows with each, and one that fills the context says nothing more
AFTER_S = 1.5  # the last of the random moments after the first turn was told


def hold(directory: Path, pipe: Connection) -> None:
    """Play rounds for ever; say what was found, and of each turn that it is complete."""

    async def play() -> None:
        with Engine(settings_in(directory)) as engine:
            async with held(engine, directory / "sessions.db") as coordinator:
                if not await coordinator.listed(SPACE):
                    await coordinator.create(SPACE, plan_of(), id="killed")
                pipe.send_bytes(json.dumps([asdict(each) for each in coordinator.messages(SPACE, "killed")]).encode())
                while True:
                    async for event in coordinator.round(SPACE, "killed"):
                        if event.kind == "turn_complete":
                            pipe.send_bytes(json.dumps([event.data["number"], event.data["text"]]).encode())

    asyncio.run(play())


def held_until(directory: Path, moment_s: float) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
    """What a process found, and what it told until it was killed."""
    context = forking()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=hold, args=(directory, theirs), daemon=True)
    process.start()
    theirs.close()
    found: list[dict[str, Any]] = json.loads(ours.recv_bytes())
    told = [json.loads(ours.recv_bytes())]
    killing = threading.Timer(moment_s, process.kill)
    killing.start()
    try:
        while True:
            told.append(json.loads(ours.recv_bytes()))
    except (EOFError, OSError):  # the pipe ends, perhaps in the middle of a message
        process.join()
        killing.join()
    return found, [(number, text) for number, text in told]


@pytest.mark.timeout(60 * NUM_KILLS + 60)
def test_no_message_is_lost_or_doubled(tmp_path: Path) -> None:
    r = random.Random(6)
    for first in range(0, NUM_KILLS, MOST_KILLS):
        _kill(tmp_path / str(first), r, min(MOST_KILLS, NUM_KILLS - first))


def _kill(directory: Path, r: random.Random, num_kills: int) -> None:
    """Kill one session so many times, then let it go on."""
    told_by_now: dict[int, str] = {}
    for number in range(num_kills):
        found, said = held_until(directory, r.uniform(0.0, AFTER_S))
        _check(found, told_by_now)
        for at, text in said:
            assert at not in told_by_now or told_by_now[at] == text, (number, at, text)
            told_by_now[at] = text

    async def finish(coordinator: Coordinator) -> None:
        messages = [asdict(each) for each in coordinator.messages(SPACE, "killed")]
        _check(messages, told_by_now)
        events = await told(coordinator.round(SPACE, "killed"))
        first, *_ = of_kind(events, "turn_complete")
        assert first["turn"] == len(messages)
        report = first["rekindle"]
        assert report["reused_tokens"] >= 0.5 * report["prompt_tokens"], report
        _check([asdict(each) for each in coordinator.messages(SPACE, "killed")], told_by_now)

    with Engine(settings_in(directory)) as engine:
        holding(engine, finish, directory / "sessions.db")
    assert len(told_by_now) >= num_kills


def _check(messages: list[dict[str, Any]], told_by_now: dict[int, str]) -> None:
    """Each turn once, in order, and all of which anybody was told."""
    assert [each["number"] for each in messages] == list(range(len(messages)))
    assert [each["turn"] for each in messages] == [None, *range(1, len(messages))]
    assert [each["by"] for each in messages[1:]] == [NAMES[at % 3] for at in range(len(messages) - 1)]
    for number, text in told_by_now.items():
        assert messages[number]["text"] == text
