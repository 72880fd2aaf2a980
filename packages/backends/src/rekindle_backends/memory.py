"""What a front has of the KV at a backend: where a request is computed, and what is stored of it when it ends.

`TextMemory` is that of a backend whose KV is its own: blocks of the pool stand for texts, with nothing in them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rekindle.engine.blocks.prefix_cache import PrefixCache
from rekindle.engine.request import Request
from rekindle.engine.sequence import Ended
from rekindle.store.commands import StoreCommand


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a request is computed: `options` are more fields of its body.

    `prepare` is awaited on the backend's thread before the request is sent.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[], Awaitable[None]] | None = None


class Memory(Protocol):
    """Called by the core, on the engine's thread."""

    def place(self, request: Request) -> Place | Literal["wait", "loading"]:
        """Return where a waiting request is computed now. "wait": nowhere yet, ask again in the next step; "loading":
        what is stored of it is being read."""

    def reused(self, request: Request, num_tokens: int) -> None:
        """The backend says how many tokens of a prompt it has reused."""

    def end(self, request: Request, *, keep: bool, num_known: int, num_computed: int) -> Ended:
        """End a request, remembered if it is to `keep`; return what is stored of it, or will be.

        The ids of its first `num_known` tokens are the backend's own; it has KV of the first `num_computed` at least.
        """

    def left(self, request: Request) -> None:
        """Nothing of a request is at the backend any more; it may have ended before."""

    @property
    def is_writing(self) -> bool:
        """Whether bytes of known blocks may change now, so that none is copied for the store."""

    def step(self, now: float) -> None:
        """Begin what is due."""

    def seconds_left(self, now: float) -> float | None:
        """Return in how many seconds something is due; None if nothing is."""

    def save(self, command: StoreCommand) -> None:
        """Queue a command for the store, after what it depends on."""

    def hand_over(self) -> int:
        """Let what ended turns have go to the store now; return how much it has not accepted yet."""

    def forget(self, namespace: str, agent: str) -> None:
        """Keep nothing of an agent at the backend, and nothing that is on its way to the store."""

    def check(self) -> None:
        """Assert the invariants between steps."""


class TextMemory:
    """Texts alone: the ids of an ended turn are registered and saved like those of computed blocks."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache

    def place(self, request: Request) -> Place:
        """Anywhere: the backend knows."""
        return Place()

    def reused(self, request: Request, num_tokens: int) -> None:
        """Nothing: it is the backend's business."""

    def end(self, request: Request, *, keep: bool, num_known: int, num_computed: int) -> Ended:
        """Register the known ids of a sequence as blocks, if it is remembered."""
        sequence, pool = request.sequence, self._cache.pool
        if keep:
            known = pool.try_reuse_prefix(sequence.root, sequence.ids[:num_known])
            sequence.table.append_shared(known, len(known) * pool.block_tokens)
            has_room = self._cache.prepare(sequence, num_known)
            assert has_room, "no other sequence holds blocks, and the pool has room for one"
            sequence.num_computed = num_known
            self._cache.publish(sequence)
        return self._cache.end(sequence, is_remembered=keep)

    def left(self, request: Request) -> None:
        """Nothing: it had no place."""

    @property
    def is_writing(self) -> bool:
        """Never: blocks have nothing in them."""
        return False

    def step(self, now: float) -> None:
        """Nothing is ever due."""

    def seconds_left(self, now: float) -> float | None:
        """None: nothing is ever due."""
        return None

    def save(self, command: StoreCommand) -> None:
        """Queue a command for the store, after the blocks published so far."""
        self._cache.saving.add(command)

    def hand_over(self) -> int:
        """Return how much the store has not accepted yet."""
        return len(self._cache.saving)

    def forget(self, namespace: str, agent: str) -> None:
        """Nothing: the backend evicts what it has."""

    def check(self) -> None:
        """Assert that no block is held."""
        assert not self._cache.pool.num_held, f"{self._cache.pool.num_held} blocks are held"
