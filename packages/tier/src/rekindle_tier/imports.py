"""Imports: heads and blocks that other replicas exported, each only as long as that beats computing.

The caller says how long computing would take. A request waits as `patience` says: an object store that is silent, or
from which blocks come more slowly than they are computed, costs at most a twelfth; what has arrived by then is used.
Any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rekindle.cache.blocks.hashing import BlockIdentity
from rekindle.store.values import BlockBytes
from rekindle_tier.heads import AgentHead, read_head
from rekindle_tier.objects import AT_ONCE, NoAnswer, Objects, TierUnavailable
from rekindle_tier.pace import Breaker, Pace, Patience, can_ask, head_s
from rekindle_tier.records import Records
from rekindle_tier.sealing import BadObject

logger = logging.getLogger(__name__)

MOST_SUSPECTS = 1 << 14
# A request that has waited for so many times the usual, and so long, has found the object store silent. Others had too
# little time themselves: on a busy machine any answer may be late by some milliseconds.
EVIDENT, EVIDENT_S = 4.0, 0.025
MISSES = 4  # of these in a row, and nobody asks for blocks for a while


class Tally:
    """Sums by name, each 0 until something was added. Any thread; none of what is added is lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()

    def add(self, **numbers: int) -> None:
        """Add to some of the sums."""
        with self._lock:
            for name, number in numbers.items():
                self._sums[name] += number

    def sums(self) -> Mapping[str, int]:
        """Return all of them as they are now, as of one moment."""
        with self._lock:
            return self._sums.copy()


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block and which of its parts to fetch."""

    identity: BlockIdentity
    parts: tuple[int, ...]


class Imports:
    """Fetches what is worth it; waits for at least `wait_s` seconds of the `clock`, even where computing is faster."""

    def __init__(
        self,
        objects: Objects,
        records: Records,
        breaker: Breaker,
        pace: Pace,
        *,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wait_s = wait_s
        self._clock = clock
        self.counts = Tally()  # of all requests together; "waited_ns" is what they waited
        self._objects = objects
        self._records = records
        self._breaker = breaker
        self._late = Breaker(clock, failures=MISSES)  # of blocks alone: all else may be quick
        self._pace = pace

    def head(self, namespace: str, agent: str, *, compute_s: float) -> AgentHead | None:
        """Return an agent's head; None if there is none, or it takes too long for what computing would cost."""
        can = can_ask(self._pace.latency_s, compute_s, wait_s=self._wait_s)
        if not can or not self._breaker.allows():
            return None
        began, timeout_s = self._clock(), head_s(compute_s, wait_s=self._wait_s)
        try:
            found = read_head(self._objects, namespace, agent, timeout_s=timeout_s)
            self._answered(found.num_bytes, self._clock() - began)
            return None if found.version is None else found.head
        except TierUnavailable as error:
            self._failed(error, 0)
        except BadObject as error:
            self._is_bad(f"the head of agent {agent}", error)
        finally:
            self.counts.add(waited_ns=round(1e9 * (self._clock() - began)))
        return None

    def most_s(self, compute_s: float) -> float:
        """Return how long a request may wait for what would take `compute_s` seconds to compute."""
        return max(self._wait_s, compute_s)

    def blocks(
        self,
        wanted: Sequence[Wanted],
        *,
        rest_s: Callable[[int], float],
        num_named: int = 0,
        waited_s: float = 0.0,
    ) -> Iterator[BlockBytes]:
        """Yield the leading run of these blocks that the tier has, as they arrive; a head names the first ones.

        `rest_s`: how long computing the rest would take, in seconds, once so many of their tokens have come.
        `waited_s`: how long their request has waited for the object store before.
        """
        pace, latency_s, wait_s = self._pace, self._pace.latency_s, self._wait_s
        patience = Patience(rest_s(0), wait_s=wait_s, waited_before_s=waited_s, latency_s=latency_s, clock=self._clock)
        is_worth = pace.predict(self._num_bytes(wanted)) < patience.most_s and latency_s <= patience.seconds_left()
        if not wanted or not is_worth or not self._breaker.allows() or not self._late.allows():
            return
        num_bytes = num_tokens = 0
        names = [name for each in wanted for name in self._records.names(each.identity, each.parts)]
        num_certain = sum(len(each.parts) for each in wanted[:num_named])
        most, left_s = self._records.most_bytes, patience.seconds_left
        arriving = self._objects.get_many(names, seconds_left=left_s, most_bytes=most, num_certain=num_certain)
        try:
            for each in wanted:
                block = self._next(each, arriving)
                if block is None:
                    break
                num_bytes += block.num_bytes
                num_tokens += each.identity.num_tokens
                patience.left_to_compute(rest_s(num_tokens))
                self._late.succeeded()
                yield block
            self._answered(num_bytes, patience.waited_s)
        except NoAnswer as error:
            if num_bytes:
                self._crawled(num_bytes, patience.waited_s)
            else:
                self._failed(error, self._num_bytes(wanted[: AT_ONCE if num_certain else 1]))
        except TierUnavailable as error:
            self._failed(error, 0)
        except BadObject as error:
            self._is_bad(f"block {each.identity.hash.hex()}", error)
            self._suspect(each)
        finally:
            arriving.close()
            self.counts.add(waited_ns=round(1e9 * patience.waited_s))

    def _next(self, wanted: Wanted, arriving: Iterator[bytes | None]) -> BlockBytes | None:
        """Return a block from the next objects; None if the tier lacks any of its parts."""
        found = {part: next(arriving) for part in wanted.parts}
        present = {part: data for part, data in found.items() if data is not None}
        if len(present) < len(found):
            self.counts.add(missing=1)
            self._suspect(wanted)
            return None
        payloads = {part: self._records.decoded(wanted.identity, part, data) for part, data in present.items()}
        block = BlockBytes(wanted.identity, payloads)
        self.counts.add(objects=len(present), bytes=block.num_bytes, tokens=wanted.identity.num_tokens)
        return block

    def _num_bytes(self, wanted: Sequence[Wanted]) -> int:
        return sum(self._records.num_bytes(each.parts) for each in wanted)

    def _suspect(self, wanted: Wanted) -> None:
        """Have a block exported again with the next turn that contains it."""
        if len(self._objects.suspects) < MOST_SUSPECTS:
            self._objects.suspects.update(self._records.names(wanted.identity, wanted.parts))

    def _answered(self, num_bytes: int, seconds: float) -> None:
        self._breaker.succeeded()
        self._pace.saw(num_bytes, seconds)

    def _crawled(self, num_bytes: int, seconds: float) -> None:
        """Note that the object store answers, more slowly than the rest is computed."""
        self.counts.add(slow=1)
        self._breaker.succeeded()
        self._pace.crawled(num_bytes, seconds)
        logger.info("an import from the object tier was given up: %d bytes came in %.3g s", num_bytes, seconds)

    def _failed(self, error: TierUnavailable, num_bytes: int) -> None:
        """Note that nothing has come of an answer of so many bytes."""
        self.counts.add(failures=1)
        if isinstance(error, NoAnswer) and error.waited_s < max(EVIDENT_S, EVIDENT * self._pace.predict(num_bytes)):
            self._pace.missed(num_bytes, error.waited_s)
            if num_bytes:
                self._late.failed(str(error))
        else:
            self._breaker.failed(str(error))
        logger.info("not imported from the object tier: %s", error)

    def _is_bad(self, what: str, error: BadObject) -> None:
        self.counts.add(bad_objects=1)
        logger.warning("%s in the object tier is not used: %s", what, error)
