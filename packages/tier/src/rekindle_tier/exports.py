"""Exports: what the store has made durable goes to the object tier, blocks before the head that names them.

Owns the thread that does it and the queue of branches that wait. A branch that ends again while it waits is exported
once. Nothing here is lost while the object store is away, or while a process that hangs keeps heads locked: branches
wait, up to `MOST_WAITING`, and then the oldest are dropped and counted; their next turn exports all of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np

from rekindle.agent_ids import kind_of
from rekindle.store.branch_text import BranchText
from rekindle.store.values import SequenceRecord, StoredBlock
from rekindle.worker import Death, Worker
from rekindle_tier.heads import AgentHead, FoundHead, NewerHead, read_head
from rekindle_tier.objects import ANSWER_S, HeadsLocked, Objects, TierUnavailable
from rekindle_tier.pace import Breaker
from rekindle_tier.records import Records
from rekindle_tier.sealing import BadObject, block_name, head_name

logger = logging.getLogger(__name__)
Key = tuple[str, str, int]  # namespace, agent, branch

MOST_WAITING = 4096  # branches
MOST_KNOWN = 1 << 16  # names of objects that were written or seen lately
KNOWN_S = 1800.0  # an object that no head names is not collected within twice as long
AT_ONCE = 16  # blocks that are read and sent together
TRIES = 16  # of swapping a head that other replicas write, too
LOOK_AGAIN_S = 0.25


class Exports:
    """One thread that exports branches of a store, each with at most `max_branches` in its agent's head."""

    def __init__(self, objects: Objects, records: Records, breaker: Breaker, *, max_branches: int) -> None:
        self.counts: Counter[str] = Counter()
        self.locked: str | None = None  # which process' lock keeps heads from being written
        self._objects = objects
        self._records = records
        self._breaker = breaker
        self._max_branches = max_branches
        self._waiting: OrderedDict[Key, None] = OrderedDict()
        self._is_busy = False
        self._is_stopped = False
        self._changed = threading.Condition()
        self._known: OrderedDict[str, float] = OrderedDict()
        self.worker = Worker("tier-exports", self._run, on_death=self._died)

    @property
    def num_waiting(self) -> int:
        """Branches that are not exported yet."""
        return len(self._waiting) + self._is_busy

    def put(self, namespace: str, agent: str, branch: int) -> None:
        """Export a branch as the store has it by then. Any thread; never blocks."""
        if not kind_of(agent).is_memory:
            return
        with self._changed:
            self._waiting[namespace, agent, branch] = None
            self._waiting.move_to_end((namespace, agent, branch))
            while len(self._waiting) > MOST_WAITING:
                self._waiting.popitem(last=False)
                self.counts["dropped"] += 1
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything put before is exported; False on a timeout, or if the thread has died."""
        with self._changed:
            self._changed.wait_for(lambda: not self.num_waiting or self.worker.death is not None, timeout_s)
            return not self.num_waiting

    def end(self) -> None:
        """Let the thread end after what it is doing; what waits is not exported."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _died(self, death: Death) -> None:
        logger.error("%s: nothing is exported to the object tier any more", death)
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        while (key := self._next()) is not None:
            try:
                self._export(*key)
                self._breaker.succeeded()
                self.locked = None
            except TierUnavailable as error:
                self._breaker.failed(str(error))
                self._try_later(key)
            except HeadsLocked as error:  # the tier answers: imports go on
                if self.locked is None:
                    logger.warning("nothing is exported to the object tier: %s", error)
                self.locked = str(error)
                self._try_later(key)
            except NewerHead as error:
                logger.warning("agent %s is not exported to the object tier: %s", key[1], error)
                self.counts["failures"] += 1
            except Exception:
                # Border: a branch that cannot be exported starts cold elsewhere, the thread continues.
                logger.exception("agent %s could not be exported to the object tier", key[1])
                self.counts["failures"] += 1
            finally:
                with self._changed:
                    self._is_busy = False
                    self._changed.notify_all()

    def _try_later(self, key: Key) -> None:
        """Have a branch wait again: after all others, as it may be its own objects that cannot be written."""
        self.counts["failures"] += 1
        with self._changed:
            self._waiting.setdefault(key)

    def _next(self) -> Key | None:
        """Wait for a branch, and until the object store may be asked; None: stop."""
        with self._changed:
            while not self._is_stopped:
                if self._waiting and self._breaker.allows():
                    self._is_busy = True
                    return self._waiting.popitem(last=False)[0]
                self._changed.wait(LOOK_AGAIN_S if self._waiting else None)
            return None

    def _export(self, namespace: str, agent: str, number: int) -> None:
        ended = self._records.ended(namespace, agent, number)
        if ended is None:
            return
        record, ids = ended
        stored = self._records.stored(record.root, ids)
        num_tokens = sum(block.identity.num_tokens for block in stored)
        branch = _branch(record, stored, num_tokens)
        if not num_tokens:
            return
        name = head_name(self._objects.sealer, namespace, agent)
        for _ in range(TRIES):
            found = self.read_head(namespace, agent)
            changed = found.head.with_branch(branch, most=self._max_branches)
            if changed is found.head:
                return
            self._send(stored, found.head)
            if self._objects.swap(name, changed.encode(), found.version) is not None:
                self.counts["heads"] += 1
                return
            self.counts["conflicts"] += 1
        raise TierUnavailable(f"the head of agent {agent} changed {TRIES} times while it was written")

    def read_head(self, namespace: str, agent: str) -> FoundHead:
        """Return an agent's head as it is in the tier, to be replaced; an empty one if it is damaged or another's.

        Raises NewerHead and TierUnavailable.
        """
        try:
            return read_head(self._objects, namespace, agent, timeout_s=ANSWER_S)
        except NewerHead:
            raise
        except BadObject as error:
            self.counts["bad_objects"] += 1
            logger.warning("the head of agent %s in the object tier is replaced: %s", agent, error)
            return FoundHead(AgentHead(namespace, agent), error.version)

    def _send(self, stored: Sequence[StoredBlock], head: AgentHead) -> None:
        """Write the objects of these blocks that neither the head names nor the tier was seen to have."""
        named = {block.hash for each in head.branches for block in each.blocks(self._records.block_tokens)}
        missing = [block for block in stored if block.identity.hash not in named or self._is_doubtful(block)]
        for start in range(0, len(missing), AT_ONCE):
            wanted = [block for block in missing[start : start + AT_ONCE] if not self._is_there(block)]
            records = self._records.read(wanted) if wanted else []
            if len(records) < sum(len(block.places) for block in wanted):
                raise RuntimeError("the store could not read what it had made durable")
            self._objects.put_many(records)
            for name, data in records:
                self._saw(name)
                self._objects.suspects.discard(name)
                self.counts["objects"] += 1
                self.counts["bytes"] += len(data)

    def _is_doubtful(self, block: StoredBlock) -> bool:
        """Whether objects of a block that a head names may be missing: windows and states are written for some of the
        texts that have it, and others were found to be damaged."""
        names = (block_name(block.identity.hash, part) for part in block.parts)
        return len(block.places) > 1 or any(name in self._objects.suspects for name in names)

    def _is_there(self, block: StoredBlock) -> bool:
        """Whether all objects of a block are in the tier, and so young that none will be collected soon."""
        return all(self._is_known(block_name(block.identity.hash, part)) for part in sorted(block.parts))

    def _is_known(self, name: str) -> bool:
        if name in self._objects.suspects:
            return False
        seen = self._known.get(name)
        if seen is not None and time.monotonic() - seen < KNOWN_S:
            return True
        modified = self._objects.modified(name)
        if modified is None or time.time() - modified > KNOWN_S:
            return False
        self._saw(name)
        return True

    def _saw(self, name: str) -> None:
        self._known[name] = time.monotonic()
        self._known.move_to_end(name)
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)


def _branch(record: SequenceRecord, stored: Sequence[StoredBlock], num_tokens: int) -> BranchText:
    """Return a branch for its agent's head, as far as its blocks are stored."""
    parts: dict[int, list[int]] = {}
    for at, block in enumerate(stored):
        for part in sorted(block.parts - {0}):
            parts.setdefault(part, []).append(at)
    ids = [block.identity.ids for block in stored]
    return BranchText(
        root=record.root,
        ids=np.concatenate(ids) if ids else np.empty(0, dtype=np.uint32),
        canonical_tokens=min(record.canonical_tokens, num_tokens),
        last_use=record.last_use,
        turn_ends=tuple(end for end in record.turn_ends if end <= num_tokens),
        parts={part: tuple(blocks) for part, blocks in parts.items()},
    )
