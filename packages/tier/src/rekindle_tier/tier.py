"""The object tier of one engine: exports what its store saves, imports what other replicas have exported.

Owns the connection and its parts. Nothing here raises into a request, except that an agent is not said to be forgotten
before the tier has noted it.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from rekindle.config import TierSettings
from rekindle.config.services import directory_of
from rekindle.engine.intake.object_tier import Forgotten, Replica
from rekindle.errors import StoreError
from rekindle.spec import KVLayout
from rekindle.store.warm import WarmStore
from rekindle.worker import Death, Worker
from rekindle_tier.collection import Collected, Collection, Limits
from rekindle_tier.exports import TRIES, Exports
from rekindle_tier.heads import AgentHead, NewerHead, note_of, read_note
from rekindle_tier.imports import Imports
from rekindle_tier.location import open_location
from rekindle_tier.objects import HeadsLocked, Objects, TierUnavailable
from rekindle_tier.pace import Breaker, Pace
from rekindle_tier.prompts import PromptImports
from rekindle_tier.records import Records
from rekindle_tier.sealing import PURGED, BadObject, Sealer, head_name, purged_name

logger = logging.getLogger(__name__)

LOOK_S = 60.0
COLLECT_S = 3600.0  # between two collections, whichever replicas make them
LEASE = "collected"  # the object that says when the last one began
NOTHING, MEASURED, MEASURE_S = "nothing", 10, 5.0  # asked for at each look, how often, and how long each may take
Forget = Callable[[str, str, float], object]  # namespace, agent, when it was purged (wall clock)
Agents = Callable[[], Iterable[tuple[str, str]]]  # the (namespace, agent) that are known here


# Maintenance of a tier: what other replicas have purged is purged here, and now and then one replica collects.
#
# Owns the thread that looks. Purges are noticed within `LOOK_S`, also of agents that nobody asks for here. It measures
# how long an answer takes, too: where that was too long for requests, none of them would find out that it no longer is.


class Maintenance:
    """One thread. `agents` and `forget` are called on it."""

    def __init__(self, objects: Objects, collection: Collection, breaker: Breaker, pace: Pace) -> None:
        self.collected: Collected | None = None
        self._objects = objects
        self._collection = collection
        self._breaker = breaker
        self._pace = pace
        self._seen: dict[str, float] = {}
        self._stopped = threading.Event()
        self._agents: Agents = tuple
        self._forget: Forget = lambda namespace, agent, purged_at: False
        self.worker = Worker("tier-maintenance", self._run, on_death=self._died)

    def connect(self, agents: Agents, forget: Forget) -> None:
        """Say which agents are known here, and what to call for one that another replica has purged."""
        self._agents, self._forget = agents, forget

    def end(self) -> None:
        """Let the thread end after what it is doing."""
        self._stopped.set()

    def _died(self, death: Death) -> None:
        logger.error("%s: the object tier is not collected by this replica any more", death)

    def _run(self) -> None:
        wait_s = 0.0
        while not self._stopped.wait(wait_s):
            wait_s = LOOK_S * random.uniform(0.8, 1.2)  # replicas that started together do not ask together
            if not self._breaker.allows():
                continue
            try:
                self.measure()
                self.forget_purged()
                self.collect_if_due()
                self._breaker.succeeded()
            except TierUnavailable as error:
                if not self._stopped.is_set():
                    self._breaker.failed(str(error))
            except (NewerHead, HeadsLocked) as error:
                logger.warning("the object tier is not collected: %s", error)
            except Exception:
                # Border: maintenance that fails is tried again, and nothing depends on it.
                logger.exception("maintenance of the object tier failed")

    def measure(self) -> None:
        """Ask for an object that is not there, so that the next request knows how long an answer takes."""
        for _ in range(MEASURED):
            began = time.monotonic()
            self._objects.modified(NOTHING, timeout_s=MEASURE_S)
            self._pace.saw(0, time.monotonic() - began)

    def forget_purged(self) -> None:
        """Forget here what other replicas have purged since the last look."""
        news = [each for each in self._objects.list(PURGED) if self._seen.get(each.name) != each.modified]
        if not news:
            return
        sealer = self._objects.sealer
        here = {purged_name(sealer, *agent): agent for agent in self._agents()}
        for each in news:
            if each.name in here:
                try:
                    got = self._objects.get(each.name)
                    if got is not None:
                        self._forget(*here[each.name], read_note(got[0]))
                except BadObject as error:
                    logger.warning("a note that an agent was purged is damaged: %s", error)
            self._seen[each.name] = each.modified

    def collect_if_due(self) -> None:
        """Collect, unless a replica has done so in the last hour."""
        try:
            got = self._objects.get(LEASE)
        except BadObject as error:
            got = (b"0", error.version) if error.version is not None else None
        now = time.time()
        if got is not None and now - json.loads(got[0]) < COLLECT_S:
            return
        if self._objects.swap(LEASE, json.dumps(now).encode(), None if got is None else got[1]) is None:
            return  # another replica does it
        self.collected = self._collection.run()
        logger.info("the object tier was collected: %s", self.collected)


@dataclass(frozen=True, slots=True)
class TierStats:
    """Figures of an object tier since it was opened; bytes are those of objects before encryption.

    `is_answering` is False while failures in a row keep everybody from asking. `waiting_exports` are branches;
    `dropped_exports` were given up while the object store was away. `waited_s`: by all requests together, for what they
    imported or for an object store that was silent. `slow_imports` were given up as computing the rest was faster.
    """

    location: str
    is_answering: bool
    last_error: str | None
    waiting_exports: int
    dropped_exports: int
    exported_heads: int
    exported_objects: int
    exported_bytes: int
    head_conflicts: int
    imported_objects: int
    imported_bytes: int
    imported_tokens: int
    waited_s: float
    slow_imports: int
    missing_objects: int
    bad_objects: int
    failures: int
    latency_ms: float
    bytes_per_s: float
    stored_bytes: int | None  # of blocks, as of the last collection by this replica


class ObjectTier:
    """An open tier. `start` it after the store, once it is connected; `stop` it before."""

    def __init__(
        self, objects: Objects, records: Records, location: str, limits: Limits, *, max_branches: int, wait_s: float
    ) -> None:
        self.breaker = Breaker(time.monotonic)
        self.pace = Pace()
        self.exports = Exports(objects, records, self.breaker, max_branches=max_branches)
        self.imports = Imports(objects, records, self.breaker, self.pace, wait_s=wait_s)
        self._collection = Collection(objects, records.block_tokens, limits)
        self._maintenance = Maintenance(objects, self._collection, self.breaker, self.pace)
        self._objects = objects
        self._location = location

    @classmethod
    def open(
        cls, settings: TierSettings, store: WarmStore, *, fingerprint: bytes, layout: KVLayout, max_branches: int
    ) -> Self:
        """Open the tier of one model; ConfigError if the location cannot be used. Nothing is asked of a bucket yet."""
        assert settings.location is not None, "a tier has a location"
        place = open_location(settings.location)
        objects = Objects(place, Sealer(store.secret), fingerprint.hex(), directory=directory_of(settings.location))
        records = Records(store, layout)
        limits = Limits(settings.num_bytes, settings.ttl_s)
        return cls(objects, records, settings.location, limits, max_branches=max_branches, wait_s=settings.wait_s)

    def connect(self, agents: Agents, forget: Forget) -> None:
        """Say which agents are known here, and what to call for one that another replica has purged."""
        self._maintenance.connect(agents, forget)

    def start(self) -> None:
        """Start the threads."""
        self.exports.worker.start()
        self._maintenance.worker.start()

    def stop(self, timeout_s: float) -> bool:
        """Export what waits, for at most `timeout_s` seconds, not at all if nobody answers; return whether all of it
        was exported."""
        if self.exports.worker.is_alive:
            self.exports.flush(0.0 if self.breaker.is_open else timeout_s)
        is_done = not self.exports.num_waiting
        self.exports.end()
        self._maintenance.end()
        self._objects.close()
        self.exports.worker.join()
        self._maintenance.worker.join()
        return is_done

    def forget(self, namespace: str, agent: str, *, is_here: bool) -> Forgotten | None:
        """Forget an agent on all replicas: its head becomes a tombstone, which each of them finds, and the objects that
        no other agent's head names are deleted. Reads every head in the tier. None: the tier had nothing of it; then
        there is a tombstone only if this replica knows the agent (`is_here`), as what it knows may wait to be exported.

        StoreError if the tier does not answer; what it has done by then stays done.
        """
        sealer, now = self._objects.sealer, time.time()
        name, done = head_name(sealer, namespace, agent), "nothing was forgotten"
        try:
            for _ in range(TRIES):
                found = self.exports.read_head(namespace, agent)
                if found.version is None and not is_here:
                    return None
                head, forgotten = found.head, AgentHead(namespace, agent, purged_at=now)
                if self._objects.swap(name, forgotten.encode(), found.version) is not None:
                    done = "the agent is forgotten in the object tier, and not here"
                    self._objects.put(purged_name(sealer, namespace, agent), note_of(now))
                    return Forgotten(*self._collection.delete_unshared(head)) if head.branches else None
        except TierUnavailable as error:
            self.breaker.failed(str(error))
            raise StoreError(
                f"{done}: the object tier, where other replicas would find agent {agent!r} again, cannot be reached "
                f"({error}); try again"
            ) from error
        except NewerHead as error:
            raise StoreError(f"{done}: {error}") from error
        except HeadsLocked as error:
            raise StoreError(f"{done}: {error}; try again") from error
        raise StoreError(f"nothing was forgotten: agent {agent!r} is written by other replicas all the time; try again")

    def problem(self) -> str | None:
        """Return what does not work, in a sentence; None if all is well."""
        death = self.exports.worker.death or self._maintenance.worker.death
        if death is not None:
            return str(death)
        if not self.breaker.is_open:
            return self._locked()
        return (
            f"the object tier {self._location} does not answer ({self.breaker.reason}): requests are computed from "
            f"what this machine has, and {self.exports.num_waiting} branches wait to be exported"
        )

    def _locked(self) -> str | None:
        if (locked := self.exports.locked) is None:
            return None
        waiting = self.exports.num_waiting
        return f"heads in the object tier {self._location} cannot be written: {locked}, and {waiting} branches wait"

    def export(self, namespace: str, agent: str, branch: int) -> None:
        """Export a branch as the store has it by then. Any thread; never blocks."""
        self.exports.put(namespace, agent, branch)

    def stats(self) -> Mapping[str, Any]:
        """Return the figures, as `TierStats` has them."""
        exported, imported = self.exports.counts, self.imports.counts.sums()
        found = TierStats(
            location=self._location,
            is_answering=not self.breaker.is_open,
            last_error=self.breaker.reason,
            waiting_exports=self.exports.num_waiting,
            dropped_exports=exported["dropped"],
            exported_heads=exported["heads"],
            exported_objects=exported["objects"],
            exported_bytes=exported["bytes"],
            head_conflicts=exported["conflicts"],
            imported_objects=imported["objects"],
            imported_bytes=imported["bytes"],
            imported_tokens=imported["tokens"],
            waited_s=imported["waited_ns"] / 1e9,
            slow_imports=imported["slow"],
            missing_objects=imported["missing"],
            bad_objects=exported["bad_objects"] + imported["bad_objects"],
            failures=exported["failures"] + imported["failures"],
            latency_ms=1e3 * self.pace.latency_s,
            bytes_per_s=self.pace.bytes_per_s,
            stored_bytes=self._maintenance.collected.bytes_left if self._maintenance.collected is not None else None,
        )
        return asdict(found)


def open_tier(replica: Replica) -> tuple[ObjectTier, PromptImports]:
    """Open the tier of an engine, and what imports from it before prompts are computed; ConfigError as `open`."""
    tier = ObjectTier.open(
        replica.settings,
        replica.store,
        fingerprint=replica.fingerprint,
        layout=replica.layout,
        max_branches=replica.max_branches,
    )
    tier.connect(replica.agents, replica.forget)
    return tier, PromptImports(tier.imports, replica)
