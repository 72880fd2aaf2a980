"""Imports: heads and blocks that other replicas exported, each only as long as that beats computing.

The caller says how long computing would take. An object store that is silent for a sixteenth of that, head and blocks
together, or until loading could no longer win, counts as not having it; what has arrived by then is kept. Any thread.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rekindle.cache.blocks.identity import BlockIdentity
from rekindle.tier.breaker import Breaker
from rekindle.tier.heads import AgentHead, head_of
from rekindle.tier.names import head_name
from rekindle.tier.objects import Objects, TierUnavailable
from rekindle.tier.pace import Pace
from rekindle.tier.records import FetchedBlock, Records
from rekindle.tier.sealing import BadObject

logger = logging.getLogger(__name__)

MOST_SUSPECTS = 1 << 14
# So long the object store may be silent, of the time that computing would take; that is a guess, and waiting must not
# cost more than a tenth (docs/fleet.md).
SILENT_SHARE = 1 / 16


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block and which of its parts to fetch."""

    identity: BlockIdentity
    parts: tuple[int, ...]


class Imports:
    """Fetches what is worth it; waits for at least `wait_s` seconds, even where computing is faster."""

    def __init__(self, objects: Objects, records: Records, breaker: Breaker, pace: Pace, *, wait_s: float) -> None:
        self._wait_s = wait_s
        self.counts: Counter[str] = Counter()
        self.waited_s = 0.0  # by all requests together
        self._objects = objects
        self._records = records
        self._breaker = breaker
        self._pace = pace

    def head(self, namespace: str, agent: str, *, compute_s: float) -> AgentHead | None:
        """Return an agent's head; None if there is none, or it takes too long for what computing would cost."""
        silent_s = max(self._wait_s, SILENT_SHARE * compute_s)
        if self._pace.latency_s > silent_s or not self._breaker.allows():
            return None
        began = time.monotonic()
        try:
            got = self._objects.get(head_name(self._objects.sealer, namespace, agent), timeout_s=silent_s)
            self._answered(len(got[0]) if got is not None else 0, time.monotonic() - began)
            return None if got is None else head_of(got[0], namespace, agent)
        except TierUnavailable as error:
            self._failed(error)
        except BadObject as error:
            self._is_bad(f"the head of agent {agent}", error)
        finally:
            self.waited_s += time.monotonic() - began
        return None

    def most_s(self, compute_s: float) -> float:
        """Return how long a request may wait for what would take `compute_s` seconds to compute."""
        return max(self._wait_s, compute_s)

    def is_worth(self, wanted: Sequence[Wanted], *, compute_s: float) -> bool:
        """Whether loading these blocks is expected to take less time than computing them."""
        num_bytes = sum(self._records.num_bytes(each.parts) for each in wanted)
        return bool(wanted) and self._pace.predict(num_bytes) < self.most_s(compute_s)

    def blocks(
        self, wanted: Sequence[Wanted], *, compute_s: float, num_named: int = 0, waited_s: float = 0.0
    ) -> Iterator[FetchedBlock]:
        """Yield the leading run of these blocks that the tier has, as they arrive; a head names the first ones.

        `waited_s`: how long their request has waited for the object store before.
        """
        if not self.is_worth(wanted, compute_s=compute_s) or not self._breaker.allows():
            return
        began, num_bytes = time.monotonic(), 0
        silent_s = max(self._wait_s, SILENT_SHARE * compute_s - waited_s, self._pace.latency_s)
        most_s = self.most_s(compute_s)
        names = [name for each in wanted for name in self._records.names(each.identity, each.parts)]

        def seconds_left() -> float:
            return min(silent_s, began + most_s - time.monotonic())

        num_certain = sum(len(each.parts) for each in wanted[:num_named])
        arriving = self._objects.get_many(names, seconds_left=seconds_left, num_certain=num_certain)
        try:
            for each in wanted:
                found = {part: next(arriving) for part in each.parts}
                present = {part: data for part, data in found.items() if data is not None}
                if len(present) < len(found):
                    self.counts["missing"] += 1
                    self._suspect(each)
                    break
                block = FetchedBlock(
                    each.identity,
                    {part: self._records.decoded(each.identity, part, data) for part, data in present.items()},
                )
                num_bytes += block.num_bytes
                self.counts["objects"] += len(present)
                self.counts["bytes"] += block.num_bytes
                self.counts["tokens"] += each.identity.num_tokens
                yield block
            self._answered(num_bytes, time.monotonic() - began)
        except TierUnavailable as error:
            self._failed(error)
        except BadObject as error:
            self._is_bad(f"block {each.identity.hash.hex()}", error)
            self._suspect(each)
        finally:
            arriving.close()
            self.waited_s += time.monotonic() - began

    def _suspect(self, wanted: Wanted) -> None:
        """Have a block exported again with the next turn that contains it."""
        if len(self._objects.suspects) < MOST_SUSPECTS:
            self._objects.suspects.update(self._records.names(wanted.identity, wanted.parts))

    def _answered(self, num_bytes: int, seconds: float) -> None:
        self._breaker.succeeded()
        self._pace.saw(num_bytes, seconds)

    def _failed(self, error: TierUnavailable) -> None:
        self.counts["failures"] += 1
        self._breaker.failed(str(error))
        logger.info("not imported from the object tier: %s", error)

    def _is_bad(self, what: str, error: BadObject) -> None:
        self.counts["bad_objects"] += 1
        logger.warning("%s in the object tier is not used: %s", what, error)
