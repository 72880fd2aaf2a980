"""Heads: branches are merged without losing one, and written so that ids are not repeated."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.cache.blocks.hashing import BlockHash, chain_hashes, tail_hash
from rekindle.store.branch_text import BranchText
from rekindle_tier.heads import AgentHead, NewerHead, decode_head, head_of, tails
from rekindle_tier.sealing import BadObject

ROOT = BlockHash(b"r" * 32)
IDS = st.lists(st.integers(0, 3), min_size=1, max_size=6)


def branch(*ids: int, last_use: float = 1.0, root: BlockHash = ROOT) -> BranchText:
    return BranchText(root, np.asarray(ids, dtype=np.uint32), len(ids), last_use)


def texts(head: AgentHead) -> list[list[int]]:
    return [each.ids.tolist() for each in head.branches]


def test_a_text_that_goes_on_takes_the_place_of_its_beginning() -> None:
    head = AgentHead("a", "ada").with_branch(branch(1, 2), most=8).with_branch(branch(1, 2, 3, last_use=2.0), most=8)
    assert texts(head) == [[1, 2, 3]]
    assert head.with_branch(branch(1, 2, last_use=3.0), most=8) is head, "what is known already changes nothing"


def test_texts_that_part_are_branches_the_latest_first() -> None:
    head = AgentHead("a", "ada")
    for number in range(5):
        head = head.with_branch(branch(1, number, last_use=float(number + 1)), most=3)
    assert texts(head) == [[1, 4], [1, 3], [1, 2]], "the least recently used ones are dropped"


def test_the_same_ids_below_another_root_are_another_text() -> None:
    other = branch(1, 2, last_use=2.0, root=BlockHash(b"s" * 32))
    assert len(AgentHead("a", "ada").with_branch(branch(1, 2), most=8).with_branch(other, most=8).branches) == 2


@given(st.lists(st.lists(IDS, min_size=1, max_size=4), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_no_end_is_lost_in_whatever_order_replicas_write(sessions: list[list[list[int]]], order: random.Random) -> None:
    """Every text that was written is in the head, or a text that continues it."""
    head, written = AgentHead("a", "ada"), []
    for session in sessions:
        so_far: list[int] = []
        for words in session:
            so_far = [*so_far, *words]
            written.append(so_far)
    shuffled = order.sample(written, len(written))
    for at, ids in enumerate(shuffled):
        head = head.with_branch(branch(*ids, last_use=float(at + 1)), most=len(written))
    kept = texts(head)
    assert all(any(one[: len(ids)] == ids for one in kept) for ids in written)
    assert not any(a is not b and b[: len(a)] == a for a in kept for b in kept), "none is the beginning of another"


def test_what_ended_before_a_purge_does_not_come_back() -> None:
    head = AgentHead("a", "ada").with_branch(branch(1, 2, last_use=5.0), most=8).purged(7.0)
    assert head.branches == () and head.with_branch(branch(1, 2, 3, last_use=6.0), most=8) is head
    assert texts(head.with_branch(branch(4, last_use=8.0), most=8)) == [[4]], "a new conversation is a new memory"


def test_blocks_are_named_as_the_store_names_them() -> None:
    ids = np.arange(10, dtype=np.uint32)
    blocks = list(BranchText(ROOT, ids, 10, 1.0).blocks(4))
    names = chain_hashes(ROOT, ids, 4)
    assert [each.hash for each in blocks] == [*names, tail_hash(names[-1], ids[8:])]
    assert [each.parent for each in blocks] == [ROOT, *names]
    assert np.concatenate([each.ids for each in blocks]).tolist() == ids.tolist()
    assert [each.hash for each in BranchText(ROOT, ids[:8], 8, 1.0).blocks(4)] == names


def test_tails_are_the_last_blocks_of_its_earlier_turns() -> None:
    ids = np.arange(11, dtype=np.uint32)
    ended = BranchText(ROOT, ids, 11, 1.0, (2, 4, 9, 11))
    last = [[*BranchText(ROOT, ids[:end], end, 1.0).blocks(4)][-1].hash for end in (2, 9, 11)]
    assert list(tails(ended, 4)) == last, "a turn that filled its last block left none"


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=40), max_size=5))
def test_a_head_is_read_as_it_was_written(ids: list[list[int]]) -> None:
    branches = tuple(
        BranchText(ROOT, np.asarray(each, dtype=np.uint32), len(each) // 2, 1.5 + at, (1, at), {1: (0, at)})
        for at, each in enumerate(ids)
    )
    head = AgentHead("tenant", "ädä", branches, purged_at=0.5)
    read = decode_head(head.encode())
    assert (read.namespace, read.agent, read.purged_at) == ("tenant", "ädä", 0.5)
    assert texts(read) == texts(head)
    for one, other in zip(read.branches, branches, strict=True):
        assert one.ids.dtype == np.uint32 and one.root == other.root
        assert (one.canonical_tokens, one.last_use) == (other.canonical_tokens, other.last_use)
        assert (one.turn_ends, dict(one.parts)) == (other.turn_ends, dict(other.parts))


def test_shared_beginnings_are_written_once() -> None:
    ids = np.random.default_rng(0).integers(0, 2**32, 4000, dtype=np.uint32)
    alone = AgentHead("a", "ada", (BranchText(ROOT, ids, 0, 1.0),))
    many = AgentHead(
        "a", "ada", tuple(BranchText(ROOT, np.append(ids, at).astype(np.uint32), 0, 1.0) for at in range(8))
    )
    assert len(many.encode()) < 1.2 * len(alone.encode())


def test_a_newer_versions_head_says_so() -> None:
    written = json.loads(AgentHead("a", "ada").encode()) | {"v": 2}
    with pytest.raises(NewerHead, match=r"version 2 .* all replicas run the same version"):
        decode_head(json.dumps(written).encode())


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"null", b"[1]", b"{}", b'{"v": 1}', b'{"v": 1, "branches": [{}]}', b'{"v": 1, "branches": [3]}'],
)
def test_what_is_no_head_is_said_to_be_damaged(data: bytes) -> None:
    with pytest.raises(BadObject, match="no agent's head"):
        decode_head(data)


def test_ids_that_were_changed_are_noticed() -> None:
    written = json.loads(AgentHead("a", "ada", (branch(1, 2, 3),)).encode())
    ids = written["branches"][0]["ids"]
    written["branches"][0]["ids"] = ids[:-4] + "AAAA"  # their checksum
    with pytest.raises(BadObject, match="no agent's head"):
        decode_head(json.dumps(written).encode())


def test_another_agents_head_is_not_taken() -> None:
    data = AgentHead("a", "ada").encode()
    assert head_of(data, "a", "ada") == AgentHead("a", "ada")
    for namespace, agent in (("b", "ada"), ("a", "eve")):
        with pytest.raises(BadObject, match="another agent's"):
            head_of(data, namespace, agent)
