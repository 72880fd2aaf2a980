"""Requests whose prompts take long to prepare: done off the intake thread, namespaces in turns.

Owns what counts as long, and the order of each agent's requests: while one of them is prepared here, later ones are,
too. A short request needs only the intake thread. With an object tier every request may wait for it, and then agents
take turns, so that none waits for what another imports.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable

from rekindle.engine.intake.fairness import FairWorkers
from rekindle.engine.types import GenerationRequest
from rekindle.text.length import exceeds, num_chars

LONG_CHARS = 8 << 10  # up to here the intake is busy for a few milliseconds


class LongPrompts:
    """Decides which requests are prepared by `workers`: long ones, or with `has_tier` all. Any thread."""

    def __init__(self, workers: FairWorkers, *, has_tier: bool = False) -> None:
        self._workers = workers
        self._has_tier = has_tier
        self._numbers = itertools.count()
        self._under_way: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def takes(self, request: GenerationRequest) -> bool:
        """Whether the request is long, or follows one of its agent that is still being prepared here."""
        if self._has_tier:
            return True
        if request.agent is not None:
            with self._lock:
                if (request.namespace, request.agent) in self._under_way:
                    return True
        return _is_long(request)

    def submit(self, request: GenerationRequest, prepare: Callable[[], None]) -> None:
        """Prepare a request after earlier ones of its namespace, with a tier after those of its agent; `prepare`
        answers the caller."""
        key = None if request.agent is None else (request.namespace, request.agent)
        if key is not None:
            with self._lock:
                self._under_way[key] += 1

        def run() -> None:
            try:
                prepare()
            finally:
                if key is not None:
                    self._leave(key)

        self._workers.submit(self._lane(request), run)

    def _lane(self, request: GenerationRequest) -> str:
        """Return the name of what the request waits for: of each lane one request is prepared at a time."""
        if not self._has_tier:
            return request.namespace
        return f"{request.namespace}\0{next(self._numbers) if request.agent is None else request.agent}"

    def _leave(self, key: tuple[str, str]) -> None:
        with self._lock:
            self._under_way[key] -= 1
            if not self._under_way[key]:
                del self._under_way[key]

    def stop(self) -> None:
        """Prepare what waits, and end the threads; later requests are prepared in their caller's thread."""
        self._workers.stop()


def _is_long(request: GenerationRequest) -> bool:
    """Whether the prompt is long, or what constrains its reply."""
    tools = request.calls.tools if request.calls is not None else ()
    constraints = [request.constraint and request.constraint.value, *(tool.schema for tool in tools)]
    return _size(request) > LONG_CHARS or exceeds(constraints, LONG_CHARS)


def _size(request: GenerationRequest) -> int:
    """Return the characters of the prompt, or the number of its ids."""
    if request.token_ids is not None:
        return len(request.token_ids)
    if request.messages is None:
        return len(request.text or "")
    sent = [*(request.tools or ()), request.template_kwargs]
    return num_chars(request.messages, sent) + len(request.reply_prefix)
