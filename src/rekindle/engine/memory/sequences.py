"""Branches as records of the store, and the blocks they use. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rekindle.cache.blocks.hashing import BlockHash, chain_hashes, tail_hash
from rekindle.engine.memory.branches import Branch, KnownBranch
from rekindle.store.warm import SequenceRecord


def record_of(branch: Branch, num_tokens: int | None = None) -> SequenceRecord:
    """Return the branch as a record for the store, or its first `num_tokens`, of which it then says no more."""
    most = branch.num_tokens if num_tokens is None else num_tokens
    return SequenceRecord(
        namespace=branch.namespace,
        agent=branch.agent,
        branch=branch.number,
        root=branch.root,
        head=branch.head,
        num_tokens=most,
        canonical_tokens=min(branch.canonical_tokens, most),
        last_use=branch.last_use,
        turn_ends=tuple(end for end in branch.turn_ends if end <= most),
        resume_points=tuple(at for at in branch.resume_points if at <= most),
    )


def durable_tokens(branch: Branch, block_tokens: int) -> int:
    """Return how many leading tokens can be durable: those up to the branch's head, or seen so far.

    A tail that another request had published first has no hash of its own, so the head is the full block before it.
    """
    if branch.seen_blocks is not None:
        return min(branch.num_tokens, branch.seen_blocks * block_tokens)
    if not isinstance(branch, KnownBranch) or branch.head != (branch.hashes[-1] if branch.hashes else branch.root):
        return branch.num_tokens
    return len(branch.hashes) * block_tokens


def to_save(branches: Iterable[Branch], block_tokens: int) -> tuple[SequenceRecord, ...]:
    """Return the records to save for these branches; none for a branch without a block."""
    each = ((branch, durable_tokens(branch, block_tokens)) for branch in branches)
    return tuple(_ending_at(branch, num_tokens) for branch, num_tokens in each if num_tokens)


def _ending_at(branch: Branch, num_tokens: int) -> SequenceRecord:
    """Return the record of a branch's first tokens, at least one."""
    record = record_of(branch, num_tokens)
    if branch.seen_blocks is None or not isinstance(branch, KnownBranch):
        return record
    return replace(record, head=branch.hashes[branch.seen_blocks - 1])


def stored_record(branch: KnownBranch, num_tokens: int, block_tokens: int) -> SequenceRecord:
    """Return the record of a branch of which the store has its first tokens: all of them, or whole blocks."""
    record = record_of(branch, num_tokens)
    is_whole = num_tokens == branch.num_tokens
    return record if is_whole else replace(record, head=branch.hashes[num_tokens // block_tokens - 1])


def branch_of(record: SequenceRecord) -> Branch:
    """Return the branch of a record, without ids; all of it is durable."""
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
    """Return the branch cut to the length of its record, with the remaining ids."""
    shorter = replace(branch_of(record), last_use=branch.last_use)
    if not isinstance(branch, KnownBranch) or len(branch.ids) < record.num_tokens:
        return shorter
    ids = branch.ids[: record.num_tokens].copy()
    return shorter.with_ids(ids, tuple(chain_hashes(branch.root, ids, block_tokens)))


def branch_hashes(branch: Branch, block_tokens: int) -> set[BlockHash]:
    """Return the hashes of a branch's blocks; of a branch without ids only that of its head."""
    if not isinstance(branch, KnownBranch):
        return {branch.head}
    rest = branch.ids[len(branch.hashes) * block_tokens :]
    tail = {tail_hash(branch.hashes[-1] if branch.hashes else branch.root, rest)} if len(rest) else set()
    return {branch.head, *branch.hashes, *tail} - {branch.root}
