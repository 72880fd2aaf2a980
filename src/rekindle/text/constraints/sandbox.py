"""Compiles grammars in another process first, where processor time and memory are bounded.

Owns that process, which is started for the first constraint and ends with `close`, or with its parent. One grammar is
tried at a time; callers wait for each other, so they are threads for long work.
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


@dataclass(frozen=True, slots=True)
class Tried:
    """What a trial found: an `error` (empty: none) at `path` of a schema, bytes that compiling took, processor time."""

    error: str
    path: str
    num_bytes: int
    seconds: float


class Sandbox:
    """Tries grammars for one vocabulary. Any thread may ask."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False

    def tried(self, job: dict[str, Any], *, seconds: float) -> Tried:
        """Return how a `grammar` compiles, or where a `schema` is at fault, within `seconds` of processor time.

        What takes longer has the error `TOO_COMPLEX`, without a path. RequestFailed if there is no process to try it.
        """
        line = json.dumps({**job, "seconds": seconds})
        with self._lock:
            answer = self._asked(line)
        if answer is None:
            return Tried(TOO_COMPLEX, "", 0, seconds)
        return Tried(**answer)

    def _asked(self, line: str) -> dict[str, Any] | None:
        if self._is_closed:
            raise RequestFailed("the engine was closed")
        try:
            if self._process is None or self._process.poll() is not None:
                self._process = self._started()
            self._write(self._process, line)
            assert self._process.stdout is not None
            answer = self._process.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            raise RequestFailed("the process that tries constraints has ended; send the request again")
        found: dict[str, Any] | None = json.loads(answer)
        return found

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
        """End the process, after what it is trying; calling twice is safe."""
        with self._lock:
            self._is_closed, process, self._process = True, self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            process.communicate()
