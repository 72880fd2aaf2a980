"""A trace: requests over time, each a list of its prompt's blocks.

Owns the blocks' hashes, chained once for all runs, and which request uses which block. Knows no file and no pool.
Blocks are numbers from 0 in order of appearance; equal contents after different prefixes are different blocks, and a
block's parent always has a smaller number.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rekindle.cache import BlockHash, TokenIds, block_hash, root_hash

MOONCAKE, LOG = "hashed blocks (Mooncake's format)", "log"  # kinds of files
ROOT = root_hash(fingerprint=b"", namespace="", cache_salt="", secret=b"")  # a trace is one namespace


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What a file does not state: tokens per block (None: detected, or the default), and whose tokenizer to use."""

    block_tokens: int | None = None
    model: str | None = None
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A prompt of `num_tokens`: its `blocks` in order, and the blocks `stored` once it is answered, these first.

    `session` is the conversation it belongs to; None where the file does not say.
    """

    at_s: float
    num_tokens: int
    blocks: tuple[int, ...]
    stored: tuple[int, ...]
    session: str | None = None


@dataclass(frozen=True, slots=True)
class TraceBlock:
    """What a pool needs to know about a block."""

    hash: BlockHash
    parent: BlockHash
    ids: TokenIds


@dataclass(frozen=True)
class Trace:
    """Requests in order of time over `blocks` of `block_tokens` each; `name` and `kind` are for display.

    Without times (`is_timed` False) only the order counts. `notes` list what was left out of the file.
    """

    name: str
    kind: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]
    blocks: tuple[TraceBlock, ...]
    is_timed: bool = True
    notes: tuple[str, ...] = ()

    @cached_property
    def num_asked(self) -> int:
        """Blocks of all prompts, counted as often as they are requested."""
        return sum(len(request.blocks) for request in self.requests)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.num_tokens for request in self.requests)

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the last."""
        return self.requests[-1].at_s if self.requests else 0.0

    def tokens_in(self, request: TraceRequest, num_blocks: int) -> int:
        """Count the tokens in the first `num_blocks` of a prompt, whose last block may be partial."""
        return min(num_blocks * self.block_tokens, request.num_tokens)

    def stored_tokens(self, request: TraceRequest, num_blocks: int) -> int:
        """Count the tokens in the first `num_blocks` stored; those after the prompt's are whole."""
        whole = num_blocks * self.block_tokens
        return whole if num_blocks > len(request.blocks) else min(whole, request.num_tokens)

    def unlinked(self) -> Trace:
        """Return the same trace with parentless blocks, so that any may be evicted, whatever its descendants."""
        numbers = np.arange(len(self.blocks), dtype=np.uint32)
        parts = [numbers[at : at + 1] for at in range(len(numbers))]
        return replace(self, blocks=tuple(TraceBlock(block_hash(ROOT, part), ROOT, part) for part in parts))


class TraceBuilder:
    """Collects requests in any order; `build` sorts them by time, from 0. Equal times stay in the order added."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._numbers: dict[tuple[int, Hashable], int] = {}  # (number of the parent, contents) -> number
        self._blocks: list[TraceBlock] = []
        self._requests: list[TraceRequest] = []
        self._ids: dict[Hashable, int] = {}

    def add_hashed(self, at_s: float, num_tokens: int, hash_ids: Sequence[Hashable]) -> None:
        """Add a request given by a foreign server's hashes; in the pool each block is one token, the hash's number."""
        numbers = [self._ids.setdefault(hash_id, len(self._ids)) for hash_id in hash_ids]
        blocks = self._chain(np.array(numbers, dtype=np.uint32), 1)
        self._requests.append(TraceRequest(at_s, num_tokens, blocks, blocks))

    def add_tokens(self, at_s: float, ids: TokenIds, stored: TokenIds, *, session: str | None = None) -> None:
        """Add a request by the token ids of its prompt and of what is `stored` afterwards; only whole blocks count."""
        prompt, whole = self._chain(ids, self._block_tokens), self._chain(stored, self._block_tokens)
        self._requests.append(TraceRequest(at_s, len(ids), prompt, max(prompt, whole, key=len), session))

    def build(self, name: str, kind: str, *, is_timed: bool = True, notes: Sequence[str] = ()) -> Trace:
        """Return the trace."""
        requests = sorted(self._requests, key=lambda request: request.at_s)
        began = requests[0].at_s if requests else 0.0
        requests = [replace(request, at_s=request.at_s - began) for request in requests]
        return Trace(name, kind, self._block_tokens, tuple(requests), tuple(self._blocks), is_timed, tuple(notes))

    def _chain(self, ids: TokenIds, step: int) -> tuple[int, ...]:
        numbers: list[int] = []
        parent = -1
        for start in range(0, len(ids) - step + 1, step):
            part = ids[start : start + step]
            key = (parent, part.tobytes())
            number = self._numbers.get(key)
            if number is None:
                number = self._numbers[key] = len(self._blocks)
                above = ROOT if parent < 0 else self._blocks[parent].hash
                self._blocks.append(TraceBlock(block_hash(above, part), above, part))
            numbers.append(number)
            parent = number
        return tuple(numbers)
