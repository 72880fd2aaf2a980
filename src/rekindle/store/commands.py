"""Commands to the store, as values: what it changes, each after everything queued before.

`done` is set once a change is durable; if it was not carried out, it has a StoreError that says what to do. The writer
carries them out.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rekindle.errors import PurgeUnproved, StoreError
from rekindle.store.values import PurgeProof, SequenceRecord

logger = logging.getLogger(__name__)
_DONE = {
    "delete": "deleted from disk",
    "purge": "purged from disk",
    "pin": "pinned on disk",
    "fork": "forked on disk",
    "rewind": "rewound on disk",
    "import": "imported to disk",
}


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a branch (None: the whole agent) and the blocks only it used; `done`: the number of slots freed."""

    verb: ClassVar = "delete"
    namespace: str
    agent: str
    branch: int | None = None
    done: Future[int] = field(default_factory=Future, compare=False)


@dataclass(frozen=True, slots=True)
class Purge:
    """Delete an agent and wipe what only it used: log emptied, holes punched, all unused slots read back as zeros.

    Covers everything staged before, and blocks without a sequence, which may be the agent's. End its requests first:
    blocks they stage later are saved like any others. `done` has PurgeUnproved if a slot does not read as zeros; the
    agent is deleted by then, and purging it again repeats the proof.
    """

    verb: ClassVar = "purge"
    namespace: str
    agent: str
    done: Future[PurgeProof] = field(default_factory=Future, compare=False)


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep all of an agent's blocks on disk until that wall time (infinity: forever, 0: unpin).

    `done`: whether the agent is on disk; after its first turn it is, unless that turn could not be saved. Deleting the
    agent ends its pin.
    """

    verb: ClassVar = "pin"
    namespace: str
    agent: str
    until: float
    done: Future[bool] = field(default_factory=Future, compare=False)


@dataclass(frozen=True, slots=True)
class Move:
    """Set where branches end without computing anything, all of them or none: a fork, a rewind, or an import.

    `done`: whether it was carried out; it is not when blocks that the branches depend on are missing on disk.
    """

    namespace: str
    agent: str
    verb: Literal["fork", "rewind", "import"]
    records: tuple[SequenceRecord, ...]
    done: Future[bool] = field(default_factory=Future, compare=False)


StoreChange = Delete | Purge | Pin | Move
StoreCommand = SequenceRecord | StoreChange


def failure(change: StoreChange, error: Exception) -> StoreError:
    """Log why a change was not carried out; return the error for its caller."""
    done = _DONE[change.verb]
    logger.error("agent %s could not be %s: %s", change.agent, done, error)
    kind = PurgeUnproved if isinstance(error, PurgeUnproved) else StoreError
    return kind(f"the agent could not be {done}: {error}; {change.verb} it again")
