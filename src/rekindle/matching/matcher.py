"""Which stored ids a prompt can reuse: found by text, decided by stored ids.

Owns the known branches by agent and, in its index, by text. Knows neither blocks nor tensors; its result is ids and the
byte from which to encode the rest, so it cannot become stale. Single owner: the intake.

    stored key  |.....system.....|...user...|..reply..|
    prompt key  |.....system.....|...user..X.........
                                          ^ common prefix: no token whose byte end lies after it is kept
                                   ^ safe cut: where encoding the prompt's rest cannot disagree with the whole

The ids of a request are `branch.ids[:num_tokens]` and the encoding of the prompt from `resume_byte`; they decode to the
prompt, and in canonical mode they are its encoding. Stepping back to a safe cut costs tokenising, not KV: blocks are
looked up by ids afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from rekindle.cache.trie.radix import common_prefix
from rekindle.matching.text_index import StoredBranch, TextIndex
from rekindle.text.vocabulary import MARK, on_boundary

if TYPE_CHECKING:
    from rekindle.text.prompt import PromptEncoder, RenderedPrompt

__all__ = ["Difference", "Matcher", "StoredBranch", "TextMatch", "prompt_ids"]

Relation = Literal["exact", "extend", "diverge", "none"]
Source = Literal["own", "parent", "shared"]
Mode = Literal["continuation", "canonical"]
# Among equally long shared texts, the latest may have an unusual early reply, so a few more are examined.
NUM_SHARED_CANDIDATES = 4


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """Where the prompt diverges from the stored text it agrees with longest, and whose text that is.

    `num_kept` of the stored branch's `num_stored` tokens end before that position.
    """

    position: int
    stored_key: bytes
    source: Source
    num_kept: int = 0
    num_stored: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TextMatch:
    """What a prompt shares with stored branches.

    `relation` compares texts: with the agent's own branches if it has any, else with the best of its parent's and all
    others in the namespace; "diverge" needs `min_reuse_tokens` in common. `branch`, `source` and `num_tokens` are the
    source of the ids, which may be another agent's branch even if the agent has its own. `mode`: reused ids stay as
    sampled, or equal a fresh encoding. `difference` is None if the texts agree or nothing is stored. `seconds`: the
    time matching took.
    """

    relation: Relation
    source: Source | None
    branch: StoredBranch | None
    num_tokens: int
    resume_byte: int
    matched_bytes: int
    mode: Mode
    difference: Difference | None
    seconds: float

    @property
    def continues(self) -> bool:
        """Whether the prompt continues as stored: nothing but new text is computed."""
        return self.relation in ("exact", "extend")


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """A branch compared with the prompt: bytes in common, and how many leading tokens end inside them."""

    branch: StoredBranch
    source: Source
    mode: Mode
    key: bytes
    matched: int
    ends: np.ndarray  # of the leading tokens, at least all that end inside `matched`
    num_usable: int

    @property
    def usable_bytes(self) -> int:
        return int(self.ends[self.num_usable - 1]) if self.num_usable else 0

    @property
    def whole(self) -> bool:
        """Whether the prompt contains all of the branch's text."""
        return len(self.ends) == len(self.branch.ids) and (not len(self.ends) or int(self.ends[-1]) == self.matched)

    def relation(self, prompt_key: bytes, min_reuse_tokens: int) -> Relation:
        if self.matched == len(prompt_key):
            return "exact"
        if self.whole:
            return "extend"
        return "diverge" if self.num_usable >= min_reuse_tokens else "none"


class Matcher:
    """Stored branches by agent and by text. `encoder` provides keys, byte ends and safe cuts."""

    def __init__(
        self,
        encoder: PromptEncoder,
        *,
        min_reuse_tokens: int = 16,
        max_index_bytes: int = 256 << 20,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.index = TextIndex(encoder.key_of, max_bytes=max_index_bytes)
        self._encoder = encoder
        self._min_reuse_tokens = min_reuse_tokens
        self._clock = clock
        self._agents: dict[tuple[str, str | None], dict[int, StoredBranch]] = {}

    def add(self, branch: StoredBranch) -> None:
        """Add a branch, replacing the one with the same number; O(its length)."""
        self.remove(branch.namespace, branch.agent, branch.branch)
        self._agents.setdefault((branch.namespace, branch.agent), {})[branch.branch] = branch
        self.index.put(branch)

    def remove(self, namespace: str, agent: str | None, branch: int) -> None:
        """Remove a branch; no effect if it is not known."""
        mine = self._agents.get((namespace, agent), {})
        gone = mine.pop(branch, None)
        if gone is not None:
            self.index.drop(gone)
        if not mine:
            self._agents.pop((namespace, agent), None)

    def is_findable(self, namespace: str, agent: str | None, branch: int) -> bool:
        """Whether a branch can be found by its text; a known one over the index's budget cannot."""
        known = self._agents.get((namespace, agent), {}).get(branch)
        return known is not None and known in self.index

    def match(
        self,
        namespace: str,
        agent: str | None,
        prompt: RenderedPrompt,
        mode: Mode | None = None,
        *,
        parent: str | None = None,
    ) -> TextMatch:
        """Find the branch of which the prompt reuses most tokens; ties go to the agent's own.

        An agent without branches continues those of its `parent` as if they were its own. `mode` None: own ids stay as
        sampled, those of another agent are reused as far as they are canonical.
        """
        began = self._clock()
        key = prompt.key
        mine, source = self._family(namespace, agent, parent)
        compared = [(common_prefix(key, self.index.key(branch)), branch) for branch in mine]
        # Of branches that agree as far, one that ends there; else the longest: what a side request left is short, and
        # explains nothing of a conversation.
        compared.sort(key=lambda pair: (pair[0] < len(self.index.key(pair[1])), -len(pair[1].ids)))
        own = self._best(compared, key, source, mode or "continuation")
        floor = own.usable_bytes if own is not None else 0
        nearest = self.index.nearest(namespace, key, NUM_SHARED_CANDIDATES + len(mine))
        others = [(length, branch) for length, branch in nearest if length > floor and branch not in mine]
        others.sort(key=lambda pair: len(pair[1].ids))
        shared = self._best(others, key, "shared", mode or "canonical")
        return self._answer(key, own, shared, mode, began)

    def _family(
        self, namespace: str, agent: str | None, parent: str | None
    ) -> tuple[list[StoredBranch], Literal["own", "parent"]]:
        """The branches whose ids a prompt may continue as sampled, and whose they are."""
        mine = list(self._agents.get((namespace, agent), {}).values()) if agent is not None else []
        if mine or parent is None:
            return mine, "own"
        return list(self._agents.get((namespace, parent), {}).values()), "parent"

    def check(self) -> None:
        """Assert that the index agrees with its keys and contains only known branches."""
        self.index.check()
        known = {branch for mine in self._agents.values() for branch in mine.values()}
        assert all(branch in known for branch in self.index), "the index holds a branch that was removed"
        for (namespace, agent), mine in self._agents.items():
            assert mine, f"agent {agent!r} has no branches but was not removed"
            for number, branch in mine.items():
                where = (branch.namespace, branch.agent, branch.branch)
                assert where == (namespace, agent, number), f"branch {where} is under {(namespace, agent, number)}"

    def _best(
        self, compared: Iterable[tuple[int, StoredBranch]], key: bytes, source: Source, mode: Mode
    ) -> _Candidate | None:
        """The branch with most usable tokens, of several the first. Byte ends cost O(length), so branches that cannot
        win are skipped."""
        best: _Candidate | None = None
        for matched, branch in sorted(compared, key=lambda pair: -pair[0]):
            if best is not None and matched <= best.usable_bytes:
                break
            candidate = self._candidate(branch, key, matched, source, mode)
            if best is None or candidate.num_usable > best.num_usable:
                best = candidate
        return best

    def _candidate(self, branch: StoredBranch, key: bytes, matched: int, source: Source, mode: Mode) -> _Candidate:
        # Every token has at least one byte, so at most `matched` of them end inside.
        ends = self._encoder.byte_ends(branch.ids[: matched + 1])
        num = int(np.searchsorted(ends, matched, side="right"))
        if mode == "canonical":
            num = min(num, branch.canonical_tokens)
        while num and not on_boundary(key, int(ends[num - 1])):
            num -= 1
        return _Candidate(branch, source, mode, self.index.key(branch), matched, ends, num)

    def _answer(
        self, key: bytes, own: _Candidate | None, shared: _Candidate | None, mode: Mode | None, began: float
    ) -> TextMatch:
        found = [each for each in (own, shared) if each is not None]
        is_own = own is not None and own.source == "own"
        reported = own if is_own else max(found, key=lambda each: each.num_usable, default=None)
        relation = reported.relation(key, self._min_reuse_tokens) if reported is not None else "none"
        difference = None
        if reported is not None and relation in ("diverge", "none"):
            difference = Difference(
                reported.matched, reported.key, reported.source, reported.num_usable, len(reported.branch.ids)
            )
        fit = [each for each in found if each.relation(key, self._min_reuse_tokens) != "none"]
        chosen = max(fit, key=lambda each: each.num_usable, default=None)
        if chosen is None:
            kept = mode or ("continuation" if own is not None else "canonical")
            return TextMatch(relation, None, None, 0, 0, 0, kept, difference, self._clock() - began)
        self.index.use(chosen.branch)
        num_tokens, resume_byte = self._cut(chosen, key)
        return TextMatch(
            relation=relation,
            source=chosen.source,
            branch=chosen.branch,
            num_tokens=num_tokens,
            resume_byte=resume_byte,
            matched_bytes=chosen.matched,
            mode=chosen.mode,
            difference=difference,
            seconds=self._clock() - began,
        )

    def _cut(self, found: _Candidate, key: bytes) -> tuple[int, int]:
        """How many ids to reuse and the byte they end at: all usable ones if a text ends there, else a safe cut."""
        end = found.usable_bytes
        if _text_ends(found, key, end):
            return found.num_usable, end
        ends = found.ends[: found.num_usable]
        for cut in self._encoder.safe_cuts(key, end, found.matched):
            num = int(np.searchsorted(ends, cut, side="right"))
            if num and int(ends[num - 1]) == cut:
                return num, cut
        return 0, 0


def _text_ends(found: _Candidate, key: bytes, end: int) -> bool:
    """Whether a piece of text ends at `end` in both prompt and branch, so that no token crosses it.

    True if a control token follows in both, or in the prompt if the branch ends there. If the prompt itself ends there
    (it was sent again), its ids may stay as sampled; in canonical mode the branch's text must end there too.
    """
    ends_in_prompt = end == len(key) or key[end] == MARK[0]
    if end < found.matched:
        return ends_in_prompt
    ends_in_branch = found.whole or (end < len(found.key) and found.key[end] == MARK[0])
    if end == len(key) and found.mode == "continuation":
        return True
    return ends_in_prompt and ends_in_branch


def prompt_ids(
    encoder: PromptEncoder, match: TextMatch, rendered: RenderedPrompt, *, most: float = math.inf
) -> tuple[np.ndarray, int]:
    """Return the ids to run [tokens], uint32, and how many of them are known to be a fresh encoding of their text.

    Raises PromptTooLong if more than `most` tokens must be encoded.
    """
    branch = match.branch
    if branch is None or match.num_tokens == 0:
        ids = encoder.encode(rendered, most=most)
        return ids, len(ids)
    rest = encoder.encode_rest(rendered, match.resume_byte, most=most)
    ids = np.concatenate([branch.ids[: match.num_tokens], rest])
    return ids, len(ids) if match.num_tokens <= branch.canonical_tokens else branch.canonical_tokens
