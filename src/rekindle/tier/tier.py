"""The object tier of one engine: exports what its store saves, imports what other replicas have exported.

Owns the connection and its parts. Nothing here raises into a request, except that an agent is not said to be forgotten
before the tier has noted it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Self

from rekindle.config import TierSettings
from rekindle.errors import StoreError
from rekindle.spec import KVLayout
from rekindle.store.warm import WarmStore
from rekindle.tier.collection import Collection, Limits
from rekindle.tier.exports import TRIES, Exports
from rekindle.tier.heads import AgentHead, FoundHead, NewerHead, note_of, read_head
from rekindle.tier.imports import Imports
from rekindle.tier.location import directory_of, open_location
from rekindle.tier.maintenance import Agents, Forget, Maintenance
from rekindle.tier.objects import ANSWER_S, HeadsLocked, Objects, TierUnavailable
from rekindle.tier.pace import Breaker, Pace
from rekindle.tier.records import Records
from rekindle.tier.sealing import BadObject, Sealer, head_name, purged_name


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


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Objects of a forgotten agent that were deleted, and those that stay because other agents share them."""

    objects_deleted: int
    objects_shared: int


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
                found = self._head(namespace, agent)
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

    def _head(self, namespace: str, agent: str) -> FoundHead:
        try:
            return read_head(self._objects, namespace, agent, timeout_s=ANSWER_S)
        except NewerHead:
            raise
        except BadObject as error:
            return FoundHead(AgentHead(namespace, agent), error.version)

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

    def stats(self) -> TierStats:
        """Return the figures."""
        exported, imported = self.exports.counts, self.imports.counts.sums()
        return TierStats(
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
