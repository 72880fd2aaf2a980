"""Compiles grammars in another process first, where processor time and memory are bounded.

Owns these processes: one is started for the first constraint and ends with `close`, or with its parent; a second one
while the first is busy, so that a tenant need not wait for what another tenant's constraint takes. Callers wait for
further ones, so they are threads for long work.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rekindle.errors import RequestFailed
from rekindle.text.constraints.compiling import TOO_COMPLEX, Words

if TYPE_CHECKING:
    import subprocess


MOST_PROCESSES = 2  # of less than half a gigabyte each


@dataclass(frozen=True, slots=True)
class Tried:
    """What a trial found: an `error` (empty: none) at `path` of a schema, bytes that compiling took, processor time;
    a grammar in Lark's notation."""

    error: str
    path: str
    num_bytes: int
    seconds: float
    lark: str = ""


class Sandbox:
    """Tries grammars for one vocabulary, up to `most` at a time. Any thread may ask."""

    def __init__(self, words: Words, *, most: int = MOST_PROCESSES) -> None:
        self._words = words
        self._most = most
        self._turns = threading.Semaphore(most)
        self._lock = threading.Lock()
        self._idle: subprocess.Popen[str] | None = None
        self._is_closed = False

    def tried(self, job: dict[str, Any], *, seconds: float) -> Tried:
        """Return how a `grammar` compiles, where a `schema` is at fault, or what `gbnf` is in Lark's notation, within
        `seconds` of processor time.

        What takes longer has the error `TOO_COMPLEX`, without a path. RequestFailed if there is no process to try it.
        """
        line = json.dumps({**job, "seconds": seconds})
        with self._turns:
            answer = self._asked(line)
        if answer is None:
            return Tried(TOO_COMPLEX, "", 0, seconds)
        return Tried(**answer)

    def _asked(self, line: str) -> dict[str, Any] | None:
        try:
            process = self._taken()
            try:
                self._write(process, line)
                assert process.stdout is not None
                answer = process.stdout.readline()
            finally:
                self._give_back(process)
        except OSError:
            answer = ""
        if not answer:
            raise RequestFailed("the process that tries constraints has ended; send the request again")
        found: dict[str, Any] | None = json.loads(answer)
        return found

    def _taken(self) -> subprocess.Popen[str]:
        """Return the process that waits, or a new one."""
        with self._lock:
            if self._is_closed:
                raise RequestFailed("the engine was closed")
            process, self._idle = self._idle, None
        return process if process is not None and process.poll() is None else self._started()

    def _give_back(self, process: subprocess.Popen[str]) -> None:
        """Let a process wait for the next grammar; end it if one waits already."""
        with self._lock:
            is_kept = self._idle is None and not self._is_closed
            if is_kept:
                self._idle = process
        if not is_kept:
            _end(process)

    def _started(self) -> subprocess.Popen[str]:
        import subprocess  # few replies are constrained

        command = [sys.executable, "-m", "rekindle.text.constraints.sandbox_process"]
        # A session of its own: an interrupt at the terminal ends the server, which ends this.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", start_new_session=True
        )
        words = self._words
        tokens = [each.decode("latin-1") for each in words.tokens]
        self._write(
            process, json.dumps({"tokens": tokens, "special": [*words.special_token_ids], "ends": [*words.ends]})
        )
        return process

    @staticmethod
    def _write(process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(f"{line}\n")
        process.stdin.flush()

    def close(self) -> None:
        """End all processes, after what they are trying; calling twice is safe."""
        with self._lock:
            self._is_closed, process, self._idle = True, self._idle, None
        if process is not None:
            _end(process)
        for _ in range(self._most):
            self._turns.acquire()
        self._turns.release(self._most)


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(OSError):
        process.communicate()
