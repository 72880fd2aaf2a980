"""Sequences: token ids, the blocks that hold their KV, and how far it is computed.

Owns token ids and `num_computed`; does not know who waits for the reply. Cold prompt, warm prompt, chunk, decode,
preemption and resume are all the distance between two integers:

    0 ........ num_computed ............ num_tokens          positions [0, num_stored) have their KV in `table`;
    |--reused--|--- still to compute ---|                    rows below num_stored are run without being written
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash, block_hash
from rekindle.cache.blocks.table import BlockTable
from rekindle.engine.drafts import Acceptance
from rekindle.engine.prompt_scores import PromptScores
from rekindle.engine.types import Reuse, Task
from rekindle.model.adjustments import History
from rekindle.text.pictures import PictureSpan, PromptPictures

# Which blocks of a turn go to the disk: all, those that an earlier request had computed, or none.
Saves = Literal["all", "seen", "none"]


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and its reply so far. Mutable, owned by the engine thread once submitted.

    `task` "idle": a prompt that is computed only while no request needs the engine, and never remembered as a turn.
    `prompt_ids` have ids of their own for the tokens of `pictures`. `texts` are ids of other stored texts of its agent,
    from which its reply may quote. `scores`: those of its prompt's
    tokens, if they were requested. `is_measured`: it is computed for them alone, and nobody continues it.
    """

    root: BlockHash
    prompt_ids: np.ndarray  # uint32
    table: BlockTable
    reuse: Reuse
    task: Task | Literal["idle"]
    max_new_tokens: int = 0
    texts: tuple[np.ndarray, ...] = ()  # uint32
    pictures: PromptPictures | None = None
    scores: PromptScores | None = None
    is_measured: bool = False
    saves: Saves = "all"
    resume_points: set[int] = field(default_factory=set)  # tokens after which others, or its next turn, may go on
    num_unresumed: int = 0  # stored tokens after the point at which it was resumed when it first started
    num_computed: int = 0
    num_generated: int = 0
    num_preemptions: int = 0
    num_before: int = 0  # most tokens ever computed when it started or was preempted
    hot_tokens: int = 0  # of the prompt, reused from memory when it first started
    warm_tokens: int = 0  # reused from disk
    read: BlockHash | None = None  # the last block with reused tokens, if it had a name by then
    loaded: set[BlockHash] = field(default_factory=set)
    tried_loads: set[BlockHash] = field(default_factory=set)  # bad on disk
    hashes: list[BlockHash] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=Acceptance)  # of drafts for its reply
    num_prompt: int = field(init=False)
    token_ids: np.ndarray = field(init=False)  # uint32, sized for the whole reply

    def __post_init__(self) -> None:
        self.num_prompt = len(self.prompt_ids)
        self.resume_points.add(self.num_prompt)
        self.token_ids = np.zeros(self.num_prompt + self.max_new_tokens, dtype=np.uint32)
        self.token_ids[: self.num_prompt] = self.prompt_ids

    def note_resumed(self, position: int, *, num_matched: int) -> None:
        """Record where it is resumed; if its match ends later, others may part from it there, too."""
        if position < num_matched:
            self.resume_points.add(num_matched)
        if not self.num_preemptions:
            self.num_unresumed = num_matched - position

    def note_reused(self, num_tokens: int, names: Iterable[BlockHash | None]) -> None:
        """Count the tokens that it reuses of blocks with these names: those read from disk for it, and the others."""
        ends = [min(end, num_tokens) for end in range(0, num_tokens + self.block_tokens, self.block_tokens)]
        of_blocks = list(zip(names, pairwise(ends), strict=False))
        self.warm_tokens = sum(end - first for name, (first, end) in of_blocks if name in self.loaded)
        self.hot_tokens = num_tokens - self.warm_tokens
        self.read = of_blocks[-1][0] if of_blocks else None

    @property
    def block_tokens(self) -> int:
        """Tokens of a full block."""
        return self.table.pool.block_tokens

    @property
    def is_turn(self) -> bool:
        """Whether it is remembered when it ends."""
        return self.task not in ("absorb", "idle") and not self.is_measured

    @property
    def saves_all(self) -> bool:
        """Whether every block of it is written to disk; others wait in memory for a turn that depends on them."""
        return self.is_turn and self.saves == "all"

    @property
    def seen_blocks(self) -> int | None:
        """How many of its first blocks are all that goes to disk, as others had computed them before; None: any."""
        if self.saves == "all":
            return None
        return self.reused_tokens // self.block_tokens if self.saves == "seen" else 0

    @property
    def is_scored(self) -> bool:
        """Whether scores of its prompt are still to be computed."""
        return self.scores is not None and not self.scores.is_complete

    @property
    def num_reusable(self) -> int:
        """Tokens of the prompt that need not run; with a reply the last one must, for its logits, and so must all whose
        logits score a token."""
        most = self.num_prompt - (self.task == "generate")
        return most if self.scores is None else min(most, self.scores.num_skippable)

    @property
    def num_resumable(self) -> int:
        """Tokens of prompt and reply that need not run before the next one can be sampled, or the task is done."""
        most = self.num_tokens - (self.task == "generate")
        return most if self.scores is None or self.scores.is_complete else min(most, self.scores.num_skippable)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and reply so far."""
        return self.num_prompt + self.num_generated

    @property
    def num_left(self) -> int:
        """Tokens still to compute before the next one can be sampled, or the task is done; 1 while decoding."""
        return self.num_prompt + self.num_generated - self.num_computed

    @property
    def num_gained(self) -> int:
        """Tokens computed since it started, beyond those ever computed before; negative while it recomputes."""
        return self.num_computed - self.num_before

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that were reused."""
        return self.hot_tokens + self.warm_tokens

    @property
    def ids(self) -> np.ndarray:
        """Token ids of prompt and reply so far (uint32, a view)."""
        return self.token_ids[: self.num_tokens]

    def history(self, num_unknown: int = 0) -> History:
        """Prompt and reply tokens, as sampling sees them; the last ones may be unknown, which have any id."""
        return History(self._own_prompt, self.token_ids[self.num_prompt : self.num_tokens + num_unknown])

    @property
    def _own_prompt(self) -> np.ndarray:
        return self.prompt_ids if self.pictures is None else self.pictures.ids

    def model_ids(self, start: int, end: int) -> np.ndarray:
        """Return the model's own ids uint32 of tokens [start, end): pictures have others in `ids`."""
        if self.pictures is None or start >= self.num_prompt:
            return self.token_ids[start:end]
        return np.concatenate([self.pictures.ids[start:end], self.token_ids[self.num_prompt : end]])

    def picture_rows(self, start: int, end: int) -> tuple[PictureSpan, ...]:
        """Return which of the tokens [start, end), counted from `start`, are rows of pictures."""
        return () if self.pictures is None else self.pictures.within(start, end)

    def divided(self, position: int) -> tuple[int, int] | None:
        """As `PromptPictures.divided`."""
        return None if self.pictures is None else self.pictures.divided(position)

    @property
    def num_blocks_ahead(self) -> int:
        """Blocks beyond its own that it needs to continue for one block of tokens, or to its end if that is nearer.

        A request admitted with fewer takes them from others, or is preempted and recomputed: 32 requests of 20 and 40
        tokens in 30 blocks ran 36 % more rows than needed without it, 10 % with it (tests/engine/test_crowded).
        """
        size = self.block_tokens
        ahead = min(self.max_new_tokens - self.num_generated, size)
        return max(0, -(-(self.num_tokens + ahead) // size) - len(self.table.blocks))

    def append(self, token: int) -> None:
        """Add a sampled token."""
        self.token_ids[self.num_tokens] = token
        self.num_generated += 1

    def hash_at(self, index: int) -> BlockHash:
        """Return the hash of full block `index`, extending the chain as far as needed; each block is hashed once."""
        size = self.block_tokens
        while len(self.hashes) <= index:
            start = len(self.hashes) * size
            assert start + size <= self.num_tokens, "only full blocks have hashes"
            parent = self.hashes[-1] if self.hashes else self.root
            self.hashes.append(block_hash(parent, self.token_ids[start : start + size]))
        return self.hashes[index]

    def parent_of(self, index: int) -> BlockHash:
        """Return the hash of the block before `index`; the root for the first."""
        return self.hash_at(index - 1) if index else self.root


@dataclass(frozen=True, slots=True)
class Head:
    """The block a sequence ends in, full, tail or longer than the sequence, and how much of the sequence it covers."""

    hash: BlockHash
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """What is stored of a sequence that ended: its ids (uint32), the hashes of its full blocks, and its head."""

    ids: np.ndarray
    hashes: tuple[BlockHash, ...]
    head: Head
