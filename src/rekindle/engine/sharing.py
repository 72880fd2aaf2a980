"""What branches of several agents stand on together. Knows names of blocks, no bytes; the intake owns the branches."""

from __future__ import annotations

from collections.abc import Iterable

from rekindle.agent_ids import AgentKind, kind_of
from rekindle.engine.memory.branches import Branch

UNNAMED = "unnamed"


def shared_tokens(branch: Branch, others: Iterable[Branch], block_tokens: int) -> tuple[int, tuple[str, ...]]:
    """How many leading tokens of a branch other agents of its namespace stand on, too, and which agents those are.

    All unnamed conversations together are `UNNAMED`; prefixes that breakpoints keep are nobody. Of a branch whose ids
    are not at hand only the head is known, so it counts where that is one of this branch's blocks. O(log blocks) for
    each of the others.
    """
    most, agents = 0, set()
    for other in others:
        if (other.namespace, other.root) == (branch.namespace, branch.root) and other.agent != branch.agent:
            num_tokens = _common_tokens(branch, other, block_tokens)
            kind = kind_of(other.agent)
            if num_tokens and kind.is_memory:
                agents.add(other.agent if kind is AgentKind.NAMED else UNNAMED)
                most = max(most, num_tokens)
    return most, tuple(sorted(agents))


def _common_tokens(branch: Branch, other: Branch, block_tokens: int) -> int:
    """Leading tokens in blocks that both stand on."""
    if branch.head == other.head:
        return min(branch.num_tokens, other.num_tokens)
    mine, theirs = branch.names or (), other.names
    if theirs is None:
        return (mine.index(other.head) + 1) * block_tokens if other.head in mine else 0
    low, high = 0, min(len(mine), len(theirs))
    while low < high:  # a name stands for all before it
        middle = (low + high + 1) // 2
        if mine[middle - 1] == theirs[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low * block_tokens
