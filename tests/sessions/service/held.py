"""Sessions held in tests: short replies of the bundled model, greedy, never ended by the model itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from rekindle import Engine
from rekindle.config import Settings
from rekindle_sessions.log.records import SessionRecords
from rekindle_sessions.machine.types import Participant, Plan, Topology
from rekindle_sessions.service.coordinator import Coordinator, SessionEvent
from tests.given import settings_of

T = TypeVar("T")
NAMES = ("Ada", "Ben", "Cleo")
SPACE = "default"
SHORT: tuple[tuple[str, Any], ...] = (("max_tokens", 6), ("temperature", 0), ("ignore_eos", True))


def settings_in(directory: Path, **more: Any) -> Settings:
    """Settings over a store in `directory`; idle work is off, so that what is computed is what was asked."""
    given = {"store": directory, "threads": 1, "hot_bytes": "64MiB", "anticipate": "off", "block_tokens": 16}
    return settings_of(**{**given, **more})


def plan_of(*names: str, topology: Topology = "round_robin", **more: Any) -> Plan:
    """A plan for these names (none: three)."""
    agents = tuple(Participant(name, f"{name} likes short words.") for name in names or NAMES)
    fields = {"setting": "Some friends meet in the garden and talk.", "sampling": SHORT, **more}
    return Plan(agents, topology=topology, **fields)


@asynccontextmanager
async def held(engine: Engine, path: Path | None = None) -> AsyncIterator[Coordinator]:
    """A coordinator over the sessions in `path`, checked when it ends."""
    with closing(SessionRecords.open(path)) as records:
        coordinator = Coordinator(engine, records)
        try:
            await coordinator.start()
            yield coordinator
            coordinator.check()
        finally:
            await coordinator.close()
        engine.check()


def holding(engine: Engine, play: Callable[[Coordinator], Awaitable[T]], path: Path | None = None) -> T:
    """What `play` returns, over a coordinator of its own."""

    async def run() -> T:
        async with held(engine, path) as coordinator:
            return await play(coordinator)

    return asyncio.run(run())


async def told(events: AsyncGenerator[SessionEvent, None]) -> list[SessionEvent]:
    """All of a run."""
    async with aclosing(events):
        return [event async for event in events]


def of_kind(events: list[SessionEvent], kind: str) -> list[dict[str, Any]]:
    """What the events of one kind say."""
    return [event.data for event in events if event.kind == kind]


def stored_texts(engine: Engine, agent: str) -> list[str]:
    """What the branches of an agent spell."""
    branches = engine.components.intake.call(lambda: engine.components.memory.know_agent(SPACE, agent)).result()
    return [engine.encoder.decode(branch.ids) for branch in branches]


@contextmanager
def busy_disk(coordinator: Coordinator) -> Iterator[None]:
    """Within this context nothing becomes durable."""
    released = Event()
    coordinator.shared.writer.submit(released.wait)
    try:
        yield
    finally:
        released.set()


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for something that nobody tells of."""
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.001)  # not 0, which would take a whole core from the engine
