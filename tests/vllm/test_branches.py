"""Which branch a finished request continues."""

from __future__ import annotations

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.store.values import SequenceRecord
from rekindle_vllm.branches import MOST_BRANCHES, Branches, Place


def names(*numbers: int) -> list[BlockHash]:
    return [BlockHash(bytes([number]) * 32) for number in numbers]


def test_a_chain_continues_the_branch_whose_head_it_contains() -> None:
    branches = Branches()
    assert branches.place("default", "ada", names(1, 2), 1) == Place("default", "ada", 0)
    assert branches.place("default", "ada", names(1, 2, 3), 2) == Place("default", "ada", 0)
    assert branches.place("default", "ada", names(1, 2, 4), 3) == Place("default", "ada", 1)
    assert branches.place("default", "ada", names(1, 2, 4), 4) == Place("default", "ada", 1)
    assert branches.place("default", "eve", names(1, 2, 3, 5), 5) == Place("default", "eve", 0)
    assert branches.place("other", "ada", names(1, 2, 3), 6) == Place("other", "ada", 0)
    branches.check()


def test_unnamed_conversations_continue_unnamed_ones_only() -> None:
    branches = Branches()
    branches.place("default", "ada", names(1), 1)
    first = branches.place("default", None, names(1, 2), 2)
    assert first.agent != "ada" and branches.place("default", None, names(1, 2, 3), 3) == first
    assert branches.place("default", None, names(1, 2), 4) != first
    branches.check()


def test_of_many_branches_the_one_used_longest_ago_is_replaced() -> None:
    branches = Branches()
    for number in range(MOST_BRANCHES):
        assert branches.place("default", "ada", names(number), 10 + (number + 3) % MOST_BRANCHES).branch == number
    assert branches.place("default", "ada", names(99), 100).branch == MOST_BRANCHES - 3
    assert branches.place("default", "ada", names(99, 98), 101).branch == MOST_BRANCHES - 3
    assert branches.place("default", "ada", names(97), 102).branch == MOST_BRANCHES - 2
    branches.check()


def test_branches_of_an_opened_store_are_continued_and_lost_ones_are_not() -> None:
    branches = Branches()
    (root, head) = names(0, 1)
    branches.restore([SequenceRecord("default", "ada", 3, root, head, 64, 64, 5.0)])
    assert branches.place("default", "ada", names(1, 2), 6) == Place("default", "ada", 3)
    branches.lost("default", "ada", 3, 0)
    branches.lost("default", "eve", 0, 0)
    assert branches.place("default", "ada", names(1, 2, 3), 7) == Place("default", "ada", 0)
    branches.check()
