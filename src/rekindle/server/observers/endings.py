"""Ends of sessions: what an agent has in memory is made durable and leaves it, once its last request was answered.

Owns the threads that do it, one agent after another, so that no answer waits for the disk. An ended session can go on:
its next request finds it on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from rekindle.engine.api import Engine
from rekindle.engine.intake.fairness import FairWorkers
from rekindle.engine.types import FinishReason, Report
from rekindle.errors import NotFound, RekindleError
from rekindle.server.gate.caller import Caller
from rekindle.server.observers.observer import ReplyId, RequestWatch
from rekindle.text.messages import Message

logger = logging.getLogger(__name__)


class Endings:
    """An observer that offloads the agents whose callers say that their session ends, after each of their replies."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._workers = FairWorkers("endings", most=1)
        self._is_closed = False
        self._waiting = set[tuple[str, str]]()  # added to on the event loop alone

    def began(self, caller: Caller, endpoint: str, body: Mapping[str, Any], *, num_bytes: int = 0) -> RequestWatch:
        """Follow one request."""
        return _Request(self, caller)

    def replied(self, caller: Caller) -> None:
        """Offload the agent of a caller whose session has ended with this reply."""
        if caller.hints.ends_by is not None and caller.agent is not None and self._engine.has_kv:
            self.end(caller.namespace, caller.agent)

    def end(self, namespace: str, agent: str) -> None:
        """Offload an agent, after those that ended before it; one that waits for that already is not queued twice."""
        if (namespace, agent) in self._waiting:
            return
        self._waiting.add((namespace, agent))
        self._workers.submit(namespace, partial(self._offload, namespace, agent))

    def close(self) -> None:
        """End the one that is under way; others stay in memory until the engine closes."""
        self._is_closed = True
        self._workers.stop()

    def _offload(self, namespace: str, agent: str) -> None:
        self._waiting.discard((namespace, agent))
        if self._is_closed:
            return
        try:
            self._engine.agent(agent, namespace=namespace).offload()
        except NotFound:
            logger.debug("agent %s of %s has ended and remembers nothing", agent, namespace)
        except RekindleError as error:
            logger.warning("agent %s of %s has ended and stays in memory: %s", agent, namespace, error)
        except Exception:  # nobody waits for the result of this thread's work
            logger.exception("agent %s of %s has ended and stays in memory", agent, namespace)


class _Request(RequestWatch):
    def __init__(self, endings: Endings, caller: Caller) -> None:
        self._endings = endings
        self._caller = caller

    def finished(
        self, number: int, report: Report, reason: FinishReason, *, reply: Message, id: ReplyId | None = None
    ) -> None:
        self._endings.replied(self._caller)
