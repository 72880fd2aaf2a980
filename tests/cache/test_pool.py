"""Single promises of the pool and its tables, each in a few lines; test_table.py has the state machine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rekindle.cache import BlockCopy, BlockHash, BlockPool, BlockTable, block_hash, chain_hashes, root_hash, tail_hash

ROOT = root_hash(fingerprint=b"fp", namespace="default", cache_salt="", secret=b"s")
OTHER = root_hash(fingerprint=b"fp", namespace="other", cache_salt="", secret=b"s")


def array(*ids: int) -> np.ndarray:
    return np.array(ids, np.uint32)


def stored(pool: BlockPool, ids: np.ndarray, root: BlockHash = ROOT) -> BlockTable:
    """A table with all of `ids` stored and its full blocks published."""
    table = BlockTable(pool)
    hot = pool.try_reuse_prefix(root, ids)
    table.append_shared(hot, len(hot) * pool.block_tokens)
    assert table.prepare(len(ids)) == []
    table.publish(ids, root)
    return table


def turn(pool: BlockPool, ids: np.ndarray, root: BlockHash = ROOT) -> list[int]:
    """Store and seal a sequence, let go of it, and return the blocks it left behind."""
    table = stored(pool, ids, root)
    table.seal(ids, root)
    blocks = list(table.blocks)
    table.release()
    return blocks


def test_a_thousand_agents_run_through_a_pool_that_holds_ten() -> None:
    pool = BlockPool(num_blocks=30, block_tokens=4)
    for agent in range(1000):
        ids = np.arange(10, dtype=np.uint32) + 100 * agent
        assert len(turn(pool, ids)) == 3
    pool.check()
    assert (pool.num_free, pool.num_cached, pool.num_held) == (0, 30, 0)
    assert len(pool.try_reuse_prefix(ROOT, np.arange(10, dtype=np.uint32) + 100 * 999)) == 2


def test_a_shortage_is_none_and_evicts_nothing() -> None:
    pool = BlockPool(num_blocks=4, block_tokens=4)
    turn(pool, np.arange(8, dtype=np.uint32))
    table = BlockTable(pool)
    assert table.prepare(17) is None
    assert (table.blocks, pool.num_free, pool.num_cached) == ([], 2, 2)
    assert table.prepare(16) == []
    assert pool.allocate() is None
    pool.check()


def test_a_cached_parent_of_a_held_block_cannot_be_had() -> None:
    pool = BlockPool(num_blocks=3, block_tokens=2)
    parent, child = turn(pool, array(1, 2, 3, 4))
    pool.share(child)
    assert pool.allocate_many(2) is None
    assert (pool.num_free, pool.num_cached, pool.num_held) == (1, 1, 1)
    assert not pool.evict(parent)
    pool.release(child)
    assert pool.allocate_many(3) is not None


def test_the_sequence_used_longest_ago_leaves_first_and_from_its_end() -> None:
    left: list[BlockHash] = []
    pool = BlockPool(num_blocks=6, block_tokens=2, on_evict=left.append)
    first, second = array(0, 1, 2, 3, 4), array(10, 11, 12, 13, 14)
    turn(pool, first)
    turn(pool, second)
    pool.release_all(pool.try_reuse_prefix(ROOT, first))
    chains = chain_hashes(ROOT, first, 2), chain_hashes(ROOT, second, 2)
    tails = tail_hash(chains[0][-1], first[4:]), tail_hash(chains[1][-1], second[4:])
    assert pool.allocate_many(6) is not None
    assert left == [tails[0], tails[1], chains[1][1], chains[1][0], chains[0][1], chains[0][0]]


def test_find_counts_as_a_use_and_peek_does_not() -> None:
    pool = BlockPool(num_blocks=3, block_tokens=2)
    (old,), (new,), (last,) = turn(pool, array(1, 2)), turn(pool, array(3, 4)), turn(pool, array(5, 6))
    assert pool.find(block_hash(ROOT, array(1, 2)), array(1, 2)) == old
    assert pool.peek(block_hash(ROOT, array(3, 4)), array(3, 4)) == new
    assert pool.peek(block_hash(ROOT, array(3, 4)), array(3, 5)) is None
    assert [pool.allocate() for _ in range(3)] == [new, last, old]


def test_a_demoted_block_leaves_before_older_ones() -> None:
    pool = BlockPool(num_blocks=3, block_tokens=2)
    turn(pool, array(1, 2))
    (superseded,) = turn(pool, array(3))
    held = stored(pool, array(5, 6))
    assert pool.demote(superseded)
    assert not pool.demote(held.blocks[0])
    assert pool.allocate() == superseded


def test_a_block_registered_twice_is_stored_once() -> None:
    pool = BlockPool(num_blocks=8, block_tokens=4)
    ids = np.arange(9, dtype=np.uint32)
    one, two = BlockTable(pool), BlockTable(pool)
    for table in (one, two):
        assert table.prepare(9) == []
    assert [item.identity.hash for item in one.publish(ids, ROOT)] == chain_hashes(ROOT, ids, 4)
    assert two.publish(ids, ROOT) == []
    assert two.blocks[:2] == one.blocks[:2] and two.blocks[2] != one.blocks[2]
    assert two.names == one.names == chain_hashes(ROOT, ids, 4)
    assert pool.num_held == 4
    tails = one.seal(ids, ROOT), two.seal(ids, ROOT)
    assert tails[0] == tails[1]
    assert pool.num_held == 3
    pool.check()


def test_two_sequences_with_a_common_half_cost_one_half_more() -> None:
    pool = BlockPool(num_blocks=16, block_tokens=4)
    half = np.arange(16, dtype=np.uint32)
    stored(pool, half).release()
    for start in (100, 200):
        table = BlockTable(pool)
        table.append_shared(pool.try_reuse_prefix(ROOT, half), 16)
        ids = np.concatenate([half, np.arange(start, start + 16, dtype=np.uint32)])
        assert table.prepare(32) == []
        table.publish(ids, ROOT)
    assert pool.num_held == 4 + 4 + 4


def test_only_the_tail_of_a_fork_is_copied_and_only_when_written() -> None:
    pool = BlockPool(num_blocks=8, block_tokens=4)
    ids = np.arange(6, dtype=np.uint32)
    one = stored(pool, ids)
    two = one.fork()
    assert two.blocks == one.blocks and pool.num_held == 2
    shared = one.blocks[1]
    copies = two.prepare(7)
    assert copies == [BlockCopy(source=shared, target=two.blocks[1], num_tokens=2)]
    two.publish(np.arange(7, dtype=np.uint32), ROOT)
    assert one.prepare(7) == [], "the last holder of an unnamed tail writes in place"
    assert one.blocks[1] == shared


def test_a_copy_may_wait_because_its_source_stays_held() -> None:
    pool = BlockPool(num_blocks=3, block_tokens=4)
    (tail,) = turn(pool, array(1, 2))
    table = BlockTable(pool)
    pool.share(tail)
    table.append_shared([tail], 2)
    assert table.prepare(3) == [BlockCopy(tail, table.blocks[0], 2)]
    assert pool.allocate() != tail
    assert pool.allocate() is None
    table.publish(array(1, 2, 3), ROOT)
    assert pool.allocate() == tail


def test_part_of_a_block_is_used_and_the_rest_computed_anew() -> None:
    pool = BlockPool(num_blocks=4, block_tokens=4)
    (whole,) = turn(pool, array(1, 2, 3, 4))
    assert pool.find_child(ROOT, array(1, 2, 9)) == (whole, 2)
    assert pool.find_child(ROOT, array(9)) is None
    assert pool.find_child(OTHER, array(1, 2)) is None
    pool.share(whole)
    table = BlockTable(pool)
    table.append_shared([whole], 2)
    assert table.seal(array(1, 2), ROOT) is None, "a part of a longer block needs no name"
    assert table.prepare(4) == [BlockCopy(whole, table.blocks[0], 2)]
    (item,) = table.publish(array(1, 2, 9, 9), ROOT)
    assert item.identity.hash == block_hash(ROOT, array(1, 2, 9, 9))


def test_the_longest_of_many_children_is_found() -> None:
    pool = BlockPool(num_blocks=2000, block_tokens=16)
    for child in range(1500):
        turn(pool, array(1, 1, child // 40, child % 40, 5))
    block, num_common = pool.find_child(ROOT, array(1, 1, 30, 7, 6)) or (-1, 0)
    assert num_common == 4 and pool.ids(block).tolist() == [1, 1, 30, 7, 5]
    assert (pool.find_child(ROOT, array(1, 1, 90)) or (-1, 0))[1] == 2


def test_of_children_that_share_as_much_the_newest_is_found() -> None:
    pool = BlockPool(num_blocks=8, block_tokens=4)
    blocks = [turn(pool, array(1, number, 5, 6))[0] for number in (3, 9, 4, 7)]
    assert pool.find_child(ROOT, array(1, 8)) == (blocks[3], 1)
    assert pool.evict(blocks[3])
    assert pool.find_child(ROOT, array(1, 8)) == (blocks[2], 1)
    assert pool.find_child(ROOT, array(1, 9, 9)) == (blocks[1], 2)


def test_a_tail_is_not_found_as_a_full_block() -> None:
    pool = BlockPool(num_blocks=4, block_tokens=4)
    turn(pool, array(1, 2, 3))
    assert pool.find(block_hash(ROOT, array(1, 2, 3)), array(1, 2, 3)) is None
    assert pool.try_reuse_prefix(ROOT, array(1, 2, 3, 4)) == []
    assert pool.find_child(ROOT, array(1, 2, 3, 4)) == (0, 3)


def test_nothing_is_published_after_a_collision_until_it_is_gone() -> None:
    pool = BlockPool(num_blocks=4, block_tokens=2)
    mine, theirs = array(1, 2, 3, 4, 5), array(8, 9)
    squatter = pool.allocate()
    assert squatter is not None
    assert pool.register(squatter, block_hash(ROOT, mine[:2]), ROOT, theirs) == squatter
    table = stored(pool, mine)
    assert table.names == [] and pool.is_private(table.blocks[0]) and pool.is_private(table.blocks[1])
    assert table.seal(mine, ROOT) is None
    assert pool.num_held == 4
    twin = table.fork()
    pool.release(squatter)
    assert pool.evict(squatter)
    assert [item.identity.hash for item in table.publish(mine, ROOT)] == chain_hashes(ROOT, mine, 2)
    assert twin.publish(mine, ROOT) == [] and twin.names == table.names


def test_names_of_shared_blocks_end_at_one_without_a_name() -> None:
    pool = BlockPool(num_blocks=4, block_tokens=2)
    unnamed, (named,) = pool.allocate(), turn(pool, array(3, 4))
    assert unnamed is not None
    pool.share(named)
    table = BlockTable(pool)
    table.append_shared([unnamed, named], 4)
    assert table.names == []


def test_what_cannot_be_registered_is_refused_and_says_what_is_expected() -> None:
    with pytest.raises(ValueError, match="at least, not 0 of 16 tokens"):
        BlockPool(0, 16)
    with pytest.raises(ValueError, match="at least, not 4 of 0 tokens"):
        BlockPool(4, 0)
    pool, ids = BlockPool(num_blocks=4, block_tokens=2), array(1, 2)
    block, name = pool.allocate() or 0, block_hash(ROOT, ids)
    refused: list[tuple[str, Callable[[], int]]] = [
        ("a full block holds 2 ids, not 1", lambda: pool.register(block, name, ROOT, ids[:1])),
        ("have 32 bytes, not 31", lambda: pool.register(block, BlockHash(name[1:]), ROOT, ids)),
        ("have 32 bytes, not 0", lambda: pool.register(block, name, BlockHash(b""), ids)),
        ("a tail of blocks of 2 holds fewer ids.*not 2", lambda: pool.register_tail(block, ROOT, ids)),
        ("a tail of blocks of 2 holds fewer ids.*not 0", lambda: pool.register_tail(block, ROOT, ids[:0])),
        ("have 32 bytes, not 33", lambda: pool.register_tail(block, BlockHash(ROOT + b"x"), ids[:1])),
    ]
    for says, operation in refused:
        with pytest.raises(ValueError, match=says):
            operation()
    assert pool.is_private(block) and pool.num_held == 1
    pool.check()


def test_ids_may_be_lists_ranges_and_arrays_of_any_integers() -> None:
    asked = [[1, 2, 3, 4, 5], (1, 2, 3, 4, 5), range(1, 6), np.arange(1, 6), np.arange(1, 6, dtype=np.uint32)]
    for ids in asked:
        pool = BlockPool(num_blocks=4, block_tokens=2)
        table = BlockTable(pool)
        assert table.prepare(5) == []
        assert [each.identity.hash for each in table.publish(ids, ROOT)] == chain_hashes(ROOT, asked[-1], 2)
        assert table.seal(ids, ROOT) is not None
        for other in asked:
            assert pool.find(table.names[0], other[:2]) == pool.peek(table.names[0], other[:2]) == table.blocks[0]
            assert pool.find_child(table.names[1], other[4:]) == (table.blocks[2], 1)
            blocks = pool.try_reuse_prefix(ROOT, other)
            assert blocks == table.blocks[:2]
            pool.release_all(blocks)
            assert block_hash(ROOT, other[:2]) == table.names[0]
            assert tail_hash(table.names[1], other[4:]) == pool.name(table.blocks[2])
        pool.check()


def test_an_abandoned_step_gives_its_reserved_blocks_back() -> None:
    pool = BlockPool(num_blocks=4, block_tokens=4)
    table = stored(pool, array(1, 2, 3))
    assert table.prepare(13) == []
    assert pool.num_free == 0
    table.truncate(3)
    assert pool.num_free == 3
    assert table.num_tokens == 3


def test_a_private_block_needs_no_copy_and_any_other_gets_one() -> None:
    pool = BlockPool(num_blocks=3, block_tokens=4)
    private = pool.allocate()
    assert private is not None
    assert pool.copy_on_write(private, 3) == BlockCopy(private, private, 0)
    pool.share(private)
    copy = pool.copy_on_write(private, 3)
    assert copy is not None and copy == BlockCopy(private, copy.target, 3) and pool.is_private(copy.target)
    assert pool.refs(private) == 2, "the reference on the source stays with its holder"
    named = pool.register_tail(copy.target, ROOT, array(1, 2))
    assert pool.copy_on_write(named, 2) == BlockCopy(named, 2, 2), "what has a name is never written"
    assert pool.copy_on_write(named, 2) is None, "every block is held"
    assert pool.refs(named) == 1
    pool.check()


def test_a_table_that_finds_no_room_beside_its_copy_is_as_before() -> None:
    pool = BlockPool(num_blocks=4, block_tokens=2)
    parent, child, tail = turn(pool, array(1, 2, 3, 4, 5))
    table = BlockTable(pool)
    for block in (child, tail):
        pool.share(block)
    table.append_shared([child, tail], 3)
    assert table.prepare(6) is None, "a copy and one more, but the cached parent of what is held cannot leave"
    assert table.blocks == [child, tail] and (pool.num_free, pool.num_cached, pool.num_held) == (1, 1, 2)
    copies = table.prepare(4)
    assert copies == [BlockCopy(tail, table.blocks[1], 1)] and pool.name(parent) is not None


def test_ids_outlast_their_block() -> None:
    pool = BlockPool(num_blocks=1, block_tokens=2)
    (block,) = turn(pool, array(1, 2))
    ids = pool.ids(block)
    turn(pool, array(3, 4))
    assert ids.tolist() == [1, 2] and pool.ids(block).tolist() == [3, 4]


def test_ids_keep_the_name_they_came_with() -> None:
    pool = BlockPool(num_blocks=3, block_tokens=2)
    (block,) = turn(pool, array(1, 2))
    other = pool.allocate()
    assert other is not None
    assert pool.register(other, OTHER, ROOT, array(1, 2)) == other
    assert pool.is_private(other) and pool.block_of(OTHER) is None
    assert pool.find_child(ROOT, array(1, 2)) == (block, 2)
    pool.check()


def test_a_parent_that_comes_after_its_child_has_no_name_until_that_has_left() -> None:
    pool = BlockPool(num_blocks=3, block_tokens=2)
    names = chain_hashes(ROOT, array(1, 2, 3, 4), 2)
    child, parent = pool.allocate_many(2) or (0, 0)
    pool.register(child, names[1], names[0], array(3, 4))
    assert pool.parent(child) == names[0] and pool.find_child(names[0], array(3)) == (child, 1)
    assert pool.register(parent, names[0], ROOT, array(1, 2)) == parent
    assert pool.is_private(parent) and pool.try_reuse_prefix(ROOT, array(1, 2, 3, 4)) == []
    pool.release(child)
    pool.check()
    assert pool.evict(child)
    assert pool.register(parent, names[0], ROOT, array(1, 2)) == parent and pool.name(parent) == names[0]
    pool.check()


def test_blocks_expire_from_their_ends_once_nobody_holds_them() -> None:
    now = 0.0
    left: list[BlockHash] = []
    pool = BlockPool(num_blocks=8, block_tokens=2, clock=lambda: now, ttl=10.0, on_evict=left.append)
    held = stored(pool, array(1, 2))
    turn(pool, array(1, 2, 3, 4, 5))
    now = 5.0
    turn(pool, array(7, 8))
    assert pool.expire(9.9) == 0
    names = chain_hashes(ROOT, array(1, 2, 3, 4), 2)
    assert pool.expire(10.0) == 2 and left == [tail_hash(names[1], array(5)), names[1]]
    held.release()
    assert pool.expire(14.9) == 0
    assert pool.expire(15.0) == 2 and pool.num_free == 8, "the last use of both was at 5"
    assert not pool.num_evictions
    pool.check()


def test_who_is_over_quota_makes_room_first() -> None:
    pool = BlockPool(num_blocks=6, block_tokens=2)
    pool.set_quota(ROOT, 2)
    older = turn(pool, array(1, 2), OTHER)
    greedy = turn(pool, array(1, 2, 3, 4, 5, 6), ROOT)
    assert pool.allocate_many(2) is not None
    assert [pool.allocate()] == greedy[-1:] and pool.name(older[0]) is not None
    assert [pool.allocate()] == older, "within its quota, by the last use"
    pool.set_quota(ROOT, None)
    assert pool.allocate_many(2) == [greedy[1], greedy[0]]


def test_a_block_costs_what_its_arrays_take() -> None:
    pool = BlockPool(num_blocks=1 << 12, block_tokens=16)
    empty = pool.nbytes
    turn(pool, np.arange(16 << 12, dtype=np.uint32))
    assert not pool.num_free
    assert empty <= pool.nbytes <= 300 << 12


def test_a_clock_without_a_finite_time_changes_nothing() -> None:
    times = iter([float("nan"), 1.0, float("inf"), 2.0])
    pool = BlockPool(2, 4, clock=lambda: next(times))
    block = pool.allocate()
    assert block is not None
    ids = np.arange(4, dtype=np.uint32)
    root = BlockHash(bytes(32))
    pool.register(block, block_hash(root, ids), root, ids)
    with pytest.raises(ValueError, match="finite"):
        pool.release(block)
    assert pool.refs(block) == 1
    pool.check()
    pool.release(block)
    with pytest.raises(ValueError, match="finite"):
        pool.find(block_hash(root, ids), ids)
    pool.check()
    assert pool.find(block_hash(root, ids), ids) == block


def test_a_pool_prints_how_many_blocks_are_free_cached_and_held() -> None:
    pool = BlockPool(num_blocks=1000, block_tokens=2)
    turn(pool, array(1, 2, 3, 4))
    pool.allocate()
    assert repr(pool) == "<BlockPool of 1,000 blocks of 2 tokens: 997 free, 2 cached, 1 held>"
