"""The slots of a llama-server: whose tokens each has, which are free, and which one a prompt takes.

    free ──hold──▶ busy: computes a request, or its state is read ──free──▶ free

Owns what we believe of them; llama-server compares tokens by itself, so a wrong belief costs time and nothing else.
Called on the engine's thread only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash, chain_hashes, tail_hash
from rekindle.engine.sequence import Saves
from rekindle.store.commands import StoreCommand

NOTHING = np.zeros(0, dtype=np.uint32)
LEAST_GAIN = 64  # tokens that reading must save over what a slot has
CHECKPOINT_TOKENS = 4  # before the end of a prompt llama-server keeps a state (server-context.cpp, checkpoint_offsets)
SPARE_TOKENS = 256  # before the seen ones of a window a slot has those of a batch (llama-kv-cache-iswa.cpp, size_swa)
BACK_TOKENS = CHECKPOINT_TOKENS - 1  # before it a slot can go back to: one token after that state, as one is computed


@dataclass(slots=True, eq=False)
class Unkept:
    """Ended turns whose KV only a slot has: `ids` (uint32) of the last, which continues the others.

    Of them `saves` go to disk, of which `num_reused` tokens had been computed before. `commands` wait until the store
    has their blocks. It is `urgent` if somebody waits for that. `resume_points` are those that stay (see `partings`),
    and the state after `back` tokens is read, too, by a slot that goes back to there.
    """

    root: BlockHash
    ids: np.ndarray
    resume_points: frozenset[int]
    since: float
    heads: set[BlockHash]
    saves: Saves = "all"
    num_reused: int = 0
    commands: list[StoreCommand] = field(default_factory=list)
    urgent: bool = False
    back: int | None = None

    def commands_of(self, namespace: str, agent: str) -> list[StoreCommand]:
        """The commands about an agent."""
        return [each for each in self.commands if (each.namespace, each.agent) == (namespace, agent)]


@dataclass(slots=True, eq=False)
class Slot:
    """One slot: the ids (uint32) of the tokens it has, of which namespace's `root`; for whom it last computed.

    It goes on after any of them (`spare` None), or after some of the last: as many as that, and none before the `floor`
    from which it was computed without a break. Before these, after its `checkpoints`.
    """

    number: int
    spare: int | None = None
    floor: int = 0
    checkpoints: tuple[int, ...] = ()
    ids: np.ndarray = field(default_factory=lambda: NOTHING)
    root: BlockHash | None = None
    owner: tuple[str, str] | None = None
    is_busy: bool = False
    is_read: bool = False  # busy because its own state is read
    used: float = -1.0  # when it was last freed
    unkept: Unkept | None = None

    def common(self, root: BlockHash, ids: np.ndarray) -> int:
        """After how many leading tokens of a prompt's ids it can go on; none of another namespace's."""
        num_tokens = num_common(self.ids, ids) if root == self.root else 0
        if self.spare is None:
            return num_tokens
        num_tokens = min(num_tokens, len(ids) - 1)
        if num_tokens >= self._first(self.spare):
            return num_tokens
        return max((at for at in self.checkpoints if at <= num_tokens), default=0)

    def _first(self, spare: int) -> int:
        """After how many tokens it goes on without a checkpoint, at least."""
        return max(self.floor, len(self.ids) - spare)

    def note(self, ids: np.ndarray, num_prompt: int, num_reused: int) -> None:
        """Note the ids that it has after a prompt, of which so much was reused, and a reply, and its checkpoints."""
        if num_reused < self._first(self.spare or 0):
            self.floor = num_reused
        self.ids = ids
        points = {at for at in self.checkpoints if at <= num_reused}
        if num_prompt - CHECKPOINT_TOKENS > num_reused:
            points.add(num_prompt - CHECKPOINT_TOKENS)
        self.checkpoints = tuple(sorted(points))

    def can_go_back(self, num_tokens: int) -> bool:
        """Whether llama-server has a checkpoint one token before."""
        return num_tokens - 1 in self.checkpoints

    def go_back(self, num_tokens: int) -> None:
        """Note that it has no more than its first tokens."""
        self.ids, self.floor = self.ids[:num_tokens], num_tokens
        self.checkpoints = tuple(at for at in self.checkpoints if at < num_tokens)

    def forget(self) -> None:
        """It has nothing that is known."""
        self.ids, self.root, self.owner, self.unkept = NOTHING, None, None, None
        self.floor, self.checkpoints = 0, ()


class Slots:
    """The slots of one server, by their numbers; `spare` as a slot has it."""

    def __init__(self, count: int, spare: int | None = None) -> None:
        self._slots = [Slot(number, spare) for number in range(count)]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, number: int) -> Slot:
        return self._slots[number]

    def choose(self, root: BlockHash, ids: np.ndarray, num_stored: int) -> Slot | None:
        """The slot that a prompt takes, of which `num_stored` tokens could be restored; None: it waits for one.

        That which has most of it if restoring gives less, and if it does not cost most of what the slot has; else the
        one that was used longest ago.
        """
        if all(slot.is_busy for slot in self._slots):
            return None
        by_common = [(slot.common(root, ids), slot) for slot in self._slots if slot.is_read or not slot.is_busy]
        num_held, best = max(by_common, key=lambda pair: pair[0])
        keeps_most = 2 * num_held >= len(best.ids)
        if num_held and num_held >= num_stored and (keeps_most or num_held >= num_stored + LEAST_GAIN):
            return None if best.is_busy else best
        free = (slot for slot in self._slots if not slot.is_busy)
        return min(free, key=lambda slot: slot.used)


def num_common(some: np.ndarray, others: np.ndarray) -> int:
    """How many leading ids two sequences share."""
    size = min(len(some), len(others))
    differ = np.flatnonzero(some[:size] != others[:size])
    return int(differ[0]) if len(differ) else size


def heads_of(root: BlockHash, ids: np.ndarray, block_tokens: int) -> tuple[tuple[BlockHash, ...], BlockHash]:
    """The hashes of the full blocks of a sequence, and of its last block, full or tail; the root of one without any."""
    hashes = tuple(chain_hashes(root, ids, block_tokens))
    last, rest = hashes[-1] if hashes else root, ids[len(hashes) * block_tokens :]
    return hashes, tail_hash(last, rest) if len(rest) else last
