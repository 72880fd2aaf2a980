"""What was reused, read and saved, as another engine's metrics take it: increments since it was last asked.

Knows no metrics library. One thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from rekindle_vllm.owner import RecordOwner
from rekindle_vllm.requests import Reuse

STORE_S = 5.0  # how often the store is asked for its figures


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure's name in metrics and what it says; `is_level`: a value now, not a count."""

    name: str
    text: str
    is_level: bool = False


FIGURES = (
    Figure("requests", "Requests that ended, of those that were scheduled."),
    Figure("prompt_tokens", "Tokens of their prompts."),
    Figure("hot_tokens", "Of these, tokens found in the engine's memory."),
    Figure("loaded_tokens", "Of these, tokens loaded from disk."),
    Figure("failed_tokens", "Of these, tokens that were to be loaded and were computed after all."),
    Figure("records_written", "Records written to disk."),
    Figure("bytes_written", "Bytes of records written to disk."),
    Figure("index_bytes_written", "Bytes written to disk for their index."),
    Figure("records_postponed", "Records not written as the day's budget of writes is used up."),
    Figure("bytes_read", "Bytes of records read from disk."),
    Figure("records_refused", "Records for which there was no room on disk."),
    Figure("records_damaged", "Records that failed their checks."),
    Figure("failed_saves", "Attempts to write that failed."),
    Figure("disk_bytes", "Bytes of records on disk.", is_level=True),
    Figure("records", "Records on disk.", is_level=True),
    Figure("branches", "Conversations on disk, one of each branch.", is_level=True),
)


class Figures:
    """The figures of an owner and of the requests of its engine."""

    def __init__(self, owner: RecordOwner, clock: Callable[[], float] = time.monotonic) -> None:
        self._owner = owner
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._of_store: Counter[str] = Counter()
        self._due = clock()

    def finished(self, reuse: Reuse) -> None:
        """A request ended."""
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += reuse.prompt_tokens
        self._counts["hot_tokens"] += reuse.hot
        self._counts["loaded_tokens"] += reuse.loaded
        self._counts["failed_tokens"] += reuse.failed

    def take(self) -> dict[str, int]:
        """What was added to counts since the last call, those of the store and the levels every few seconds only."""
        counts, self._counts = self._counts, Counter()
        levels: dict[str, int] = {}
        if self._clock() >= self._due:
            self._due = self._clock() + STORE_S
            levels = self._levels_and_add(counts)
        return {name: count for name, count in counts.items() if count} | levels

    def _levels_and_add(self, counts: Counter[str]) -> dict[str, int]:
        store = self._owner.stats()
        now = Counter(
            records_written=store.blocks_written,
            bytes_written=store.bytes_written,
            index_bytes_written=store.index_bytes_written,
            records_postponed=store.blocks_postponed,
            bytes_read=store.bytes_read,
            records_refused=store.blocks_refused,
            records_damaged=store.bad_records,
            failed_saves=store.failed_saves,
        )
        counts.update({name: count - self._of_store[name] for name, count in now.items()})
        self._of_store = now
        return {"disk_bytes": store.used_bytes, "records": store.num_blocks, "branches": store.num_sequences}
