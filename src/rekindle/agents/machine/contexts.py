"""What each participant has taken in, in its own order.

Owns the contexts, which only grow (but for a rewind), and what waits to be taken in while its listener speaks: that
comes after the listener's own words, so that what was computed of them stays a prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rekindle.agents.machine.types import Entry
from rekindle.errors import BadRequest

CUE = "Go on."
SILENCE = "…"


@dataclass(slots=True)
class Known:
    """Of which turns and by which numbers somebody knows what was said: in its context, or as soon as it has spoken."""

    turns: set[int] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> Known:
        """What these entries tell."""
        known = cls()
        for entry in entries:
            known.add(entry)
        return known

    def add(self, entry: Entry) -> None:
        """It knows this, too."""
        if entry.turn is not None:
            self.turns.add(entry.turn)
        if entry.number is not None:
            self.numbers.add(entry.number)

    def lacks(self, entry: Entry) -> bool:
        """Whether this can be told from other entries, and is none that it knows."""
        is_known = entry.number in self.numbers or entry.turn in self.turns
        return not is_known and (entry.number is not None or entry.turn is not None)


class Contexts:
    """The contexts of all participants of one session, by name."""

    def __init__(self) -> None:
        self._entries: dict[str, list[Entry]] = {}
        self._held: dict[str, list[Entry]] = {}  # for each of those who speak
        self._known: dict[str, Known] = {}  # of what its entries, the held ones too, tell
        self._came_in: dict[str, int] = {}  # how many entries were there when it came in: those are not rewound

    def add(self, name: str, entries: Sequence[Entry]) -> None:
        """A participant comes in with what it knows already."""
        self._entries[name] = list(entries)
        self._known[name] = Known.of(entries)

    def came_in(self, name: str) -> None:
        """What it has taken in by now is what it came in with."""
        self._came_in[name] = len(self._entries[name])

    def of(self, name: str) -> tuple[Entry, ...]:
        """All it has taken in so far."""
        return tuple(self._entries[name])

    def is_speaking(self, name: str) -> bool:
        """Whether it has begun and not ended."""
        return name in self._held

    def begin(self, name: str, host: str) -> None:
        """It starts to speak from what it has taken in by now."""
        assert name not in self._held, f"{name} speaks already"
        entries = self._entries[name]
        if entries and entries[-1].kind == "said":
            entries.append(Entry("cue", CUE, host))
        self._held[name] = []

    def end(self, name: str, said: Entry | None) -> None:
        """It has spoken (None: it has not); what was said meanwhile is taken in now."""
        held = self._held.pop(name)
        if said is not None:
            self._entries[name].append(said)
            self._known[name].add(said)
        self._entries[name].extend(held)

    def take_in(self, name: str, entry: Entry, host: str) -> None:
        """Add an entry, behind its own words where it is speaking; two of its own in a row get a cue in between."""
        entries = self._held.get(name, self._entries[name])
        before = entries[-1].kind if entries else "said" if name in self._held else None
        if entry.kind == "said" and before == "said":
            entries.append(Entry("cue", CUE, host))
        entries.append(entry)
        self._known[name].add(entry)

    def has_turn(self, name: str, turn: int) -> bool:
        """Whether it knows already what was said in a turn: its own, or that of who it was forked or told from."""
        return turn in self._known[name].turns

    def rewind(self, name: str, turns: int) -> None:
        """Forget its last turns and what it took in since they began; BadRequest where it has had fewer."""
        entries = self._entries[name]
        first = self._came_in[name]
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
        """What one has said or heard and the other has not, as the other would hear it from its sayers."""
        known = self._known[target]
        return [entry for entry in self._entries[source] if known.lacks(entry)]

    def check(self) -> None:
        """Assert that it is known of everybody what its entries tell."""
        for name, entries in self._entries.items():
            assert self._known[name] == Known.of([*entries, *self._held.get(name, ())]), name

    def snapshot(self) -> dict[str, tuple[tuple[Entry, ...], tuple[Entry, ...] | None]]:
        """All of it, to be compared."""
        held = {name: tuple(entries) for name, entries in self._held.items()}
        return {name: (tuple(entries), held.get(name)) for name, entries in self._entries.items()}
