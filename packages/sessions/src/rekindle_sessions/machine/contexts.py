"""Each participant's context: what it has said and heard, in its own order.

Owns the contexts, which only grow (except on a rewind), and the entries held while their listener speaks: they are
appended after the listener's own words, so that the KV computed for those words stays a prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rekindle.errors import BadRequest
from rekindle_sessions.machine.types import Entry

CUE = "Go on."
SILENCE = "…"


@dataclass(slots=True)
class Known:
    """What a participant's context covers, held entries included: how many entries have each utterance number or turn
    (`~turn`), and a place at or before the first of them."""

    counts: Counter[int] = field(default_factory=Counter)
    places: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> Known:
        """Return what these entries cover."""
        known = cls()
        for place, entry in enumerate(entries):
            known.add(entry, place)
        return known

    def add(self, entry: Entry, place: int) -> None:
        """Add what one entry covers; `place`: at most where it is."""
        for key in _keys(entry):
            self.counts[key] += 1
            self.places.setdefault(key, place)

    def drop(self, entry: Entry) -> list[int]:
        """Take back an entry; return what nothing covers now."""
        gone = []
        for key in _keys(entry):
            self.counts[key] -= 1
            if not self.counts[key]:
                del self.counts[key], self.places[key]
                gone.append(key)
        return gone

    def lacks(self, entry: Entry) -> bool:
        """Whether an entry is identifiable (has a turn or number) and not covered yet."""
        keys = _keys(entry)
        return bool(keys) and not any(key in self.counts for key in keys)


def _keys(entry: Entry) -> list[int]:
    number, turn = entry.number, entry.turn
    return ([] if number is None else [number]) + ([] if turn is None else [~turn])


class Contexts:
    """The contexts of all participants of one session, by name.

    No call but `add` and `of` takes time for what a context had before: imported sessions have 15,000 turns.
    """

    def __init__(self) -> None:
        self._entries: dict[str, list[Entry]] = {}
        self._held: dict[str, list[Entry]] = {}  # for each participant that is speaking
        self._known: dict[str, Known] = {}  # covers the held entries too
        self._num_initial: dict[str, int] = {}  # entries it joined with: those are not rewound
        self._merged: dict[tuple[str, str], int] = {}  # how many leading entries of one came into another

    def add(self, name: str, entries: Sequence[Entry]) -> None:
        """Add a participant with its initial entries."""
        self._entries[name] = list(entries)
        self._known[name] = Known.of(entries)

    def mark_joined(self, name: str) -> None:
        """Mark the entries so far as those the participant joined with."""
        self._num_initial[name] = len(self._entries[name])

    def of(self, name: str) -> tuple[Entry, ...]:
        """Return a participant's context, without held entries."""
        return tuple(self._entries[name])

    def is_speaking(self, name: str) -> bool:
        """Whether a turn of this participant is under way."""
        return name in self._held

    def begin(self, name: str, host: str) -> None:
        """Start a turn, after a cue if the context ends with own words; hold new entries until it ends."""
        assert name not in self._held, f"{name} speaks already"
        entries = self._entries[name]
        if entries and entries[-1].kind == "said":
            entries.append(Entry("cue", CUE, host))
        self._held[name] = []

    def end(self, name: str, said: Entry | None) -> None:
        """End a turn with what was said (None: nothing), then append the entries held meanwhile."""
        held = self._held.pop(name)
        if said is not None:
            self._known[name].add(said, len(self._entries[name]))
            self._entries[name].append(said)
        self._entries[name].extend(held)

    def append(self, name: str, entry: Entry, host: str) -> None:
        """Append an entry, after the current turn if it is speaking; put a cue between two of its own in a row."""
        entries = self._held.get(name, self._entries[name])
        before = entries[-1].kind if entries else "said" if name in self._held else None
        if entry.kind == "said" and before == "said":
            entries.append(Entry("cue", CUE, host))
        self._known[name].add(entry, len(self._entries[name]))
        entries.append(entry)

    def has_turn(self, name: str, turn: int) -> bool:
        """Whether its context covers a turn already: its own, or one it got from a fork or a merge."""
        return ~turn in self._known[name].counts

    def rewind(self, name: str, turns: int) -> None:
        """Drop its last turns and all entries since they began; BadRequest if it has had fewer turns."""
        entries, first, left = self._entries[name], self._num_initial[name], turns
        at = len(entries)
        while left > 0 and at > first:
            at -= 1
            left -= entries[at].kind == "said"
        if turns < 1 or left:
            own = sum(entry.kind == "said" for entry in entries[first:])
            message = f"{name} has spoken {own} times since it came in: turns must be from 1 to that"
            raise BadRequest(message, param="turns")
        if at > first and entries[at - 1].kind == "cue":
            at -= 1
        gone = [key for entry in entries[at:] for key in self._known[name].drop(entry)]
        del entries[at:]
        for (source, target), count in self._merged.items():
            if source == name:
                self._merged[source, target] = min(count, at)
            elif target == name:  # what it lacks now is merged again
                places = self._known[source].places
                self._merged[source, target] = min([count, *(places[key] for key in gone if key in places)])

    def merging(self, source: str, target: str) -> list[Entry]:
        """Return the entries of `source` that the context of `target` does not cover, to be appended where they say
        something."""
        known, entries, begin = self._known[target], self._entries[source], self._merged.get((source, target), 0)
        self._merged[source, target] = len(entries)
        return [entry for entry in entries[begin:] if known.lacks(entry)]

    def check(self) -> None:
        """Assert that `_known` and `_merged` match every participant's entries."""
        for name, entries in self._entries.items():
            right, known = Known.of([*entries, *self._held.get(name, ())]), self._known[name]
            assert known.counts == right.counts, name
            assert all(known.places[key] <= place for key, place in right.places.items()), name
        for (source, target), count in self._merged.items():
            lacking = [entry for entry in self._entries[source][:count] if self._known[target].lacks(entry)]
            assert all(entry.kind == "said" or not entry.text for entry in lacking), (source, target)

    def snapshot(self) -> dict[str, tuple[tuple[Entry, ...], tuple[Entry, ...] | None]]:
        """Return the state as plain values, for comparison."""
        held = {name: tuple(entries) for name, entries in self._held.items()}
        return {name: (tuple(entries), held.get(name)) for name, entries in self._entries.items()}
