"""What a scripted model may generate: pieces of text by state, and which state may follow which.

Values only: `scripted` builds a model from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class State:
    """Pieces, any of which may come here, and the states that may follow.

    `after`: if the followers depend on an earlier token, the followers by that token's state. The earlier token is the
    previous one, or, for a state at `place` of a reply (from 0; -1: the cue), the last token of the prompt's last tool
    result. `then` applies if `after` has no entry. A piece belongs to one state only. `lean`: how far its pieces
    score above alternatives before attention is added.
    """

    pieces: tuple[str, ...]
    then: tuple[str, ...] = ()
    after: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    place: int | None = None
    lean: float = 0.0

    def followers(self) -> set[str]:
        """Return all states that may follow."""
        return {*self.then, *(name for names in self.after.values() for name in names)}


@dataclass(frozen=True, slots=True)
class Script:
    """What a model may generate: states by name; `cues` are texts that end prompts: their last token has state "cue".

    `special` tokens have no text, `marks` have; both structure prompts. `words` are pieces that the tokenizer learns
    like any other word, because the template writes them too. A reply ends at one of `ends`. `tail` is the text between
    the end of a tool result and the reply.
    """

    states: Mapping[str, State]
    cues: tuple[str, ...]
    special: tuple[str, ...]
    ends: tuple[str, ...]
    marks: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    tail: str = ""

    def pieces(self) -> list[str]:
        """Return all pieces that are text, each once; AssertionError if one is in two states."""
        found = [piece for state in self.states.values() for piece in state.pieces]
        assert len(set(found)) == len(found), f"twice: {sorted({piece for piece in found if found.count(piece) > 1})}"
        return [piece for piece in found if piece not in {*self.special, *self.marks, *self.words}]
