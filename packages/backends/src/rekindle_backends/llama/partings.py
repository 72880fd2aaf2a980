"""Where the prompts of an agent part from what it has said: at the end of which prompt the next one is likely to.

Templates of models that reason keep the reasoning of a reply while its tools are called, and leave it out of the
history once the user speaks again. So the text parts where the first reply to the user began, many turns back or one:

    turn 1   [ message ][ reasoning, call ]
    turn 2   [ message ][ reasoning, call ][ result ][ reasoning, answer ]      extends turn 1
    turn 3   [ message ][ call ][ result ][ answer ][ message ][ reasoning …    parts at the end of turn 1's prompt
                       ^                                      ^ the next one parts here

A turn that extends none of its agent's conversations is such a first one: the state at the end of its prompt is kept
until the conversation parts again. No message is read, only ids are compared. Called on the engine's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rekindle_backends.llama.slots import BACK_TOKENS, num_common

OPENING_TOKENS = 16  # at the end of a prompt, that open a reply and may be left out of the history
MOST_AGENTS = 256
MOST_CONVERSATIONS = 4  # of an agent that it may have in turn
MOST_USELESS = 8  # states in a row that nothing went on from, before beginnings of conversations keep none


@dataclass(frozen=True, slots=True)
class Staying:
    """After `back` tokens of a turn's prompt (None: nowhere) a state is wanted; `points` stay until it parts."""

    back: int | None
    points: frozenset[int]


NOTHING_STAYS = Staying(None, frozenset())


@dataclass(frozen=True, slots=True, eq=False)
class _Conversation:
    """The ids (uint32) of the last turn, and the prompt's length of the first one that it extends."""

    ids: np.ndarray
    num_prompt: int
    points: frozenset[int]
    has_gone_on: bool = False


class Partings:
    """The last conversations of agents by (namespace, agent), as far as they were computed by this process.

    If it `is_expected` that they part, beginnings are kept until that was of no use; otherwise once it was seen. Of no
    more than the `least` tokens none is.
    """

    def __init__(self, *, is_expected: bool, least: int = 0) -> None:
        self._agents: OrderedDict[tuple[str, str], list[_Conversation]] = OrderedDict()
        self._num_useless = 0 if is_expected else MOST_USELESS
        self._least = least

    def note(self, owner: tuple[str, str], ids: np.ndarray, num_prompt: int, points: Sequence[int]) -> Staying:
        """Note the `ids` of an agent's turn, of which `num_prompt` are its prompt, and return what is to stay of it.

        `points` are where it could be resumed: of a conversation that is not known here, they stay as well.
        """
        mine = self._agents.pop(owner, [])
        shared = [num_common(each.ids, ids[:num_prompt]) for each in mine]
        which = max(range(len(mine)), key=shared.__getitem__, default=None)
        if which is not None and shared[which] == len(mine[which].ids):
            before = mine.pop(which)
            self._num_useless += not before.has_gone_on
            staying = Staying(None, before.points)
            mine.append(_Conversation(ids, before.num_prompt, before.points, has_gone_on=True))
        else:
            is_known, has_parted = which is not None, False
            if which is not None and shared[which] >= mine[which].num_prompt - OPENING_TOKENS:
                has_parted = shared[which] >= mine.pop(which).num_prompt - BACK_TOKENS
                self._num_useless = 0 if has_parted else self._num_useless + 1
            staying = self._begun(num_prompt, () if is_known else points, has_parted=has_parted)
            mine.append(_Conversation(ids, num_prompt, staying.points))
        self._agents[owner] = mine[-MOST_CONVERSATIONS:]
        while len(self._agents) > MOST_AGENTS:
            self._agents.popitem(last=False)
        return staying

    def _begun(self, num_prompt: int, points: Sequence[int], *, has_parted: bool) -> Staying:
        """What stays of a turn that extends none; one that `has_parted` went on from the state that is kept."""
        back = num_prompt - BACK_TOKENS
        if back <= self._least or (self._num_useless >= MOST_USELESS and not has_parted):
            return Staying(None, frozenset(points))
        return Staying(back, frozenset({*points, back}))

    def forget(self, owner: tuple[str, str]) -> None:
        """Keep no ids of an agent."""
        self._agents.pop(owner, None)
