"""Tokens that each namespace has used today (UTC), and how many it may.

    usage.json    {"day": 20787, "namespaces": {"ada": [computed, generated]}}, next to the store
                  {"sealed": "..."}, that in base64 as the key of an encrypted store seals it

Owns the counts, their file and its thread. `computed` are tokens of prompts that were not reused, `generated` those of
replies: what the machine worked for. A reply is counted when it ends, whole or cut off, so those that run when a quota
is used up still end, and the next request is refused until midnight. The file is replaced within a second of a change,
which is what a kill -9 loses. One that cannot be read is set aside, and counting begins anew.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rekindle.server.border import Dialect, Problem
from rekindle.store.files.veil import Veil
from rekindle.worker import Worker

logger = logging.getLogger("rekindle.server")
USAGE_FILE = "usage.json"
DAY_S = 86400
WRITE_S = 1.0  # between two writes
MOST_SHOWN = 100  # namespaces in figures: those that used most
BOUND = b"usage"
COMPUTED, GENERATED = "computed tokens of prompts", "tokens of replies"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of both kinds; as a limit, None is any number."""

    computed: int | None = None
    generated: int | None = None


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is left of one kind of a limited namespace's tokens."""

    words: str
    limit: int
    used: int

    @property
    def remaining(self) -> int:
        return max(0, self.limit - self.used)


@dataclass(slots=True)
class _Counts:
    day: int
    of: dict[str, list[int]] = field(default_factory=dict)


class Quotas:
    """Counts tokens of namespaces, up to `limits` of each. Start it, close it; `path` None: in memory alone.

    Any thread may call any method. `clock` is wall time in seconds; `veil`: that of an encrypted store.
    """

    def __init__(
        self,
        limits: Callable[[str], Tokens],
        path: Path | None,
        *,
        clock: Callable[[], float] = time.time,
        veil: Veil | None = None,
    ) -> None:
        self._limits = limits
        self._path = path
        self._clock = clock
        self._veil = veil
        self._lock = threading.Lock()
        self._changed, self._stopped = threading.Event(), threading.Event()
        self._problem: str | None = None
        self._is_saved = True
        self._counts = _Counts(self._day()) if path is None else _read(path, self._day(), veil)
        self._worker = Worker("usage", self._run, on_death=lambda death: None)

    def start(self) -> None:
        """Start writing the file."""
        if self._path is not None:
            self._worker.start()

    def close(self) -> None:
        """Write what was counted, and stop."""
        self._stopped.set()
        self._changed.set()
        self._worker.join()
        if self._path is not None:
            self._write()

    def spend(self, namespace: str, computed: int, generated: int) -> None:
        """Count the tokens of a request that has ended."""
        with self._lock:
            used = self._today().setdefault(namespace, [0, 0])
            used[0] += computed
            used[1] += generated
            self._is_saved = False
        self._changed.set()

    def problem(self, namespace: str) -> Problem | None:
        """Return why a namespace may not have another reply today, if it may not."""
        spent = next((kind for kind in self._kinds(namespace) if not kind.remaining), None)
        if spent is None:
            return None
        wait_s = self._left_s()
        message = (
            f"namespace {namespace!r} has used {spent.used:,} of the {spent.limit:,} {spent.words} that it may use a "
            f"day (UTC): come back in {_duration(wait_s)}"
        )
        return Problem(429, "tokens", message, code="rate_limit_exceeded", retry_after_s=wait_s)

    def headers(self, namespace: str, dialect: Dialect) -> dict[str, str]:
        """Return what is left to a limited namespace, in the headers that clients of this dialect know.

        OpenAI's have one count of tokens: that of which less is left.
        """
        kinds, left_s = self._kinds(namespace), self._left_s()
        if dialect == "anthropic":
            reset = datetime.fromtimestamp(self._clock() + left_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            return {
                f"anthropic-ratelimit-{'input' if kind.words == COMPUTED else 'output'}-tokens-{name}": value
                for kind in kinds
                for name, value in (("limit", str(kind.limit)), ("remaining", str(kind.remaining)), ("reset", reset))
            }
        if not kinds:
            return {}
        least = min(kinds, key=lambda kind: kind.remaining)
        names = {"limit": str(least.limit), "remaining": str(least.remaining), "reset": _duration(left_s)}
        return {f"x-ratelimit-{name}-tokens": value for name, value in names.items()}

    def used(self) -> Mapping[str, Tokens]:
        """Return what namespaces have used today, of `MOST_SHOWN` at most."""
        with self._lock:
            most = sorted(self._today().items(), key=lambda item: -sum(item[1]))[:MOST_SHOWN]
            return {namespace: Tokens(*used) for namespace, used in most}

    def limit(self, namespace: str) -> Tokens:
        """Return what a namespace may use on a day."""
        return self._limits(namespace)

    def problems(self) -> tuple[str, ...]:
        """Return why the file is not written, if it is not."""
        return () if self._problem is None else (self._problem,)

    def _kinds(self, namespace: str) -> list[_Kind]:
        limit = self._limits(namespace)
        if limit == Tokens():
            return []
        with self._lock:
            used = list(self._today().get(namespace, (0, 0)))
        pairs = zip((COMPUTED, GENERATED), (limit.computed, limit.generated), used, strict=True)
        return [_Kind(words, most, count) for words, most, count in pairs if most is not None]

    def _today(self) -> dict[str, list[int]]:
        day = self._day()
        if self._counts.day != day:
            self._counts = _Counts(day)
        return self._counts.of

    def _day(self) -> int:
        return int(self._clock() // DAY_S)

    def _left_s(self) -> float:
        return DAY_S - self._clock() % DAY_S

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._changed.wait()
            self._changed.clear()
            self._write()
            self._stopped.wait(WRITE_S)

    def _write(self) -> None:
        assert self._path is not None, "there is no file"
        with self._lock:
            if self._is_saved:
                return
            self._is_saved = True
            text = json.dumps({"day": self._counts.day, "namespaces": self._counts.of})
        if self._veil is not None:
            sealed = self._veil.seal(text.encode("utf-8", "surrogatepass"), BOUND)
            text = json.dumps({"sealed": base64.b64encode(sealed).decode()})
        aside = self._path.with_name(f"{self._path.name}.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(text)
            aside.replace(self._path)
            self._problem = None
        except OSError as error:
            self._is_saved = False
            problem = f"{self._path} cannot be written, so a restart forgets the tokens used today: {error.strerror}"
            if self._problem is None:
                logger.error("%s", problem)
            self._problem = problem


def _read(path: Path, day: int, veil: Veil | None) -> _Counts:
    """Return the counts of a file; none if it is another day's, or missing, or cannot be read."""
    try:
        content = json.loads(path.read_bytes())
        if veil is not None and "sealed" in content:
            content = json.loads(veil.open(base64.b64decode(content["sealed"]), BOUND))
        counts = _Counts(int(content["day"]), {str(name): _pair(pair) for name, pair in content["namespaces"].items()})
    except FileNotFoundError:
        return _Counts(day)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.error("%s cannot be read and is set aside; tokens of today are counted from 0: %r", path, error)
        with contextlib.suppress(OSError):
            path.replace(path.with_name(f"{path.name}.damaged"))
        return _Counts(day)
    return counts if counts.day == day else _Counts(day)


def _pair(given: list[int]) -> list[int]:
    computed, generated = given
    return [int(computed), int(generated)]


def _duration(seconds: float) -> str:
    """`6h5m0s`, as OpenAI writes it, rounded up to a second."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours = f"{minutes // 60}h" if minutes >= 60 else ""
    return f"{hours}{minutes % 60}m{rest}s"


def figures(quotas: Quotas) -> Iterator[tuple[str, str, int, int | None]]:
    """Yield namespace, kind, tokens used today, and the limit of each."""
    for namespace, used in quotas.used().items():
        limit = quotas.limit(namespace)
        for kind in ("computed", "generated"):
            yield namespace, kind, getattr(used, kind), getattr(limit, kind)
