"""A server of our own: a command on a free port of this machine, started again when it ends, ended when we do.

Owns its process, which a `keeper` holds for us, and the thread that waits for its end. A server that ends is started
again after a pause that grows each time; one that served for long enough begins with the first pause. After the last
pause it is given up: what ends five times in a row does not get better by itself, and the log has to be read.

    answers ──ends──▶ pause ──▶ started again ──▶ answers
                        ▲            │ ends
                        └────────────┴──▶ given up
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from rekindle.errors import ConfigError, Overloaded, RekindleError, Unavailable
from rekindle.harness.keeper import OF_SIGNALS, STOP_S
from rekindle.worker import Worker

logger = logging.getLogger(__name__)
POLL_S = 0.25
ASK_S = 2.0
PAUSES_S = (1.0, 5.0, 25.0, 125.0)  # before it is started again, the first time and the next ones
STEADY_S = 600.0  # what served for so long did not fail at its start
RETRY_S = 10.0  # what clients are asked to wait: a small model takes longer to load


@dataclass(frozen=True, slots=True)
class Command:
    """A command that serves at `url`, on this machine; `title` is what users call it.

    `environment` is added to ours; None takes a variable away. `key` is what the server wants of its clients. It is
    killed when it has not ended `stop_s` after it was asked to. `ask_s`: how long each question waits for whether it
    answers already; long for one that listens before it does.
    """

    title: str
    arguments: tuple[str, ...]
    url: str
    environment: Mapping[str, str | None] = field(default_factory=dict)
    key: str | None = None
    stop_s: float = STOP_S
    ask_s: float = ASK_S


class EndedEarly(ConfigError):
    """The server ended before it answered: the message says how."""


def free_url() -> str:
    """Return the URL of a free port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def place_of(url: str) -> list[str]:
    """Return the arguments by which vLLM and llama-server listen at the URL of `free_url`."""
    return ["--host", "127.0.0.1", "--port", url.rpartition(":")[2]]


class OwnServer:
    """A server and its keeper; `start` it, `stop` it once. Any thread may call any method.

    What it writes goes to the file descriptor `output`: where our own log goes, unless another is given. `given_up` is
    called when it has ended and is not started again; with no pauses that is at its first end.
    """

    def __init__(
        self,
        command: Command,
        *,
        pauses_s: Sequence[float] = PAUSES_S,
        clock: Callable[[], float] = time.monotonic,
        output: int = 2,
        given_up: Callable[[], None] = lambda: None,
    ) -> None:
        self.command = command
        self._output = output
        self._given_up = given_up
        self.num_starts = 0
        self._pauses_s = tuple(pauses_s)
        self._clock = clock
        self._keeper: subprocess.Popen[bytes] | None = None
        self._problem: str | None = None
        self._is_given_up = False
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # nothing is started once we stop
        self.worker = Worker("server", self._supervise, on_death=lambda death: None)

    def start(self) -> None:
        """Start the server and wait until it answers; EndedEarly if it ends before that."""
        try:
            if not (self._spawn() and self._answers()):
                raise EndedEarly(f"{self.command.title} {self._end()} before it answered")
        except BaseException:
            self.stop()
            raise
        self.worker.start()

    def stop(self) -> None:
        """End the server and wait for that; calling twice is safe."""
        self._stopping.set()
        with self._lock:
            keeper = self._keeper
        if keeper is not None:
            _close(keeper)
            keeper.wait()
        self.worker.join()

    def refusal(self) -> RekindleError | None:
        """Return why nothing can be sent to the server: it is started again, or given up. None: it runs."""
        problem = self._problem
        if problem is None:
            return None
        return Unavailable(problem) if self._is_given_up else Overloaded(problem, retry_after_s=RETRY_S)

    def _spawn(self) -> bool:
        """Start the server, unless we stop."""
        with self._lock:
            if self._stopping.is_set():
                return False
            self.num_starts += 1
            environment = {**os.environ, **self.command.environment}
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "rekindle.harness.keeper", str(self.command.stop_s), *self.command.arguments],
                env={name: value for name, value in environment.items() if value is not None},
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,  # a Ctrl-C in a terminal is for us: we end it
            )
        return True

    def _answers(self) -> bool:
        """Wait until the server answers; False if it ends before that."""
        assert self._keeper is not None, "nothing was started"
        with httpx.Client(timeout=self.command.ask_s, trust_env=False) as client:
            while self._keeper.poll() is None:
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{self.command.url}/health").status_code == httpx.codes.OK:
                        return True
                self._stopping.wait(POLL_S)
        return False

    def _end(self) -> str:
        """Wait for the server's end; return how it ended, in words."""
        assert self._keeper is not None, "nothing was started"
        status = self._keeper.wait()
        _close(self._keeper)
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(status - OF_SIGNALS).name}"
        return f"ended with status {status}"

    def _supervise(self) -> None:
        """Start the server again whenever it has ended, until it does so too often. On the worker's thread."""
        why, pauses_s = self._end(), list(self._pauses_s)
        while not self._stopping.is_set():
            if not pauses_s:
                self._give_up(why)
                return
            pause_s, attempt = pauses_s.pop(0), len(self._pauses_s) - len(pauses_s)
            self._problem = (
                f"{self.command.title} {why} and is being started again, attempt {attempt} of {len(self._pauses_s)}; "
                "its log says why"
            )
            logger.warning("%s, in %g s", self._problem, pause_s)
            if self._stopping.wait(pause_s):
                return
            try:
                has_answered = self._spawn() and self._answers()
            except OSError as error:  # no memory, no descriptors: as if it had ended
                why = f"cannot be started ({error})"
                continue
            began = self._clock()
            if has_answered:
                self._problem = None
                logger.warning("%s answers again", self.command.title)
            why = self._end()
            if has_answered and self._clock() - began >= STEADY_S:
                pauses_s = list(self._pauses_s)

    def _give_up(self, why: str) -> None:
        self._is_given_up = True
        self._problem = f"{self.command.title} {why}"
        if self._pauses_s:
            self._problem += (
                f"; after {len(self._pauses_s)} attempts to start it again it is given up: look at its log, then "
                "restart this server"
            )
        logger.error("%s", self._problem)
        self._given_up()


def _close(keeper: subprocess.Popen[bytes]) -> None:
    """Close a keeper's input, after which it ends what it keeps."""
    assert keeper.stdin is not None, "a keeper reads from us"
    keeper.stdin.close()
