"""What the scheduler's side of an engine and its workers say to each other about one step of the engine.

Frozen values that may cross processes: block ids of the engine and keys, no names and no bytes. A key stands for
records that the owner of the store knows; it is never used again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Blocks = tuple[int, ...]  # of the engine, those of one record in order, or pieces of them
ABSENT = -1  # a block of a record that stays as it is


@dataclass(frozen=True, slots=True)
class Address:
    """Where workers find the owner of the store: in its own process by `token`, from others by a socket at `path`."""

    pid: int
    token: str
    path: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """A part of records to read into these blocks; `ABSENT` blocks stay as they are.

    Before the forward pass, as its requests need them; with `request_id` for one that waits for them.
    """

    key: int
    blocks: tuple[Blocks, ...]
    part: int = 0
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Save:
    """A part of records to save after the forward pass, unless one of the loads `after` failed: they hold garbage."""

    key: int
    blocks: tuple[Blocks, ...]
    after: tuple[int, ...] = ()
    part: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What workers do in one step; `settled` are loads that no later save names."""

    owner: Address
    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    settled: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepReport:
    """What became of a step's loads and saves: of each key, how many of its records, from the first on.

    `unfit`: saves that ended at a record without a valid encoding, which a second attempt would not have either.
    `stalled_s`: seconds that the saves took if the store had no room for all of them.
    """

    loaded: Mapping[int, int] = field(default_factory=dict)
    saved: Mapping[int, int] = field(default_factory=dict)
    unfit: frozenset[int] = frozenset()
    stalled_s: float = 0.0

    def merged(self, other: StepReport) -> StepReport:
        """The report of two workers of the same step: a record counts where both had it."""
        return StepReport(
            _least(self.loaded, other.loaded),
            _least(self.saved, other.saved),
            self.unfit | other.unfit,
            max(self.stalled_s, other.stalled_s),
        )

    def __bool__(self) -> bool:
        return bool(self.loaded or self.saved)


def _least(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    return {key: min(one.get(key, count), other.get(key, count)) for key, count in {**one, **other}.items()}
