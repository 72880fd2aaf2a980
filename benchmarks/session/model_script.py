"""What a scripted model may say: pieces of text by state, and which state may follow which.

Values only: `scripted` makes a model of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class State:
    """Pieces any of which may stand here, and the states that may follow.

    `behind`: where that depends on an earlier token, the states that may follow by that one's state: the token before,
    or, for a state that stands at `place` of a reply (from 0; -1: the cue), the last one the prompt told. `then` holds
    where none of these is there. A piece belongs to one state only. `lean`: how far its pieces stand above others that
    may come, before attention is asked.
    """

    pieces: tuple[str, ...]
    then: tuple[str, ...] = ()
    behind: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    place: int | None = None
    lean: float = 0.0

    def followers(self) -> set[str]:
        """All states that may follow."""
        return {*self.then, *(name for names in self.behind.values() for name in names)}


@dataclass(frozen=True, slots=True)
class Script:
    """What a model says: states by name; `cues` are texts that end prompts: their last token is in state "cue".

    `special` tokens have no text, `marks` have; both structure prompts. `words` are pieces that the tokenizer learns as
    any other word, for the template spells them, too. A reply is over at one of `ends`. `tail` stands between the last
    word that a tool result tells and the reply.
    """

    states: Mapping[str, State]
    cues: tuple[str, ...]
    special: tuple[str, ...]
    ends: tuple[str, ...]
    marks: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    tail: str = ""

    def pieces(self) -> list[str]:
        """All pieces that are text, each once; AssertionError where one stands in two states."""
        found = [piece for state in self.states.values() for piece in state.pieces]
        assert len(set(found)) == len(found), f"twice: {sorted({piece for piece in found if found.count(piece) > 1})}"
        return [piece for piece in found if piece not in {*self.special, *self.marks, *self.words}]
