"""serve --record: requests and their answers, written to the file of a day as they end.

Owns the writing thread (`dayfile` owns the format) and the handling of disk failures: requests are served unrecorded,
health reports it, and the file is retried later. The file holds what people wrote, readable by its owner only, and
never keys. A file that has grown too large is renamed to NAME.1, replacing an earlier one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rekindle.engine.types import Delta, FinishReason, Report
from rekindle.errors import ConfigError
from rekindle.server.border import problem_of
from rekindle.server.dayfile import DayWriter, Header, RecordedRequest, known_header
from rekindle.server.gate.caller import Caller
from rekindle.server.observers.observer import ReplyId, RequestWatch
from rekindle.server.openai.replies import message_of
from rekindle.text.messages import Message
from rekindle.worker import Death, Worker

logger = logging.getLogger("rekindle.server")
FILE_NAME = "day.jsonl"  # if the path is a directory
MAX_QUEUED = 256  # requests waiting for the disk; more are dropped
MAX_QUEUED_BYTES = 64 << 20  # of their bodies and replies; a larger request waits alone
RETRY_S = 30.0
JOIN_S = 10.0


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """An ended request and its arrival time (wall clock). `reply` None: there was none.

    `num_bytes`: the size of its raw body.
    """

    at: float
    request: RecordedRequest
    reply: Message | None
    num_bytes: int = 0

    @property
    def size(self) -> int:
        """Approximate size of body and reply, known without serializing them."""
        if self.reply is None:
            return self.num_bytes
        texts = (self.reply.content, self.reply.reasoning or "", *(call.arguments for call in self.reply.tool_calls))
        return self.num_bytes + sum(map(len, texts))


def record_path(path: Path) -> Path:
    """Return the file to record to; for a directory, the default file in it."""
    path = path.expanduser().absolute()
    return path / FILE_NAME if path.is_dir() else path


def check_record(path: Path) -> None:
    """Raise ConfigError unless `path` is writable; creates missing directories, but no file."""
    path = record_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        if not is_new:
            known_header(path)
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600))
        if is_new:
            path.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"record: {path} cannot be written: {error.strerror or error}; choose another --record")


class Recorder:
    """An observer that records a day. Start it before use and close it after."""

    def __init__(
        self,
        path: Path,
        *,
        model: str,
        max_bytes: int,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = record_path(path)
        self.clock = clock
        self.monotonic = monotonic
        self._model = model
        self._max_bytes = max_bytes
        self._queue: queue.Queue[EndedRequest | None] = queue.Queue(MAX_QUEUED)
        self.worker = Worker("recorder", self._run, on_death=self._died)
        self._writer: DayWriter | None = None
        self._retry_at = 0.0
        self._lock = threading.Lock()  # guards the three below, which the event loop changes, too
        self._queued_bytes = 0
        self._problem: str | None = None
        self._num_lost = 0

    def start(self) -> None:
        """Open the file and start the thread; ConfigError if the file cannot be written."""
        try:
            self._open(at_s=0.0)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self.worker.start()

    def close(self) -> None:
        """Write pending requests and close the file; safe to repeat, and without a start."""
        if self.worker.is_alive:
            with contextlib.suppress(queue.Full):  # the disk hangs: pending requests are lost
                self._queue.put(None, timeout=JOIN_S)
            self.worker.join(JOIN_S)

    @property
    def num_pending(self) -> int:
        """Number of requests that are neither written nor lost yet."""
        return self._queue.unfinished_tasks

    def problems(self) -> tuple[str, ...]:
        """Describe what currently keeps requests from being recorded."""
        with self._lock:
            problem, num_lost = self._problem, self._num_lost
        if problem is None:
            return ()
        return (f"recording to {self.path} fails: {problem}; {num_lost} requests are not recorded",)

    def began(self, caller: Caller, endpoint: str, body: Mapping[str, Any], *, num_bytes: int = 0) -> RecordingWatch:
        """Follow one request."""
        return RecordingWatch(self, caller, endpoint, body, num_bytes=num_bytes)

    def add(self, ended: EndedRequest) -> None:
        """Queue a request for the disk, or drop it if the queue is full. Returns at once."""
        with self._lock:
            fits = not self._queued_bytes or self._queued_bytes + ended.size <= MAX_QUEUED_BYTES
            self._queued_bytes += ended.size if fits else 0
        if not fits:
            self._failed("the disk is too slow")
            return
        try:
            self._queue.put_nowait(ended)
        except queue.Full:
            self._left(ended)
            self._failed("the disk is too slow")
        if self.worker.death is not None:
            self._lose_rest(self.worker.death)

    def _died(self, death: Death) -> None:
        self._lose_rest(death)
        self._drop_writer()

    def _lose_rest(self, death: Death) -> None:
        """Drop pending requests and record the death as the problem. Safe on any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                ended = self._queue.get_nowait()
                self._queue.task_done()
                if ended is not None:
                    self._left(ended)
                    self._failed(str(death))
        with self._lock:
            self._problem = str(death)

    def _left(self, ended: EndedRequest) -> None:
        with self._lock:
            self._queued_bytes -= ended.size

    def _run(self) -> None:
        while (ended := self._queue.get()) is not None:
            try:
                self._write(ended)
            except (OSError, ConfigError) as error:
                self._drop_writer()
                self._retry_at = self.monotonic() + RETRY_S
                self._failed(str(error))
            except BaseException:
                # Border: a body that cannot be serialized loses its line, not the recording.
                logger.exception("a request could not be recorded")
            finally:
                self._left(ended)
                self._queue.task_done()
        self._drop_writer()

    def _write(self, ended: EndedRequest) -> None:
        if self._writer is None:
            if self.monotonic() < self._retry_at:
                with self._lock:
                    self._num_lost += 1
                return
            self._open()
        elif self.path.stat().st_size >= self._max_bytes:
            self._drop_writer()
            os.replace(self.path, self.path.with_name(f"{self.path.name}.1"))
            self._open()
        assert self._writer is not None
        at_s = max(0.0, ended.at - self._writer.header.began)
        answer = None if ended.reply is None else message_of(ended.reply)
        self._writer.request(replace(ended.request, at_s=at_s, answer=answer))
        with self._lock:
            problem, num_lost = self._problem, self._num_lost
            self._problem, self._num_lost = None, 0
        if problem is not None:
            logger.warning("recording to %s resumed; %d requests are missing", self.path, num_lost)

    def _open(self, *, at_s: float | None = None) -> None:
        self._writer = DayWriter(self.path, Header(self.clock(), self._model), at_s=at_s)

    def _drop_writer(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):  # what could not be written cannot be flushed either
                self._writer.close()
            self._writer = None

    def _failed(self, why: str) -> None:
        with self._lock:
            self._num_lost += 1
            is_new, self._problem = self._problem is None, why
        if is_new:
            logger.warning("recording to %s failed: %s; requests are served unrecorded", self.path, why)


class RecordingWatch(RequestWatch):
    """Collects one request; its line has the reply of choice 0."""

    def __init__(
        self, recorder: Recorder, caller: Caller, endpoint: str, body: Mapping[str, Any], *, num_bytes: int
    ) -> None:
        self._recorder = recorder
        self._num_bytes = num_bytes
        self._at, self._began = recorder.clock(), recorder.monotonic()
        self._first_token_s: float | None = None
        self._ending: int | None = None
        self._is_recorded = not body  # an unreadable body is not recorded
        # Tenants may use the same agent ids: keep their sessions separate.
        session = f"{caller.namespace}/{caller.agent}" if caller.agent and caller.namespace != "default" else ""
        self._request = RecordedRequest(
            at_s=0.0,
            body=body,
            answer=None,
            session=session,
            agent=caller.agent,
            endpoint=endpoint,
            headers=caller.headers,
        )

    def delta(self, choice: int, delta: Delta) -> None:
        """Time the first token of choice 0."""
        if choice == 0 and self._first_token_s is None and delta.token_ids:
            self._first_token_s = self._recorder.monotonic() - self._began
        if delta.finish_reason is not None:
            self._ending = choice

    def finished(
        self, number: int, report: Report, reason: FinishReason, *, reply: Message, id: ReplyId | None = None
    ) -> None:
        """Record the request when choice 0 is complete."""
        if self._ending == 0:
            usage = {
                "prompt_tokens": report.prompt_tokens,
                "completion_tokens": report.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": report.reused_tokens},
            }
            self._record(reply, finish_reason=reason, usage=usage)

    def failed(self, number: int | None, error: Exception) -> None:
        """Record the error that was answered instead."""
        problem = problem_of(error)
        self._record(None, status=problem.status, error=problem.message)

    def _record(self, reply: Message | None, **facts: Any) -> None:
        if self._is_recorded:
            return
        self._is_recorded = True
        duration_s = self._recorder.monotonic() - self._began
        request = replace(self._request, first_token_s=self._first_token_s, duration_s=duration_s, **facts)
        self._recorder.add(EndedRequest(self._at, request, reply, self._num_bytes))
