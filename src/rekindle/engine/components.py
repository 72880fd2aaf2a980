"""The components of a running engine: started together, stopped in the order that loses nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

from rekindle.config import StoreSettings
from rekindle.engine.core.interface import Core
from rekindle.engine.core.loop import EngineLoop
from rekindle.engine.gauges import StorePlace, engine_stats, problems
from rekindle.engine.intake.anticipation import Anticipation
from rekindle.engine.intake.intake import Intake
from rekindle.engine.intake.object_tier import ObjectTier, TierImports
from rekindle.engine.intake.rendering import Renderer
from rekindle.engine.memory.adoption import Adoption
from rekindle.engine.memory.agent_commands import AgentCommands
from rekindle.engine.memory.memory import AgentMemory
from rekindle.engine.recent import Recent
from rekindle.engine.started_once import Prefault, WeightsWriter
from rekindle.engine.types import EngineStats, Report
from rekindle.errors import StoreError, Unavailable
from rekindle.model.sampling_defaults import SamplingDefaults
from rekindle.spec import ModelSpec
from rekindle.store.warm import WarmStore
from rekindle.text.prompt import PromptEncoder
from rekindle.text.replies import ReplyFormat
from rekindle.worker import Death, Worker

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0
EXPORT_TIMEOUT_S = 30.0  # for what waits to reach the object tier


class Backend(Protocol):
    """The server that computes where this process does not. Any thread may call any method."""

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The threads that speak with it."""

    def problem(self) -> str | None:
        """Return what is wrong with it and what to do; None if all is well. Never blocks."""

    def stop(self) -> None:
        """Close all connections and join the threads; calling twice is safe."""


@dataclass(frozen=True)
class Components:
    """The components of a running engine, used by `Engine`."""

    device: str
    spec: ModelSpec
    encoder: PromptEncoder
    reply_format: ReplyFormat
    renderer: Renderer
    notes: tuple[str, ...]
    sampling: SamplingDefaults
    promise: str
    max_context: int
    num_warm_agents: int
    core: Core
    loop: EngineLoop
    intake: Intake
    memory: AgentMemory
    anticipation: Anticipation
    agent_commands: AgentCommands
    started: Mapping[str, float]
    store: WarmStore | None
    tier: ObjectTier | None
    adoption: Adoption | None  # with a store
    imports: TierImports | None  # with a tier
    refused: str | None  # why an enabled store could not be opened
    store_settings: StoreSettings  # as given, with the slot that was claimed
    place: StorePlace | None
    secret: bytes  # of the store, or of this run without one
    backend: Backend | None = None  # which computes, if this engine does not
    has_kv: bool = True  # blocks hold KV; else they stand for texts, and the backend has it
    prefault: Prefault | None = None  # with a store
    weights_writer: WeightsWriter | None = None
    reports: Recent[Report] = field(default_factory=Recent)  # of finished requests of named agents

    @property
    def sees(self) -> bool:
        """Whether pictures in messages are read."""
        return self.encoder.pictures is not None

    def start(self) -> None:
        """Start the threads: store, intake, engine, what is done once after a start; all or none."""
        try:
            if self.store is not None:
                self.store.start()
            if self.tier is not None:
                self.tier.start()
            self.intake.start()
            self.loop.start(self.core)
            for once in self._once():
                once.start()
        except BaseException:
            self._stop()
            raise

    def flush(self, timeout_s: float) -> bool:
        """Wait until the turns that ended before this call are durable; False on a timeout, or if a thread they need
        has died, in which case the others still save what they can."""
        deadline = time.monotonic() + timeout_s
        try:
            is_saved = self._is_handed_over(deadline)
            if self.store is not None:
                is_saved &= self.store.flush(_left(deadline))
                # Wait until the intake has handled the notices of what was saved.
                self.intake.call(lambda: None).result(max(1.0, _left(deadline)))
        except (FutureTimeout, Unavailable):
            return False
        except StoreError:
            if self.deaths():
                return False
            raise
        return is_saved

    def _is_handed_over(self, deadline: float) -> bool:
        """Wait until the store has every ended turn; False if a thread on its way has died."""
        handed_over = True
        try:
            self.intake.call(lambda: None).result(_left(deadline))
        except Unavailable:
            handed_over = False
        try:
            while self.loop.call(lambda core: core.hand_over()).result(_left(deadline)):
                time.sleep(0.001)
        except Unavailable:
            handed_over = False
        return handed_over

    def deaths(self) -> tuple[Death, ...]:
        """Return the threads that have died. Any thread; never blocks."""
        workers = [self.intake.worker, self.loop.worker, *(self.store.workers if self.store is not None else ())]
        if self.backend is not None:
            workers.extend(self.backend.workers)
        return tuple(worker.death for worker in workers if worker.death is not None)

    def close(self) -> None:
        """Stop gracefully: refuse new requests, make finished turns durable, then stop the threads and the store."""
        self.loop.refuse()
        if not self.flush(CLOSE_TIMEOUT_S):
            why = "; ".join(map(str, self.deaths())) or f"within {CLOSE_TIMEOUT_S:.0f} s"
            logger.error("not every turn could be saved (%s); the unsaved ones start cold", why)
        self._stop()

    def _stop(self) -> None:
        self.loop.stop()
        if self.backend is not None:
            self.backend.stop()
        self.intake.stop()
        if self.tier is not None and not self.tier.stop(EXPORT_TIMEOUT_S):
            logger.warning("not every turn reached the object tier; other replicas go on from what did")
        if self.store is not None:
            self.store.close()
        for once in self._once():
            once.stop()

    def _once(self) -> Iterator[Prefault | WeightsWriter]:
        return (each for each in (self.prefault, self.weights_writer) if each is not None)

    def stats(self) -> EngineStats:
        """Return statistics: read on the engine thread between two steps, those of the store on the caller's."""
        store = asdict(self.store.stats()) if self.store is not None else None
        # Read before querying the engine: turns that become idle work meanwhile reach it before the query.
        pending = self.anticipation.num_pending
        stats = self.loop.call(lambda core: engine_stats(core, self.memory.book, self.started, store)).result()
        tier = self.tier.stats() if self.tier is not None else None
        return replace(stats, num_background=stats.num_background + pending, tier=tier)

    def problems(self) -> tuple[str, ...]:
        """Return what does not work, a sentence each."""
        stats = self.store.stats() if self.store is not None else None
        found = problems(stats, is_in_place=self.is_in_place(), is_running=self.loop.is_running, deaths=self.deaths())
        if self.tier is not None and (problem := self.tier.problem()) is not None:
            found = (*found, problem)
        if self.backend is not None and (problem := self.backend.problem()) is not None:
            found = (*found, problem)
        if self.refused is None:
            return found
        what = "nothing is read from disk or saved, what agents remember ends with the engine"
        return (*found, f"{what}: {self.refused}; then start it again")

    def is_in_place(self) -> bool:
        """Whether the store's directory is still in its place."""
        return self.place is None or self.place.is_there()

    def check(self) -> None:
        """Assert every invariant, each on the thread that owns it, after saving every ended turn."""
        self.flush(CLOSE_TIMEOUT_S)
        self.loop.call(lambda core: core.check()).result()
        self.intake.call(self.memory.check).result()
        self.intake.call(self.anticipation.check).result()
        if self.store is not None:
            self.store.check()


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
