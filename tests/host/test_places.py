"""Which models are loaded: who is let in when, what is left for whom, and what follows from a process that fails."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from rekindle.errors import BackendFailed, Overloaded, Unavailable
from rekindle_models.figures import Figures
from rekindle_models.named import Model
from rekindle_models.places import Places

A, B, C = (Model(name, frozenset(), {}, keep_alive_s=math.inf) for name in "abc")


@dataclass
class Processes:
    """Processes that are threads' events: a start waits for `may_start`, and what happened is in `seen`."""

    seen: list[str] = field(default_factory=list)
    may_start: threading.Event = field(default_factory=threading.Event)
    broken: set[str] = field(default_factory=set)
    ended: dict[str, Callable[[], None]] = field(default_factory=dict)
    num_up: int = 0
    most_up: int = 0

    def new(self, model: Model, ended: Callable[[], None]) -> Scripted:
        self.ended[model.name] = ended
        return Scripted(self, model.name)


@dataclass
class Scripted:
    """One of them."""

    processes: Processes
    name: str
    url: str = "http://127.0.0.1:1"
    is_up: bool = False
    is_stopped: bool = False

    def start(self) -> None:
        assert self.processes.may_start.wait(60)
        if self.name in self.processes.broken or self.is_stopped:
            raise BackendFailed(f"{self.name} says no")
        self.is_up = True
        self.processes.num_up += 1
        self.processes.most_up = max(self.processes.most_up, self.processes.num_up)
        self.processes.seen.append(f"+{self.name}")

    def stop(self) -> None:
        self.is_stopped = True
        if self.is_up:
            self.is_up = False
            self.processes.num_up -= 1
            self.processes.seen.append(f"-{self.name}")

    def problem(self) -> str | None:
        return None if self.is_up else f"{self.name} was ended"


def played(play: Callable[[Places, Processes], Awaitable[None]], **limits: int) -> Processes:
    """What happened to the processes of a play, which are all closed at its end."""
    processes = Processes()
    processes.may_start.set()

    async def run() -> None:
        bounds = {"max_loaded": 1, "max_waiting": 8, **limits}
        places = Places(processes.new, figures=Figures(), **bounds)
        try:
            await asyncio.wait_for(play(places, processes), 20)
            places.check()
        finally:
            await places.close()
            places.check()

    asyncio.run(run())
    assert processes.num_up == 0
    return processes


async def asking(places: Places, model: Model, log: list[str], until: asyncio.Event | None = None) -> None:
    async with places.held(model):
        log.append(model.name)
        if until is not None:
            await until.wait()


async def settled(look: Callable[[], bool]) -> None:
    while not look():
        await asyncio.sleep(0.001)


def test_requests_are_served_in_order_and_those_for_one_model_together() -> None:
    log: list[str] = []

    async def play(places: Places, processes: Processes) -> None:
        done = asyncio.Event()
        first = asyncio.ensure_future(asking(places, A, log, done))
        await settled(lambda: log == ["a"])
        others = [asyncio.ensure_future(asking(places, model, log)) for model in (B, A, B, A)]
        await settled(lambda: places.num_waiting == 4)
        assert log == ["a"] and processes.seen == [
            "+a"
        ]  # a running request is not cut off, and nobody is let in past B
        places.check()
        done.set()
        await asyncio.gather(first, *others)

    processes = played(play)
    assert log == ["a", "b", "b", "a", "a"]
    assert processes.seen == ["+a", "-a", "+b", "-b", "+a", "-a"] and processes.most_up == 1


def test_the_model_that_was_idle_longest_yields() -> None:
    async def play(places: Places, processes: Processes) -> None:
        for model in (A, B, A, C):
            await asking(places, model, [])
        await settled(lambda: [place.model.name for place in places.ready()] == ["a", "c"])

    processes = played(play, max_loaded=2)
    assert processes.seen[:4] == ["+a", "+b", "-b", "+c"] and processes.most_up == 2


def test_one_that_is_loaded_is_not_kept_waiting_by_a_start_in_another_place() -> None:
    log: list[str] = []

    async def play(places: Places, processes: Processes) -> None:
        await asking(places, A, log)
        processes.may_start.clear()
        slow = asyncio.ensure_future(asking(places, B, log))
        await settled(lambda: places.state_of(B) == "starting")
        await asking(places, A, log)
        processes.may_start.set()
        await slow

    played(play, max_loaded=2)
    assert log == ["a", "a", "b"]


def test_a_model_is_left_when_it_was_idle_for_as_long_as_it_is_kept() -> None:
    async def play(places: Places, processes: Processes) -> None:
        async with places.held(A) as place:
            places.keep(A, 0.01)
            assert places.expires_in(place) == 0.01  # from the end of the request on
            assert not await places.leave(A)  # not while one runs
            places.keep(A, 0.01)
        await place.gone.wait()
        assert processes.seen == ["+a", "-a"] and places.state_of(A) is None
        await asking(places, A, [])
        (place,) = places.ready()
        assert places.expires_in(place) is None  # the next start is kept as its settings say
        assert await places.leave(A)

    played(play)


def test_no_tenant_ends_a_model_for_another() -> None:
    async def play(places: Places, processes: Processes) -> None:
        async with places.held(A, by="mine"):
            pass
        async with places.held(A, by="theirs"):
            places.keep(A, 0.0, by="theirs")
        assert not await places.leave(A, by="theirs")
        (place,) = places.ready()
        assert places.expires_in(place) is None, "as the one wants it"
        assert not await places.leave(A, by="a third one")
        assert await places.leave(A, by="mine"), "the last one who wanted it"
        for by in ("mine", "theirs"):
            async with places.held(A, by=by):
                pass
        assert await places.leave(A, by=None), "an admin may"
        assert processes.seen == ["+a", "-a"] * 2

    played(play)


def test_a_start_that_fails_is_the_answer_for_a_while_and_harms_no_other() -> None:
    async def play(places: Places, processes: Processes) -> None:
        processes.broken.add("b")
        both = await asyncio.gather(*(asking(places, B, []) for _ in range(2)), return_exceptions=True)
        assert [str(error) for error in both] == ["model 'b' cannot be started: b says no"] * 2
        with pytest.raises(BackendFailed, match="b says no; it is not tried again for"):
            await asking(places, B, [])
        await asking(places, A, [])

    assert played(play).seen == ["+a", "-a"]


def test_one_that_ends_by_itself_is_started_again_when_it_is_asked_for() -> None:
    async def play(places: Places, processes: Processes) -> None:
        async with places.held(A) as place:
            processes.ended["a"]()
            await place.gone.wait()
        assert places.ready() == []
        await asking(places, A, [])

    assert played(play).seen == ["+a", "-a", "+a", "-a"]


def test_too_many_that_wait_are_refused_and_who_leaves_is_forgotten() -> None:
    async def play(places: Places, processes: Processes) -> None:
        async with places.held(A):
            waiting = asyncio.ensure_future(asking(places, B, []))
            await settled(lambda: places.num_waiting == 1)
            with pytest.raises(Overloaded):
                await asking(places, B, [])
            waiting.cancel()
            await settled(lambda: places.num_waiting == 0)
            await asking(places, A, [])  # nobody is in the way any more
        assert processes.seen == ["+a"]

    played(play, max_waiting=1)


def test_who_waits_when_the_server_stops_is_refused() -> None:
    refused: list[object] = []

    async def play(places: Places, processes: Processes) -> None:
        processes.may_start.clear()
        waiting = asyncio.ensure_future(asking(places, A, []))
        await settled(lambda: places.state_of(A) == "starting")
        closing = asyncio.ensure_future(places.close())
        refused.extend(await asyncio.gather(waiting, return_exceptions=True))
        processes.may_start.set()
        await closing

    played(play)
    assert isinstance(refused[0], Unavailable)
