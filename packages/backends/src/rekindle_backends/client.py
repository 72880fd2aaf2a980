"""One backend: requests to it on a thread of their own, and whether it answers.

Owns the thread, its event loop and the connections, one for each request, so that a backend that was restarted leaves
no stale one; closing a request's connection is how it is cancelled. Everything a request gets is passed to its `emit`,
on this thread: pieces, then `None` at its end or the error that ended it. Nothing is sent twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from rekindle.errors import BackendFailed, BadRequest, Overloaded, RekindleError, RequestFailed, Timeout
from rekindle.harness.own_server import OwnServer
from rekindle.worker import Worker, described
from rekindle_backends.wire import (
    MODELS,
    MOST_BODY_BYTES,
    MOST_IDLE_BYTES,
    Call,
    EventLines,
    Piece,
    error_text,
    parsed,
    too_long,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")
Arrived = Piece | RekindleError | None
CONNECT_S = 5.0
LOOK_EVERY_S = 5.0  # whether it still serves the model
ASK_S = 60.0  # at the start; a first token may be compiled for
RETRY_S = 2.0  # what clients are asked to wait where the backend does not say
MOST_RETRY_S = 3600.0
DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a backend is, the key it wants, and after how many silent seconds a request to it is given up."""

    url: str
    key: str | None
    silence_s: float


class Sending:
    """A coroutine on a loop's thread that any thread may cancel; `left` is called there once it has ended, however.

    A coroutine that is cancelled before its first step runs none of its own code, so it cannot say that it has ended.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None], left: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._work = work
        self._left = left
        self._task: asyncio.Task[None] | None = None
        loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(lambda task: self._left())

    def cancel(self) -> None:
        """Cancel what has not ended; a loop that is closed has cancelled everything."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class Backend:
    """A client of one server; `start` it, `stop` it once. Any thread may call any method.

    A server of our `own` ends with it; `closing` is closed after that.
    """

    def __init__(self, address: Address, *, own: OwnServer | None = None, closing: ExitStack | None = None) -> None:
        self.url = address.url
        self._address = address
        self._own = own
        self._closing = ExitStack() if closing is None else closing
        self._loop = asyncio.new_event_loop()
        self._client: httpx.AsyncClient | None = None
        self._looks: Future[None] | None = None  # a task that nothing refers to may be collected
        self.unusable: str | None = None  # why requests are of no use, as long as somebody says so
        self.num_sent = 0  # requests for replies so far
        self._num_under_way = 0
        self._last_left = -math.inf  # when one of them ended, by the loop's clock
        self._problem: str | None = None
        self._stopping = asyncio.Event()
        self._ready = threading.Event()
        self.worker = Worker("backend", self._run, on_death=lambda death: None)

    def start(self) -> None:
        """Start the thread; nothing is sent yet."""
        self.worker.start()
        self._ready.wait()

    def stop(self) -> None:
        """Close all connections, join the thread, end a server of our own; calling twice is safe."""
        if self.worker.is_alive:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self.worker.join()
        if self._own is not None:
            self._own.stop()
        self._closing.close()

    def problem(self) -> str | None:
        """Return what is wrong with the backend and what to do; None if all is well. Never blocks."""
        refusal = self._own_refusal()
        return self._problem or self.unusable if refusal is None else str(refusal)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Our threads."""
        return (self.worker,) if self._own is None else (self.worker, self._own.worker)

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """Send one request and wait; return status and JSON (None if it is none). BackendFailed if there is no answer.

        For a start: requests for replies go through `submit`.
        """

        try:
            return self.run(self.fetch(method, path, body)).result()
        except BackendFailed as error:
            raise BackendFailed(f"{error}; start it first") from error

    async def fetch(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = ASK_S
    ) -> tuple[int, Any]:
        """As `ask`, on our thread: see `run`."""
        assert self._client is not None
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream(method, path, json=body, timeout=timeout_s) as response,
            ):
                return response.status_code, parsed(await _whole(response))
        except (httpx.HTTPError, TimeoutError) as error:
            raise BackendFailed(f"no server answers at {self.url}: {_reason(error)}") from error

    def submit(
        self,
        call: Call,
        emit: Callable[[Arrived], None],
        *,
        prepare: Callable[[], Awaitable[None]] | None = None,
        left: Callable[[], None] = lambda: None,
    ) -> Sending:
        """Ask for a completion as a stream; cancelling what is returned closes its connection.

        `prepare` is awaited before it is sent; `left` is called once nothing of it is under way, however it ended.
        """

        work = self._complete(call, emit, prepare)
        self._check_open(work)
        return Sending(self._loop, work, left)

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on our thread; RequestFailed if that has ended."""
        self._check_open(work)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def rests(self, seconds: float = 0.0) -> bool:
        """Whether no request for a reply has been under way for so long. On our thread."""
        return not self._num_under_way and self._loop.time() - self._last_left >= seconds

    def _check_open(self, work: Coroutine[Any, Any, Any]) -> None:
        if not self.worker.is_alive:
            work.close()
            raise RequestFailed("the connection to the backend was closed")

    def watch(self, differs: Callable[[Any], str | None], *, every_s: float = LOOK_EVERY_S) -> None:
        """Look at the list of models every few seconds; `differs` says what is wrong with it, or None."""
        self._looks = self.run(self._look(differs, every_s))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        headers = {"Accept-Encoding": "identity", "Connection": "close"}
        if self._address.key is not None:
            headers["Authorization"] = f"Bearer {self._address.key}"
        timeout = httpx.Timeout(self._address.silence_s, connect=CONNECT_S)
        limits = httpx.Limits(max_keepalive_connections=0)  # and any number of connections
        async with httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=timeout,
            limits=limits,
            verify=ssl.create_default_context() if self.url.startswith("https:") else False,
            trust_env=False,
        ) as self._client:
            self._ready.set()
            await self._stopping.wait()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    async def _complete(
        self, call: Call, emit: Callable[[Arrived], None], prepare: Callable[[], Awaitable[None]] | None
    ) -> None:
        assert self._client is not None
        refusal = self._own_refusal()
        if refusal is not None:
            emit(refusal)
            return
        silence_s = self._address.silence_s
        try:
            if prepare is not None:
                await prepare()
            async with (
                self._counted(),
                asyncio.timeout(silence_s) as patience,
                self._client.stream("POST", call.path, json=call.body, headers=dict(call.headers)) as response,
            ):
                if response.status_code != httpx.codes.OK:
                    raise self._refusal(response, await _whole(response))
                self._problem = None
                await _read(call, response, emit, lambda: patience.reschedule(self._loop.time() + silence_s))
            emit(None)
        except RekindleError as error:
            emit(error)
        except httpx.ConnectTimeout as error:
            emit(self._away(error))
        except (httpx.TimeoutException, TimeoutError):
            emit(self._silent())
        except httpx.ConnectError as error:
            emit(self._away(error))
        except httpx.HTTPError as error:
            emit(BackendFailed(f"the backend broke off its answer: {_reason(error)}"))
        except Exception as error:
            # Border: whatever fails here fails one request.
            logger.exception("a request to the backend failed")
            emit(RequestFailed(f"the request to the backend failed: {described(error)}"))

    @contextlib.asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        self.num_sent += 1
        self._num_under_way += 1
        try:
            yield
        finally:
            self._num_under_way -= 1
            self._last_left = self._loop.time()

    def _away(self, error: Exception) -> RekindleError:
        self._problem = f"the backend {self.url} cannot be reached ({_reason(error)}): {self._remedy}"
        return Overloaded(self._problem, retry_after_s=RETRY_S)

    def _own_refusal(self) -> RekindleError | None:
        return None if self._own is None else self._own.refusal()

    @property
    def _remedy(self) -> str:
        if self._own is None:
            return "start it, or look at its log"
        return "its log may say why; if it has ended, it is started again"

    def _silent(self) -> RekindleError:
        silence_s = self._address.silence_s
        return Timeout(f"the backend sent nothing for {silence_s:g} s")

    def _refusal(self, response: httpx.Response, data: bytes) -> RekindleError:
        """Return the error for an answer that is no stream, of these bytes."""
        status, message = response.status_code, _message(data)
        if status in (401, 403):
            self._problem = f"the backend {self.url} refuses our key: set backend_key (REKINDLE_BACKEND_KEY)"
            return BackendFailed(self._problem)
        if status in (429, 503):
            return Overloaded(f"the backend is busy: {message}", retry_after_s=_retry_after(response))
        if status in (400, 413, 422):
            return too_long(parsed(data)) or BadRequest(f"the backend refuses this request: {message}")
        return BackendFailed(f"the backend failed with status {status}: {message}")

    async def _look(self, differs: Callable[[Any], str | None], every_s: float) -> None:
        assert self._client is not None
        while True:
            await asyncio.sleep(every_s)
            if self._own_refusal() is not None:  # which says what is wrong, and logs it
                self._problem = None
                continue
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    async with self._client.stream("GET", MODELS, timeout=LOOK_EVERY_S) as response:
                        found = parsed(await _whole(response)) if response.status_code == httpx.codes.OK else None
                status = f"it answers {MODELS} with status {response.status_code}"
                problem = differs(found) if found is not None else status
            except (httpx.HTTPError, TimeoutError) as error:
                problem = f"it cannot be reached ({_reason(error)}): {self._remedy}"
            except Exception as error:
                # Border: a list of models that cannot be read is a problem of the backend's, not of this thread.
                problem = f"its {MODELS} cannot be read: {described(error)}"
            before, self._problem = self._problem, None if problem is None else f"the backend {self.url}: {problem}"
            if self._problem != before:
                logger.warning("%s", self._problem or f"the backend {self.url} serves the model again")


async def _read(
    call: Call, response: httpx.Response, emit: Callable[[Arrived], None], is_alive: Callable[[], None]
) -> None:
    """Emit the pieces of a stream; BackendFailed if it breaks off before its end, or brings nothing for long.

    `is_alive` is called with every line that ends: one that goes on and on is silence.
    """
    lines, has_ended, num_done, idle_bytes = EventLines(), False, -1, 0
    async for data in _plain(response):
        idle_bytes += len(data)
        for event in lines.push(data):
            if event == DONE:
                return
            piece = call.read(event)
            if has_ended and piece.token_ids:
                raise BackendFailed("the backend sent tokens after the end of its answer")
            has_ended |= piece.reason is not None
            if piece.token_ids or (piece.done_tokens or 0) > num_done:
                num_done, idle_bytes = max(num_done, piece.done_tokens or 0), 0
            emit(piece)
        if b"\n" in data:
            is_alive()
            if idle_bytes > MOST_IDLE_BYTES:
                raise BackendFailed(f"the backend sent {MOST_IDLE_BYTES >> 20} MiB of lines that bring nothing")
    if not has_ended:
        raise BackendFailed("the backend broke off its answer")


def _plain(response: httpx.Response) -> AsyncIterator[bytes]:
    """Return the bytes of an answer as they come; BackendFailed if they are compressed, which was asked against: a few
    could become gigabytes before any limit of ours sees them."""
    form = response.headers.get("Content-Encoding", "identity").strip().lower()
    if form not in ("", "identity"):
        raise BackendFailed(f"the backend compressed its answer ({form[:40]}), which it was asked not to do")
    return response.aiter_raw()


async def _whole(response: httpx.Response) -> bytes:
    """Return an answer that is no stream; BackendFailed, and the rest is not read, if it is too long for one."""
    found = bytearray()
    async for data in _plain(response):
        found += data
        if len(found) > MOST_BODY_BYTES:
            raise BackendFailed(
                f"the backend answered with status {response.status_code} and more than {MOST_BODY_BYTES >> 20} MiB"
            )
    return bytes(found)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _message(data: bytes) -> str:
    found = parsed(data)
    return error_text(found) if found is not None else data[:500].decode("utf-8", "replace") or "no reason given"


def _retry_after(response: httpx.Response) -> float:
    """Return the seconds of a `Retry-After`, at most an hour; some where it is missing, a date or no number."""
    try:
        found = float(response.headers.get("Retry-After", RETRY_S))
    except ValueError:
        return RETRY_S
    return RETRY_S if math.isnan(found) else min(max(0.0, found), MOST_RETRY_S)
