"""Which models are loaded: a bounded number of places, who waits for one, and when a model is left.

Owns the places, the order of waiting requests and the timers, on one event loop; starts and ends run in threads.

    (none) ──asked for──▶ starting ──▶ ready ──idle too long, or another needs the place──▶ ending ──▶ (none)
                              └──failed──▶ (none)        └──────── ended by itself ────────────────────▶

Requests are served in the order in which they came, and those that wait for a model when it becomes ready go together:
two models that are asked for in turn are not swapped at every request, and none waits forever. A model with a request
is never left. One that could not be started is not tried again for a while.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rekindle.errors import BackendFailed, Overloaded, RekindleError, Unavailable
from rekindle_models.figures import Figures
from rekindle_models.named import Model, expires_in

logger = logging.getLogger("rekindle.server")
RETRY_S = 10.0  # what clients are asked to wait where too many do
AGAIN_S = 30.0  # until a model that could not be started is tried again
State = Literal["starting", "ready", "ending"]


class Process(Protocol):
    """What serves a model; `start` and `stop` wait."""

    @property
    def url(self) -> str:
        """Where it listens."""

    def start(self) -> None:
        """Start it, and wait until it answers; RekindleError."""

    def stop(self) -> None:
        """End it; calling twice is safe."""

    def problem(self) -> str | None:
        """Return how it ended; None while it runs."""


@dataclass(slots=True, eq=False)
class Place:
    """A model that is loaded. `keep_s`: how long it stays without a request; `rested_at`: since when it has none.

    `asked`: how long each of those who used it since it was loaded wants it to stay, by namespace: it stays for as long
    as any of them wants, so that no tenant ends it for another.
    """

    model: Model
    process: Process
    keep_s: float
    state: State = "starting"
    num_running: int = 0
    rested_at: float = 0.0
    timer: asyncio.TimerHandle | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    asked: dict[str, float] = field(default_factory=dict)

    def keep(self, keep_s: float, by: str) -> None:
        """Note how long one of those who use it wants it to stay."""
        self.asked[by] = keep_s
        self.keep_s = max(self.asked.values())


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    model: Model
    found: asyncio.Future[Place]


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a model could not be started, and until when that is the answer."""

    message: str
    until: float


class Places:
    """Starts and ends models as requests need them. `close` it.

    `new_process(model, ended)` makes what serves a model, not started yet; it calls `ended` on any thread.
    """

    def __init__(
        self,
        new_process: Callable[[Model, Callable[[], None]], Process],
        *,
        max_loaded: int,
        max_waiting: int,
        figures: Figures,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._new_process = new_process
        self._max_loaded = max_loaded
        self._max_waiting = max_waiting
        self._figures = figures
        self._clock = clock
        self._places: dict[str, Place] = {}
        self._waiting: list[_Waiter] = []
        self._failures: dict[str, _Failure] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._threads = ThreadPoolExecutor(2 * max_loaded + 1, thread_name_prefix="rekindle-models")

    @asynccontextmanager
    async def held(self, model: Model, *, by: str = "") -> AsyncIterator[Place]:
        """Load a model if it is not, and keep it for this request of a namespace.

        BackendFailed if it cannot be started, Overloaded if too many requests wait, Unavailable while we stop.
        """
        place = await self._place_of(model)
        place.keep(place.asked.get(by, model.keep_alive_s), by)
        try:
            yield place
        finally:
            self._release(place)

    def peek(self, model: Model) -> Place | None:
        """Return the place of a model that answers, else None: nothing is started, and it does not stay for longer."""
        place = self._places.get(model.name)
        return place if place is not None and place.state == "ready" else None

    def ready(self) -> list[Place]:
        """Return the places of models that answer, in the order of their starts."""
        return [place for place in self._places.values() if place.state == "ready"]

    def state_of(self, model: Model) -> State | None:
        """Return what a model's process is doing; None if it has none."""
        place = self._places.get(model.name)
        return None if place is None else place.state

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a model."""
        return len(self._waiting)

    def expires_in(self, place: Place) -> float | None:
        """Return the seconds until a place is left if nothing else is asked of it; None: never."""
        keep_s = expires_in(place.keep_s)
        if keep_s is None or place.num_running:
            return keep_s
        return max(0.0, place.rested_at + keep_s - self._clock())

    def keep(self, model: Model, keep_s: float, *, by: str = "") -> None:
        """Set how long a model that is loaded stays after its last request, from now on, unless another namespace that
        uses it wants it for longer."""
        place = self._places.get(model.name)
        if place is not None and place.state != "ending":
            place.keep(keep_s, by)
            if place.state == "ready" and not place.num_running:
                self._rest(place)

    async def leave(self, model: Model, *, by: str | None = "") -> bool:
        """End a model as soon as it has no request, and no namespace but `by` has used it (None: if any has).

        Return whether it has ended. Waits for an end that began.
        """
        place = self._places.get(model.name)
        if place is not None and by is None:
            place.asked.clear()
        self.keep(model, 0.0, by=by or "")
        if place is not None and place.state == "ending":
            await place.gone.wait()
        return model.name not in self._places

    async def close(self) -> None:
        """End all models, which save what they have, and refuse who waits."""
        self._is_closed = True
        for waiter in self._waiting:
            if not waiter.found.done():
                waiter.found.set_exception(Unavailable("the server is stopping"))
        for place in list(self._places.values()):
            if place.state == "starting":  # what waits for its answer returns then
                await self._in_thread(place.process.stop)
            else:
                self._end(place)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown()

    def check(self) -> None:
        """Assert that no more is loaded than may be, and that nothing waits for what is there."""
        assert len(self._places) <= self._max_loaded, "more models are loaded than may be"
        assert all(place.num_running >= 0 for place in self._places.values()), "a request was released twice"
        assert not any(place.state == "starting" and place.num_running for place in self._places.values())
        assert self._is_closed or self._places or not self._waiting, "requests wait for nothing"

    async def _place_of(self, model: Model) -> Place:
        if self._is_closed:
            raise Unavailable("the server is stopping")
        self._check_startable(model)
        waiter = _Waiter(model, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._look()
        try:
            if not waiter.found.done() and len(self._waiting) > self._max_waiting:
                raise Overloaded(
                    f"{self._max_waiting} requests wait for a model: try again, or load more models at once "
                    "(max_loaded)",
                    retry_after_s=RETRY_S,
                )
            return await waiter.found
        except asyncio.CancelledError:
            if waiter.found.done() and not waiter.found.cancelled() and waiter.found.exception() is None:
                self._release(waiter.found.result())  # it was let in, and has left at the same moment
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._look()

    def _check_startable(self, model: Model) -> None:
        failure = self._failures.get(model.name)
        if failure is None or model.name in self._places:
            return
        left_s = failure.until - self._clock()
        if left_s > 0:
            raise BackendFailed(f"{failure.message}; it is not tried again for {left_s:.0f} s")

    def _look(self) -> None:
        """Let in who can be, start what there is a place for, and make room for the first that has none."""
        needs_room = False  # an earlier request waits for a place that another model has
        for waiter in list(self._waiting):
            place = self._places.get(waiter.model.name)
            if place is not None:
                if place.state == "ready" and not needs_room:
                    self._admit(waiter, place)
            elif not needs_room and not self._is_closed:
                if len(self._places) < self._max_loaded:
                    self._begin(waiter.model)
                else:
                    needs_room = not self._makes_room()
        self._figures.waiting.set(len(self._waiting))

    def _admit(self, waiter: _Waiter, place: Place) -> None:
        self._waiting.remove(waiter)
        if waiter.found.done():  # it has left
            return
        place.num_running += 1
        self._figures.running.labels(place.model.name).set(place.num_running)
        if place.timer is not None:
            place.timer.cancel()
        waiter.found.set_result(place)

    def _makes_room(self) -> bool:
        """End the model that is idle longest; return whether a place becomes free without anybody's doing."""
        if any(place.state == "ending" for place in self._places.values()):
            return True
        idle = [place for place in self.ready() if not place.num_running]
        if not idle:
            return False
        self._end(min(idle, key=lambda place: place.rested_at))
        return True

    def _begin(self, model: Model) -> None:
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.call_soon_threadsafe(self._has_ended, place)

        place = Place(model, self._new_process(model, ended), model.keep_alive_s)
        self._places[model.name] = place
        self._run(self._starting(place))

    async def _starting(self, place: Place) -> None:
        name, began = place.model.name, self._clock()
        logger.info("model %s: starting its process at %s", name, place.process.url)
        try:
            await self._in_thread(place.process.start)
        except Exception as error:
            # Border: whatever is wrong with one model's start fails the requests for it.
            self._has_failed(place, error)
            return
        took_s = self._clock() - began
        self._figures.starts.labels(name).observe(took_s)
        logger.info("model %s: ready after %.1f s", name, took_s)
        self._failures.pop(name, None)
        place.state = "ready"
        self._count()
        for waiter in [each for each in self._waiting if each.model.name == name]:
            self._admit(waiter, place)
        if not place.num_running:
            self._rest(place)
        self._look()

    def _has_failed(self, place: Place, error: Exception) -> None:
        name = place.model.name
        if not isinstance(error, RekindleError):
            logger.error("model %s: its process cannot be started", name, exc_info=error)
        message = f"model {name!r} cannot be started: {error}"
        logger.warning("%s", message)
        self._figures.failures.labels(name).inc()
        self._failures[name] = _Failure(message, self._clock() + AGAIN_S)
        del self._places[name]
        place.gone.set()
        for waiter in [each for each in self._waiting if each.model.name == name]:
            self._waiting.remove(waiter)
            if not waiter.found.done():
                waiter.found.set_exception(BackendFailed(message))
        self._look()

    def _release(self, place: Place) -> None:
        place.num_running -= 1
        self._figures.running.labels(place.model.name).set(place.num_running)
        if place.state == "ready" and not place.num_running:
            self._rest(place)
        self._look()

    def _rest(self, place: Place) -> None:
        """Begin to count the time that a place has no request."""
        place.rested_at = self._clock()
        if place.timer is not None:
            place.timer.cancel()
        keep_s = expires_in(place.keep_s)
        if keep_s == 0:
            self._end(place)
        elif keep_s is not None:
            place.timer = asyncio.get_running_loop().call_later(keep_s, self._end, place)

    def _has_ended(self, place: Place) -> None:
        """Note that a process ended by itself: requests to it fail on their own, later ones start it again."""
        if place.state == "ready":
            logger.error("model %s: %s", place.model.name, place.process.problem())
            self._figures.failures.labels(place.model.name).inc()
            self._end(place)

    def _end(self, place: Place) -> None:
        if place.state == "ready":
            place.state = "ending"
            if place.timer is not None:
                place.timer.cancel()
            self._count()
            self._run(self._ending(place))

    async def _ending(self, place: Place) -> None:
        name, began = place.model.name, self._clock()
        await self._in_thread(place.process.stop)
        took_s = self._clock() - began
        self._figures.ends.labels(name).observe(took_s)
        logger.info("model %s: left after %.1f s", name, took_s)
        del self._places[name]
        place.gone.set()
        self._look()

    def _count(self) -> None:
        self._figures.loaded.set(len(self.ready()))

    async def _in_thread(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
