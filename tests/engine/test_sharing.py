"""An agent's branches one by one: where they lie, and who stands on the same blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.agent_ids import new_conversation, recovered
from rekindle.cache.blocks.hashing import BlockHash, chain_hashes, tail_hash
from rekindle.engine.memory.branches import UNNAMED, Branch, KnownBranch, parents, shared_tokens
from rekindle.errors import NotFound
from tests.engine.conftest import Start

SIZE = 4
ROOT = BlockHash(b"r" * 32)
SYSTEM = {
    "role": "system",
    "content": "You are a careful assistant. Answer in one short sentence, and remember it. " * 2,
}


def branch(agent: str, ids: list[int], *, namespace: str = "default") -> Branch:
    array = np.asarray(ids, dtype=np.uint32)
    names = tuple(chain_hashes(ROOT, array, SIZE))
    parent, rest = names[-1] if names else ROOT, array[len(names) * SIZE :]
    head = tail_hash(parent, rest) if len(rest) else parent
    return KnownBranch(namespace, agent, 0, ROOT, head, len(ids), 0, 0, 0.0, (), ids=array, hashes=names)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.lists(st.integers(0, 2), min_size=1, max_size=30))
def test_what_is_shared_are_whole_blocks_or_all_of_it(mine: list[int], theirs: list[int]) -> None:
    common = next(
        (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
    )
    expected = len(mine) if mine == theirs else common // SIZE * SIZE
    found = shared_tokens(branch("ada", mine), [branch("ada", mine), branch("bob", theirs)], SIZE)
    assert found == (expected, ("bob",) if expected else ())


def test_who_shares_is_named_once_and_the_nameless_together() -> None:
    mine, nameless = branch("ada", [*range(10)]), (new_conversation(), new_conversation(), recovered(1))
    elsewhere = branch("eve", [*range(10)], namespace="other")
    others = [
        *(branch(agent, [*range(9), 3]) for agent in nameless),
        branch("bob", [*range(10)]),
        branch("bob", [*range(4)]),
        elsewhere,
        mine,
    ]
    assert shared_tokens(mine, others, SIZE) == (10, ("bob", UNNAMED))


def test_of_a_branch_that_is_only_on_disk_its_end_is_known() -> None:
    mine, theirs = branch("ada", [*range(10)]), branch("bob", [*range(8)])
    assert shared_tokens(mine, [theirs.without_ids()], SIZE) == (8, ("bob",))
    apart = branch("bob", [*range(9)])
    assert shared_tokens(mine, [apart.without_ids()], SIZE) == (0, ())


def test_a_branch_began_with_the_older_one_that_has_most_of_it() -> None:
    ids = {
        0: [*range(10)],
        2: [*range(9), 3],
        3: [*range(5), 9, 9, 9],
        5: [7, 7, 7, 7],
        6: [*range(10)],
        7: [*range(9), 3, 1],
    }
    branches = [replace(branch("ada", each), number=number) for number, each in ids.items()]
    found = {2: (0, 8), 3: (0, 4), 6: (0, 10), 7: (0, 8)}
    assert parents(branches, SIZE) == parents(branches[::-1], SIZE) == found


def test_an_engine_tells_it_of_one_agent(start: Start) -> None:
    engine = start()
    for agent, words in (("ada", "One?"), ("ada", "Two?"), ("bob", "One?"), (None, "Three?")):
        engine.chat(agent, [SYSTEM, {"role": "user", "content": words}], temperature=0.0, max_tokens=4)
    engine.flush()
    info = engine.agent("ada").info()
    assert [each.number for each in info.branch_infos] == [1, 0] and info.branches == 2
    later, first = info.branch_infos
    assert (first.shared_tokens, first.shared_with) == (first.num_tokens, ("bob", UNNAMED)), "bob has all of it"
    assert later.shared_tokens == later.num_tokens // 16 * 16 or later.shared_tokens < later.num_tokens
    assert later.shared_tokens >= 48 and later.shared_with == ("bob", UNNAMED)
    for each in info.branch_infos:
        assert each.hot_tokens == each.saved_tokens == each.num_tokens and each.warm_tokens == 0
    engine.agent("ada").offload()
    engine.agent("bob").offload()
    assert [each.warm_tokens for each in engine.agent("ada").info().branch_infos] != [0, 0]
    engine = start()
    again = engine.agent("ada").info()
    assert [each.warm_tokens for each in again.branch_infos] == [each.num_tokens for each in info.branch_infos]
    assert {each.shared_with for each in again.branch_infos} <= {("bob",), ("bob", UNNAMED), ()}
    assert all(not each.branch_infos for each in engine.agents())
    with pytest.raises(NotFound):
        engine.agent("nobody").info()
