"""How a branch stands in the store, and which blocks it stands on. Knows no threads and asks nobody."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rekindle.cache.blocks.hashing import BlockHash, chain_hashes, tail_hash
from rekindle.engine.memory.branches import Branch, KnownBranch
from rekindle.store.warm import SequenceRecord


def record_of(branch: Branch) -> SequenceRecord:
    """The branch as the store is to keep it."""
    return SequenceRecord(
        namespace=branch.namespace,
        agent=branch.agent,
        branch=branch.number,
        root=branch.root,
        head=branch.head,
        num_tokens=branch.num_tokens,
        canonical_tokens=branch.canonical_tokens,
        last_use=branch.last_use,
        turn_ends=branch.turn_ends,
    )


def durable_tokens(branch: Branch, block_tokens: int) -> int:
    """How many leading tokens can be durable: those up to the branch's head.

    A tail that another request had published first has no name of its own, so the head is the full block before it.
    """
    if not isinstance(branch, KnownBranch) or branch.head != (branch.hashes[-1] if branch.hashes else branch.root):
        return branch.num_tokens
    return len(branch.hashes) * block_tokens


def to_save(branches: Iterable[Branch], block_tokens: int) -> tuple[SequenceRecord, ...]:
    """What the store is to keep of these branches; of one that has no block nothing."""
    each = ((branch, durable_tokens(branch, block_tokens)) for branch in branches)
    return tuple(replace(record_of(branch), num_tokens=num_tokens) for branch, num_tokens in each if num_tokens)


def branch_of(record: SequenceRecord) -> Branch:
    """What the store keeps, without its ids; all of it is durable."""
    return Branch(
        namespace=record.namespace,
        agent=record.agent,
        number=record.branch,
        root=BlockHash(record.root),
        head=BlockHash(record.head),
        num_tokens=record.num_tokens,
        canonical_tokens=record.canonical_tokens,
        saved_tokens=record.num_tokens,
        last_use=record.last_use,
        turn_ends=record.turn_ends,
    )


def cut(branch: Branch, record: SequenceRecord, block_tokens: int) -> Branch:
    """The branch as short as the store has it, with the ids that are left."""
    shorter = replace(branch_of(record), last_use=branch.last_use)
    if not isinstance(branch, KnownBranch) or len(branch.ids) < record.num_tokens:
        return shorter
    ids = branch.ids[: record.num_tokens].copy()
    return shorter.with_ids(ids, tuple(chain_hashes(branch.root, ids, block_tokens)))


def branch_hashes(branch: Branch, block_tokens: int) -> set[BlockHash]:
    """Names of the blocks of a branch; of one without ids that of its head alone."""
    if not isinstance(branch, KnownBranch):
        return {branch.head}
    rest = branch.ids[len(branch.hashes) * block_tokens :]
    tail = {tail_hash(branch.hashes[-1] if branch.hashes else branch.root, rest)} if len(rest) else set()
    return {branch.head, *branch.hashes, *tail} - {branch.root}
