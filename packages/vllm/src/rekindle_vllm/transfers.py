"""A worker's side: reads records into its blocks before a step, saves its blocks' records after it.

Owns nothing but what became of the current step. Bytes come and go through a port to the owner of the store, in its
process or another; both read and save records of the whole model, or this worker's heads of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from rekindle_vllm.codec import Bytes, PartCodec
from rekindle_vllm.steps import ABSENT, Blocks, Load, Save, StepPlan, StepReport


class Port(Protocol):
    """The way to the owner of the store, for one worker."""

    def begin_load(self, key: int, first: int, rows: Sequence[Bytes]) -> Future[int]:
        """Read a key's records from the `first` on into rows; the result: how many leading ones are there."""

    def save(self, key: int, first: int, rows: Sequence[Bytes], deadline: float) -> int:
        """Hand over a key's records from the `first` on; return how many leading ones were taken."""

    def close(self) -> None:
        """End the way; nothing is asked of it afterwards."""


class Transfers:
    """The transfers of one worker, with a codec for each part of records.

    In a step it waits at most `patience_s` for room for what it saves. `load_s` and `save_s`: seconds that steps have
    spent in them since it was made.
    """

    def __init__(self, codecs: Sequence[PartCodec], patience_s: float) -> None:
        assert all(len(codec.rows) >= 2 for codec in codecs), "a codec needs two halves"
        self._codecs = tuple(codecs)
        self._patience_s = patience_s
        self._arrived: set[str] = set()
        self._failed: set[str] = set()
        self._failed_keys: set[int] = set()
        self._failed_blocks: set[int] = set()
        self._loaded: dict[int, int] = {}
        self._saved: dict[int, int] = {}
        self._unfit: set[int] = set()
        self._no_room = False
        self._stalled_s = 0.0
        self.load_s = self.save_s = 0.0

    def load(self, plan: StepPlan, port: Port) -> None:
        """Read the step's records into its blocks; what fails is in `take_failed_blocks` or `take_arrived`."""
        begun = time.perf_counter()
        self._failed_keys.difference_update(plan.settled)
        for load in plan.loads:
            count = self._load(load, port)
            self._loaded[load.key] = count
            is_short = count < len(load.blocks)
            if load.request_id is not None:
                self._arrived.add(load.request_id)
                self._failed.update([load.request_id] if is_short else [])
            elif is_short:
                self._failed_keys.add(load.key)
                self._failed_blocks.update(block for blocks in load.blocks[count:] for block in blocks)
        self._failed_blocks.discard(ABSENT)
        self.load_s += time.perf_counter() - begun

    def save(self, plan: StepPlan, port: Port) -> None:
        """Hand over the step's records; nothing that was computed after a load that failed."""
        begun = time.perf_counter()
        deadline = time.monotonic() + self._patience_s
        for save in plan.saves:
            spoilt = not self._failed_keys.isdisjoint(save.after)
            self._saved[save.key] = 0 if spoilt else self._save(save, port, deadline)
        seconds = time.perf_counter() - begun
        self.save_s += seconds
        if self._no_room:
            self._stalled_s, self._no_room = seconds, False

    def take_failed_blocks(self) -> set[int]:
        """The engine's blocks that could not be loaded since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_arrived(self) -> tuple[set[str], set[str]]:
        """The requests that waited for records that were read since the last call, and those of them that lack some."""
        arrived, self._arrived = self._arrived, set()
        failed, self._failed = self._failed, set()
        return arrived, failed

    def take_report(self) -> StepReport:
        """What became of the loads and saves since the last call."""
        report = StepReport(self._loaded, self._saved, frozenset(self._unfit), self._stalled_s)
        self._loaded, self._saved, self._unfit, self._stalled_s = {}, {}, set(), 0.0
        return report

    def _load(self, load: Load, port: Port) -> int:
        """Read the records by halves of the buffer, the next one while the last is decoded; return how many."""
        codec = self._codecs[load.part]
        half = len(codec.rows) // 2
        parts = _halves(load.blocks, half)
        reading = [port.begin_load(load.key, first, _rows(codec, number, part)) for number, first, part in parts[:2]]
        done, intact = 0, True
        for number, _, part in parts:
            count = reading.pop(0).result()
            if intact:
                codec.decode(part[:count], at=number % 2 * half)
                done += count
                intact = count == len(part)
            if intact and number + 2 < len(parts):
                following, first, blocks = parts[number + 2]
                reading.append(port.begin_load(load.key, first, _rows(codec, following, blocks)))
            if not reading:
                break
        return done

    def _save(self, save: Save, port: Port, deadline: float) -> int:
        codec, done = self._codecs[save.part], 0
        for _, first, part in _halves(save.blocks, len(codec.rows) // 2):
            fit = codec.encode(part)
            taken = port.save(save.key, first, list(codec.rows[:fit]), deadline)  # also none: others may wait
            done += taken
            if taken == fit < len(part):
                self._unfit.add(save.key)
            self._no_room |= taken < fit
            if taken < len(part):
                break
        return done


def _halves(blocks: Sequence[Blocks], half: int) -> list[tuple[int, int, Sequence[Blocks]]]:
    """Pieces that fit half of a buffer, each with its number and its first record."""
    starts = range(0, len(blocks), half)
    return [(number, start, blocks[start : start + half]) for number, start in enumerate(starts)]


def _rows(codec: PartCodec, number: int, part: Sequence[Blocks]) -> Sequence[Bytes]:
    """The rows of a buffer that the piece with this number is read into."""
    at = number % 2 * (len(codec.rows) // 2)
    return list(codec.rows[at : at + len(part)])
