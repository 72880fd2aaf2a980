"""The budget of findable texts: who leaves for whom."""

from __future__ import annotations

import numpy as np

from rekindle.matching.text_index import StoredBranch, TextIndex


def branch(namespace: str, number: int, length: int = 400) -> StoredBranch:
    ids = np.full(length, number, dtype=np.uint32)
    return StoredBranch(namespace, f"agent {number}", 0, ids, length)


def index_of(max_bytes: int) -> tuple[TextIndex, list[StoredBranch]]:
    """An index whose keys are the bytes of the ids, and the branches that it dropped."""
    index = TextIndex(lambda ids: bytes(ids.tobytes()), max_bytes=max_bytes)
    return index, index.dropped


def test_the_least_recently_used_of_a_tenant_leaves_first() -> None:
    index, dropped = index_of(10_000)
    branches = [branch("a", number) for number in range(6)]
    for each in branches[:2]:
        index.put(each)
    for each in branches[2:]:
        index.use(branches[0])
        index.put(each)
        index.check()
    assert dropped[0] is branches[1] and branches[0] in index


def test_a_tenant_that_takes_most_makes_room_for_all() -> None:
    index, dropped = index_of(20_000)
    mine = [branch("b", number) for number in range(2)]
    for each in mine:
        index.put(each)
    for number in range(40):
        index.put(branch("a", 100 + number))
        index.check()
    assert dropped and {each.namespace for each in dropped} == {"a"}
    assert all(each in index for each in mine)
    large = branch("b", 99, length=1_500)
    index.put(large)
    index.check()
    assert large in index, "the newest one stays"
