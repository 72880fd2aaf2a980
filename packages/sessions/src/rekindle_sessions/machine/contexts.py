"""Each participant's context: what it has said and heard, in its own order.

Owns the contexts, which only grow (except on a rewind), and the entries held while their listener speaks: they are
appended after the listener's own words, so that the KV computed for those words stays a prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rekindle.errors import BadRequest
from rekindle_sessions.machine.types import Entry

CUE = "Go on."
SILENCE = "…"


@dataclass(slots=True)
class Known:
    """The turns and utterance numbers that a participant's context covers, held entries included."""

    turns: set[int] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> Known:
        """Return what these entries cover."""
        known = cls()
        for entry in entries:
            known.add(entry)
        return known

    def add(self, entry: Entry) -> None:
        """Add what one entry covers."""
        if entry.turn is not None:
            self.turns.add(entry.turn)
        if entry.number is not None:
            self.numbers.add(entry.number)

    def lacks(self, entry: Entry) -> bool:
        """Whether an entry is identifiable (has a turn or number) and not covered yet."""
        is_known = entry.number in self.numbers or entry.turn in self.turns
        return not is_known and (entry.number is not None or entry.turn is not None)


class Contexts:
    """The contexts of all participants of one session, by name."""

    def __init__(self) -> None:
        self._entries: dict[str, list[Entry]] = {}
        self._held: dict[str, list[Entry]] = {}  # for each participant that is speaking
        self._known: dict[str, Known] = {}  # covers the held entries too
        self._num_initial: dict[str, int] = {}  # entries it joined with: those are not rewound

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
            self._entries[name].append(said)
            self._known[name].add(said)
        self._entries[name].extend(held)

    def append(self, name: str, entry: Entry, host: str) -> None:
        """Append an entry, after the current turn if it is speaking; put a cue between two of its own in a row."""
        entries = self._held.get(name, self._entries[name])
        before = entries[-1].kind if entries else "said" if name in self._held else None
        if entry.kind == "said" and before == "said":
            entries.append(Entry("cue", CUE, host))
        entries.append(entry)
        self._known[name].add(entry)

    def has_turn(self, name: str, turn: int) -> bool:
        """Whether its context covers a turn already: its own, or one it got from a fork or a merge."""
        return turn in self._known[name].turns

    def rewind(self, name: str, turns: int) -> None:
        """Drop its last turns and all entries since they began; BadRequest if it has had fewer turns."""
        entries = self._entries[name]
        first = self._num_initial[name]
        own = [at for at, entry in enumerate(entries) if entry.kind == "said" and at >= first]
        if not 1 <= turns <= len(own):
            message = f"{name} has spoken {len(own)} times since it came in: turns must be from 1 to that"
            raise BadRequest(message, param="turns")
        at = own[-turns]
        if at > first and entries[at - 1].kind == "cue":
            at -= 1
        del entries[at:]
        self._known[name] = Known.of(entries)

    def missing(self, source: str, target: str) -> list[Entry]:
        """Return the entries of `source` that the context of `target` does not cover."""
        known = self._known[target]
        return [entry for entry in self._entries[source] if known.lacks(entry)]

    def check(self) -> None:
        """Assert that `_known` matches every participant's entries."""
        for name, entries in self._entries.items():
            assert self._known[name] == Known.of([*entries, *self._held.get(name, ())]), name

    def snapshot(self) -> dict[str, tuple[tuple[Entry, ...], tuple[Entry, ...] | None]]:
        """Return the state as plain values, for comparison."""
        held = {name: tuple(entries) for name, entries in self._held.items()}
        return {name: (tuple(entries), held.get(name)) for name, entries in self._entries.items()}
