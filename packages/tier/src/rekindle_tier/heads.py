"""An agent's head: which texts it remembers, as token ids, so that every replica can match and name their blocks.

The only objects that change. A head is swapped, never overwritten: of two replicas that write at once one reads what
the other wrote and adds to it. A text that continues another takes its place; texts that part from one another are
branches, side by side.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash, chain_hashes, tail_hash
from rekindle.store.branch_text import BranchText
from rekindle_tier.objects import Objects
from rekindle_tier.sealing import BadObject, Version, head_name, purged_name

VERSION = 1


def begins(one: BranchText, other: BranchText) -> bool:
    """Whether the other branch contains all of the one."""
    num = len(one.ids)
    return one.root == other.root and num <= len(other.ids) and bool(np.array_equal(one.ids, other.ids[:num]))


def tails(branch: BranchText, block_tokens: int) -> Iterator[BlockHash]:
    """Yield the hashes of the partial blocks in which its turns ended: each was its last one for a time."""
    hashes = chain_hashes(branch.root, branch.ids, block_tokens)
    for end in branch.turn_ends:
        full = end // block_tokens
        if full * block_tokens < end <= len(branch.ids):
            yield tail_hash(hashes[full - 1] if full else branch.root, branch.ids[full * block_tokens : end])


@dataclass(frozen=True, slots=True)
class AgentHead:
    """What an agent remembers, the branch used last first. What ended before `purged_at` (wall clock) is forgotten."""

    namespace: str
    agent: str
    branches: tuple[BranchText, ...] = ()
    purged_at: float = 0.0

    def with_branch(self, branch: BranchText, *, most: int) -> AgentHead:
        """Return the head with a branch that was used, of at most `most` branches; itself if it knows more already."""
        if branch.last_use <= self.purged_at or any(begins(branch, other) for other in self.branches):
            return self
        others = [each for each in self.branches if not begins(each, branch)]
        kept = sorted((branch, *others), key=lambda each: -each.last_use)[:most]
        return replace(self, branches=tuple(kept))

    def purged(self, at: float) -> AgentHead:
        """Return the head without what ended until then (wall clock); itself if that was purged before."""
        if at <= self.purged_at:
            return self
        return replace(self, branches=tuple(each for each in self.branches if each.last_use > at), purged_at=at)

    def encode(self) -> bytes:
        """Return the head as bytes; the ids that a branch shares with one before it are written once."""
        branches = [_written(each, self.branches[:at]) for at, each in enumerate(self.branches)]
        fields = {"v": VERSION, "namespace": self.namespace, "agent": self.agent, "purged_at": self.purged_at}
        return json.dumps({**fields, "branches": branches}).encode()


class NewerHead(BadObject):
    """A head that another version of this program wrote: it is whole, and names blocks that this one cannot know."""


def decode_head(data: bytes) -> AgentHead:
    """Return a head from its bytes; NewerHead if another version wrote it, BadObject if it is none."""
    try:
        read = json.loads(data)
        if read["v"] != VERSION:
            raise NewerHead(f"version {read['v']} of an agent's head, not {VERSION}: all replicas run the same version")
        branches: list[BranchText] = []
        for each in read["branches"]:
            branches.append(_read(each, branches))
        return AgentHead(read["namespace"], read["agent"], tuple(branches), read["purged_at"])
    except (ValueError, TypeError, LookupError, AttributeError, zlib.error) as error:
        raise BadObject(f"no agent's head: {error}") from error


def head_of(data: bytes, namespace: str, agent: str) -> AgentHead:
    """Return this agent's head from its bytes; BadObject if it is another's, or as `decode_head`."""
    head = decode_head(data)
    if (head.namespace, head.agent) != (namespace, agent):
        raise BadObject("another agent's")
    return head


@dataclass(frozen=True, slots=True)
class FoundHead:
    """An agent's head as it is in the tier; an empty one without a version if there is none."""

    head: AgentHead
    version: Version | None
    num_bytes: int = 0


def read_head(objects: Objects, namespace: str, agent: str, *, timeout_s: float) -> FoundHead:
    """Return an agent's head, without what a note says was purged: an old head may have been put in its place.

    BadObject, with the head's version, if it or the note is damaged; NewerHead if it cannot be read, and must not be
    replaced.
    """
    names = (head_name(objects.sealer, namespace, agent), purged_name(objects.sealer, namespace, agent))
    got, note = objects.get_together(*names, timeout_s=timeout_s)
    if got is None:
        return FoundHead(AgentHead(namespace, agent), None)
    data, version = got
    try:
        head = head_of(data, namespace, agent)
        return FoundHead(head if note is None else head.purged(read_note(note[0])), version, len(data))
    except BadObject as error:
        error.version = version
        raise


def note_of(purged_at: float) -> bytes:
    """Return the note that an agent was purged, at this time (wall clock)."""
    return str(purged_at).encode()


def read_note(data: bytes) -> float:
    """Return when an agent was purged, from the note of it; BadObject if it is none."""
    try:
        return float(data)
    except ValueError as error:
        raise BadObject(f"no note of a purge: {error}") from error


def _written(branch: BranchText, before: Sequence[BranchText]) -> dict[str, Any]:
    shared, like = max(((_shared(branch, each), at) for at, each in enumerate(before)), default=(0, 0))
    rest = np.ascontiguousarray(branch.ids[shared:], dtype="<u4").tobytes()
    return {
        "root": branch.root.hex(),
        "like": like,
        "shared": shared,
        "ids": base64.b64encode(zlib.compress(rest, 1)).decode(),
        "canonical_tokens": branch.canonical_tokens,
        "last_use": branch.last_use,
        "turn_ends": list(branch.turn_ends),
        "parts": {str(part): list(blocks) for part, blocks in branch.parts.items()},
    }


def _read(fields: Mapping[str, Any], before: Sequence[BranchText]) -> BranchText:
    rest = np.frombuffer(zlib.decompress(base64.b64decode(fields["ids"])), dtype="<u4").astype(np.uint32)
    shared = before[fields["like"]].ids[: fields["shared"]] if fields["shared"] else np.empty(0, np.uint32)
    return BranchText(
        root=BlockHash(bytes.fromhex(fields["root"])),
        ids=np.concatenate((shared, rest)),
        canonical_tokens=fields["canonical_tokens"],
        last_use=fields["last_use"],
        turn_ends=tuple(fields["turn_ends"]),
        parts={int(part): tuple(blocks) for part, blocks in fields["parts"].items()},
    )


def _shared(one: BranchText, other: BranchText) -> int:
    num = min(len(one.ids), len(other.ids))
    differ = np.flatnonzero(one.ids[:num] != other.ids[:num])
    return int(differ[0]) if len(differ) else num
