"""Maintenance of a tier: what other replicas have purged is purged here, and now and then one replica collects.

Owns the thread that looks. Purges are noticed within `LOOK_S`, also of agents that nobody asks for here. It measures
how long an answer takes, too: where that was too long for requests, none of them would find out that it no longer is.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable

from rekindle.tier.collection import Collected, Collection
from rekindle.tier.heads import NewerHead, read_note
from rekindle.tier.objects import HeadsLocked, Objects, TierUnavailable
from rekindle.tier.pace import Breaker, Pace
from rekindle.tier.sealing import PURGED, BadObject, purged_name
from rekindle.worker import Death, Worker

logger = logging.getLogger(__name__)

LOOK_S = 60.0
COLLECT_S = 3600.0  # between two collections, whichever replicas make them
LEASE = "collected"  # the object that says when the last one began
NOTHING, MEASURED, MEASURE_S = "nothing", 10, 5.0  # asked for at each look, how often, and how long each may take
Forget = Callable[[str, str, float], object]  # namespace, agent, when it was purged (wall clock)
Agents = Callable[[], Iterable[tuple[str, str]]]  # the (namespace, agent) that are known here


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
