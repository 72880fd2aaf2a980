"""Agents as trees of branches: which sequences an agent remembers, and what a finished turn does to them.

Owned by the intake thread. Holds no text and no KV: ids of recently used branches only, those of others are read from
the store's index on demand. An agent keeps at most `max_branches`. Side requests are dropped first, such as those
for a title that a client sends under the name of a conversation; then the least recently used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from rekindle.agent_ids import AgentKind, kind_of
from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.request import FinishedTurn

UNNAMED = "unnamed"  # all conversations without a name, together


@dataclass(frozen=True, slots=True)
class Branch:
    """One stored sequence of an agent, as the store's index also describes it."""

    namespace: str
    agent: str
    number: int
    root: BlockHash
    head: BlockHash
    num_tokens: int
    canonical_tokens: int
    saved_tokens: int
    last_use: float
    turn_ends: tuple[int, ...]
    resume_points: tuple[int, ...] = ()  # of the last turn, in addition to its end; unknown after a restart
    num_replies: int | None = None  # in the prompt of its last turn; unknown after a restart, and of other texts
    seen_blocks: int | None = None  # only so many of its first blocks are saved until it is continued; None: all

    def with_ids(self, ids: np.ndarray, hashes: tuple[BlockHash, ...]) -> KnownBranch:
        """Return the branch with its token ids, uint32 [num_tokens], and the hashes of their full blocks."""
        return KnownBranch(**_described(self), ids=ids, hashes=hashes)

    def without_ids(self) -> Branch:
        """Return the branch without its ids and hashes."""
        return Branch(**_described(self))


@dataclass(frozen=True, slots=True)
class KnownBranch(Branch):
    """A branch whose token ids are in memory; after a restart they are read on demand."""

    ids: np.ndarray = field(kw_only=True)
    hashes: tuple[BlockHash, ...] = field(kw_only=True)


def _described(branch: Branch) -> dict[str, Any]:
    return {each.name: getattr(branch, each.name) for each in fields(Branch)}


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """What a finished turn did: the branch that now holds it, the one it extended, and the dropped branches."""

    branch: KnownBranch
    extended: KnownBranch | None = None
    dropped: tuple[Branch, ...] = ()


def is_prefix(shorter: np.ndarray, longer: np.ndarray) -> bool:
    """Whether `longer` begins with all of `shorter`."""
    return len(shorter) <= len(longer) and bool(np.array_equal(shorter, longer[: len(shorter)]))


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Count the leading ids that agree."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _earlier_turns(ends: tuple[int, ...], shared: int, num_replies: int | None) -> tuple[int, ...]:
    """Return where the turns before a new one end, given those of the branch it shares `shared` tokens with.

    A prompt of messages has a known number of replies. A reply rendered differently than it was generated diverges from
    the old branch before its own end; that turn then ends where the two diverge.
    """
    if num_replies is None:
        return tuple(end for end in ends if end <= shared)
    return tuple(min(end, shared) for end in ends[:num_replies])


def _seen_again(branch: KnownBranch, turn: FinishedTurn) -> int | None:
    """Return how many blocks of a branch are to be saved, after a turn that it contains: those of the turn, too."""
    if branch.seen_blocks is None or (turn.seen_blocks is None and len(turn.ids) == branch.num_tokens):
        return None
    return max(branch.seen_blocks, len(turn.hashes) if turn.seen_blocks is None else turn.seen_blocks)


class BranchBook:
    """Every agent's branches by (namespace, agent), and until when (wall clock) an agent is pinned.

    `num_unsaved` branches have nothing durable: they are lost when their blocks are evicted.
    """

    def __init__(self, *, max_branches: int) -> None:
        self._agents: dict[tuple[str, str], dict[int, Branch]] = {}
        self._pins: dict[tuple[str, str], float] = {}
        self.max_branches = max_branches
        self.num_unsaved = 0

    def __len__(self) -> int:
        return sum(kind_of(agent).is_memory for _, agent in list(self._agents))

    def num_pinned(self, now: float) -> int:
        """Count the agents whose pin has not expired at wall time `now`."""
        pins = list(self._pins.items())
        return sum(until > now and kind_of(agent).is_memory for (_, agent), until in pins)

    def put(self, branch: Branch) -> None:
        """Add or replace one branch."""
        mine = self._agents.setdefault((branch.namespace, branch.agent), {})
        self._uncount(mine.get(branch.number))
        mine[branch.number] = branch
        self.num_unsaved += not branch.saved_tokens

    def _uncount(self, gone: Branch | None) -> None:
        self.num_unsaved -= gone is not None and not gone.saved_tokens

    def get(self, namespace: str, agent: str, number: int) -> Branch | None:
        """Return one branch, or None."""
        return self._agents.get((namespace, agent), {}).get(number)

    def of(self, namespace: str, agent: str) -> list[Branch]:
        """Return an agent's branches, most recently used first; empty if it has none."""
        mine = self._agents.get((namespace, agent), {})
        return sorted(mine.values(), key=lambda branch: -branch.last_use)

    def agents(self, namespace: str | None = None) -> Iterator[tuple[str, str]]:
        """Yield (namespace, agent) of every named agent of a namespace (None: of all)."""
        for space, agent in self._agents:
            if (namespace is None or space == namespace) and kind_of(agent) is AgentKind.NAMED:
                yield space, agent

    def branches(self) -> Iterable[Branch]:
        """Return all branches of all agents, hidden ones too."""
        return [branch for mine in self._agents.values() for branch in mine.values()]

    def drop(self, namespace: str, agent: str) -> list[Branch]:
        """Forget an agent; return what it had."""
        gone = list(self._agents.pop((namespace, agent), {}).values())
        for branch in gone:
            self._uncount(branch)
        self._pins.pop((namespace, agent), None)
        return gone

    def remove(self, branch: Branch) -> None:
        """Forget one branch, and the agent with its last one."""
        mine = self._agents[branch.namespace, branch.agent]
        self._uncount(mine.pop(branch.number))
        if not mine:
            self.drop(branch.namespace, branch.agent)

    def pins(self) -> list[tuple[str, str]]:
        """Return (namespace, agent) of every pinned agent, hidden ones too; some pins may have expired."""
        return list(self._pins)

    def everybody(self) -> list[tuple[str, str]]:
        """Return (namespace, agent) of every agent, hidden ones too."""
        return list(self._agents)

    def pin(self, namespace: str, agent: str, until: float) -> None:
        """Keep a known agent from being forgotten until then; 0 unpins it."""
        assert (namespace, agent) in self._agents, f"agent {agent!r} is not known"
        if until > 0:
            self._pins[namespace, agent] = until
        else:
            self._pins.pop((namespace, agent), None)

    def pinned_until(self, namespace: str, agent: str, now: float) -> float | None:
        """Return until when the agent is pinned; None if it is not, or no longer."""
        until = self._pins.get((namespace, agent))
        if until is not None and until <= now:
            del self._pins[namespace, agent]
            until = None
        return until

    def mark_saved(self, namespace: str, agent: str, number: int, num_tokens: int) -> None:
        """Record how many tokens of a branch are durable, if it still exists."""
        branch = self.get(namespace, agent, number)
        if branch is not None:
            self.put(replace(branch, saved_tokens=min(num_tokens, branch.num_tokens)))

    def check(self) -> None:
        """Assert that every branch is under its own key, within the limit, and that pins are of known agents."""
        assert self._pins.keys() <= self._agents.keys(), "an agent that is not known is pinned"
        num_unsaved = sum(not branch.saved_tokens for branch in self.branches())
        assert num_unsaved == self.num_unsaved, f"num_unsaved is {self.num_unsaved}, {num_unsaved} are"
        for (namespace, agent), mine in self._agents.items():
            assert 0 < len(mine) <= self.max_branches, f"agent {agent!r} has {len(mine)} branches"
            for number, branch in mine.items():
                where = (branch.namespace, branch.agent, branch.number)
                assert where == (namespace, agent, number), f"branch {where} is under {(namespace, agent, number)}"
                assert branch.saved_tokens <= branch.num_tokens, f"branch {where} has more saved than it holds"
                is_whole = not isinstance(branch, KnownBranch) or len(branch.ids) == branch.num_tokens
                assert is_whole, f"branch {where} lost ids"

    def end_turn(self, turn: FinishedTurn, *, canonical_tokens: int, now: float) -> TurnEnd:
        """Continue the branch that the turn's ids extend, or start another; never overwrite a concurrent one.

        A turn that is already contained in a branch adds nothing and only marks that branch used.
        """
        mine = [branch for branch in self.of(turn.namespace, turn.agent) if isinstance(branch, KnownBranch)]
        inside = next((branch for branch in mine if is_prefix(turn.ids, branch.ids)), None)
        if inside is not None:
            used = replace(inside, last_use=now, seen_blocks=_seen_again(inside, turn))
            self.put(used)
            return TurnEnd(used)
        extended = max(
            (branch for branch in mine if is_prefix(branch.ids, turn.ids)),
            key=lambda branch: branch.num_tokens,
            default=None,
        )
        nearest = max(mine, key=lambda branch: common_prefix(branch.ids, turn.ids), default=None)
        shared = common_prefix(nearest.ids, turn.ids) if nearest is not None else 0
        earlier = _earlier_turns(nearest.turn_ends if nearest is not None else (), shared, turn.num_replies)
        numbers = self._agents.get((turn.namespace, turn.agent), {})
        branch = KnownBranch(
            namespace=turn.namespace,
            agent=turn.agent,
            number=extended.number if extended is not None else max(numbers, default=-1) + 1,
            root=turn.root,
            head=turn.head,
            num_tokens=len(turn.ids),
            canonical_tokens=canonical_tokens,
            saved_tokens=extended.saved_tokens if extended is not None else 0,
            last_use=now,
            turn_ends=(*earlier, len(turn.ids)),
            resume_points=turn.resume_points,
            num_replies=turn.num_replies,
            seen_blocks=turn.seen_blocks,
            ids=turn.ids,
            hashes=turn.hashes,
        )
        self.put(branch)
        dropped = self._excess(branch)
        for old in dropped:
            self.remove(old)
        return TurnEnd(branch, extended, tuple(dropped))

    def adopt(self, branch: KnownBranch) -> TurnEnd | None:
        """Add a branch that was computed elsewhere, in the place of one that it extends; None if one contains it."""
        mine = [each for each in self.of(branch.namespace, branch.agent) if isinstance(each, KnownBranch)]
        if any(is_prefix(branch.ids, each.ids) for each in mine):
            return None
        extended = max(
            (each for each in mine if is_prefix(each.ids, branch.ids)), key=lambda each: each.num_tokens, default=None
        )
        numbers = self._agents.get((branch.namespace, branch.agent), {})
        number = extended.number if extended is not None else max(numbers, default=-1) + 1
        saved_tokens = extended.saved_tokens if extended is not None else 0
        adopted = replace(branch, number=number, saved_tokens=saved_tokens)
        self.put(adopted)
        dropped = self._excess(adopted)
        for old in dropped:
            self.remove(old)
        return TurnEnd(adopted, extended, tuple(dropped))

    def _excess(self, latest: KnownBranch) -> list[Branch]:
        """Return the branches that an agent has too many: first those of side requests, then the least recently used.

        Neither the latest nor the one used before it counts as a side request: that may be the beginning of a
        conversation.
        """
        others = [each for each in self.of(latest.namespace, latest.agent) if each.number != latest.number]
        num_excess = len(others) + 1 - self.max_branches
        if num_excess <= 0:
            return []
        talks = [each for each in (latest, *others) if isinstance(each, KnownBranch) and len(each.turn_ends) > 1]
        oldest_first = others[::-1]
        aside = {each.number for each in oldest_first[:-1] if is_aside(each, talks)}
        return sorted(oldest_first, key=lambda each: each.number not in aside)[:num_excess]


def is_aside(branch: Branch, talks: Iterable[KnownBranch]) -> bool:
    """Whether a branch has had one turn and has little in common with any of the agent's conversations: with none of
    them half of the shorter one's tokens."""
    if len(branch.turn_ends) > 1 or not isinstance(branch, KnownBranch):
        return False
    halves = ((talk, (min(branch.num_tokens, talk.num_tokens) + 1) // 2) for talk in talks)
    return not any(np.array_equal(branch.ids[:half], talk.ids[:half]) for talk, half in halves)


def shared_tokens(branch: Branch, others: Iterable[Branch], block_tokens: int) -> tuple[int, tuple[str, ...]]:
    """Return how many leading tokens of a branch other agents of its namespace share, and which agents those are.

    All unnamed conversations together are `UNNAMED`; sequences of breakpoints do not count. Of a branch without ids
    only the head is known, so it counts if its head is one of this branch's blocks. O(log blocks) for each other.
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


def parents(branches: Sequence[Branch], block_tokens: int) -> dict[int, tuple[int, int]]:
    """Return for branches of one agent, by number, the older one with which each has most leading tokens in common, and
    how many, counted in whole blocks; none for one that has nothing in common with older ones."""
    found = {}
    for branch in branches:
        older = [(_common_tokens(branch, each, block_tokens), each) for each in branches if each.number < branch.number]
        num_tokens, nearest = max(older, key=lambda pair: (pair[0], -pair[1].number), default=(0, branch))
        if num_tokens:
            found[branch.number] = nearest.number, num_tokens
    return found


def _common_tokens(branch: Branch, other: Branch, block_tokens: int) -> int:
    """Count the leading tokens in blocks that both share."""
    if branch.head == other.head:
        return min(branch.num_tokens, other.num_tokens)
    mine = branch.hashes if isinstance(branch, KnownBranch) else ()
    if not isinstance(other, KnownBranch):
        return (mine.index(other.head) + 1) * block_tokens if other.head in mine else 0
    theirs = other.hashes
    low, high = 0, min(len(mine), len(theirs))
    while low < high:  # a hash covers all blocks before it
        middle = (low + high + 1) // 2
        if mine[middle - 1] == theirs[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low * block_tokens
