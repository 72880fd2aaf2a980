"""What the engine's thread runs: a core that computes here, or one that lets another server compute.

Owns the interface that both have: its thread drives it, statistics and commands on agents read its queues and blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.blocks.loads import Load
from rekindle.engine.blocks.prefix_cache import PrefixCache
from rekindle.engine.core.background import Background, IdleWork
from rekindle.engine.core.sampling import Replies
from rekindle.engine.core.scheduler import Scheduler
from rekindle.engine.core.verdicts import Verdicts
from rekindle.engine.request import Request
from rekindle.errors import RekindleError
from rekindle.store.commands import StoreCommand


@dataclass(frozen=True, slots=True)
class CoreCounts:
    """Counters of a core since it was made; prompt tokens are those of requests that were started."""

    num_preemptions: int = 0
    num_steps: int = 0
    num_rows: int = 0  # of all forward passes, also those that ran again after a preemption
    step_s: float = 0.0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    step_overhead_ms: float = 0.0
    num_checking: int = 0  # restored blocks that wait to be checked
    num_checked: int | None = None  # restored blocks that were computed again and compared; None: none are
    num_differed: int | None = None  # those that had other bits


class Core(Protocol):
    """Called from the engine's thread only. What has a body is what both have, or as for a core that computes here."""

    cache: PrefixCache
    scheduler: Scheduler
    background: Background
    verdicts: Verdicts | None = None  # of checks of restored blocks; None: there are no checks
    _replies: Replies

    @property
    def counts(self) -> CoreCounts:
        """The counters so far."""

    @property
    def has_work(self) -> bool:
        """Whether a step may have something to do, though nothing has come in."""

    def add(self, work: Request | IdleWork) -> None:
        """Queue a request or idle work."""

    def finish_load(self, load: Load, num_good: int) -> None:
        """Take what a reader loaded from disk."""

    def step(self) -> None:
        """Do everything that can be done now."""

    def save(self, command: StoreCommand) -> None:
        """Queue a command for the store, after what it depends on."""
        self.cache.saving.add(command)

    def hand_over(self) -> int:
        """Let what ended turns have go to the store now; return how much it has not accepted yet."""
        return len(self.cache.saving)

    def forget(self, namespace: str, agent: str) -> set[BlockHash]:
        """Keep nothing of an agent that is not in its branches; return the hashes of such blocks in memory."""
        return self.background.forget(namespace, agent)

    def settle(self) -> None:
        """Let nothing be under way that writes to blocks before the next step."""

    def seconds_left(self) -> float | None:
        """Return in how many seconds a step is due even if nothing comes in; None if none is."""

    def rest(self) -> None:
        """The thread is about to sleep until something comes in."""

    def fail_all(self, error: RekindleError) -> None:
        """Fail everything that runs or waits."""
        self.background.cancel_all()
        for request in self.scheduler.everybody():
            self._replies.fail(request, error)

    def check(self) -> None:
        """Assert the invariants between steps: those of queues, pool and background work, and then a core's own."""
        self.scheduler.check()
        self.cache.check()
        self.background.check()
