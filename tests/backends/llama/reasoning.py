"""What a template for models that reason writes: an opening at the end of each prompt, and of replies before the last
message of the user no reasoning and no such opening."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Reasoned:
    """A conversation by ids: `opening` opens a reply, the first half of which is reasoning."""

    opening: Sequence[int]
    before: list[int] = field(default_factory=list)  # up to the last message, as all later prompts have it
    prompt: list[int] = field(default_factory=list)
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)  # since that: what is new, and the reply

    def message(self, ids: Sequence[int]) -> list[int]:
        """The prompt after a message of the user."""
        for index, (new, reply) in enumerate(self.turns):
            self.before += [*(new if index else []), *reply[len(reply) // 2 :]]
        self.before, self.turns = [*self.before, *ids], []
        return self._asked(ids, [*self.before])

    def result(self, ids: Sequence[int]) -> list[int]:
        """The prompt after the result of a tool."""
        return self._asked(ids, [*self.prompt, *self.turns[-1][1], *ids])

    def _asked(self, ids: Sequence[int], prompt: list[int]) -> list[int]:
        self.prompt = [*prompt, *self.opening]
        self.turns.append(([*ids], []))
        return self.prompt

    def replied(self, ids: Sequence[int]) -> None:
        self.turns[-1] = (self.turns[-1][0], [*ids])
