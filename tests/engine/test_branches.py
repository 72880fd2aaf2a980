"""Agents as trees of branches: what continues, what starts anew, and that nobody is overwritten."""

from __future__ import annotations

import numpy as np

from rekindle.agent_ids import new_conversation
from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.memory.branches import BranchBook, TurnEnd
from rekindle.engine.request import FinishedTurn

ROOT = BlockHash(b"r" * 32)
UNNAMED = new_conversation()


def end(book: BranchBook, ids: list[int], now: float, agent: str = "a", num_replies: int | None = None) -> TurnEnd:
    turn = FinishedTurn(
        namespace="default",
        agent=agent,
        root=ROOT,
        ids=np.array(ids, dtype=np.uint32),
        hashes=(),
        head=ROOT,
        head_tokens=len(ids),
        num_replies=num_replies,
        canonical_prompt=1,
    )
    return book.end_turn(turn, canonical_tokens=len(ids), now=now)


def test_an_extension_replaces_the_branch_it_extends() -> None:
    book = BranchBook(max_branches=8)
    first = end(book, [1, 2, 3], 1).branch
    second = end(book, [1, 2, 3, 4, 5], 2).branch
    assert second.number == first.number
    assert second.turn_ends == (3, 5)
    assert [branch.num_tokens for branch in book.of("default", "a")] == [5]


def test_a_divergence_adds_a_branch_and_keeps_the_turns_before_it() -> None:
    book = BranchBook(max_branches=8)
    end(book, [1, 2, 3], 1)
    end(book, [1, 2, 3, 4, 5], 2)
    other = end(book, [1, 2, 3, 9, 9, 9], 3).branch
    assert other.turn_ends == (3, 6)
    assert sorted(branch.num_tokens for branch in book.of("default", "a")) == [5, 6]


def test_a_reply_rendered_otherwise_ends_its_turn_where_the_texts_part() -> None:
    book = BranchBook(max_branches=8)
    end(book, [1, 2, 3, 4], 1, num_replies=0)
    assert end(book, [1, 2, 3, 9, 9, 9], 2, num_replies=1).branch.turn_ends == (3, 6)
    assert end(book, [1, 2, 8, 8], 3, num_replies=0).branch.turn_ends == (4,)


def test_concurrent_extensions_of_one_branch_both_stay() -> None:
    book = BranchBook(max_branches=8)
    end(book, [1, 2, 3], 1)
    end(book, [1, 2, 3, 4], 2)
    end(book, [1, 2, 3, 5], 3)
    assert sorted(branch.ids[-1] for branch in book.of("default", "a") if branch.ids is not None) == [4, 5]


def test_a_turn_inside_a_branch_only_marks_it_used() -> None:
    book = BranchBook(max_branches=8)
    long = end(book, [1, 2, 3, 4], 1).branch
    assert end(book, [1, 2], 5).branch.number == long.number
    (branch,) = book.of("default", "a")
    assert (branch.num_tokens, branch.last_use) == (4, 5)


def test_the_least_recently_used_branch_goes_first() -> None:
    book = BranchBook(max_branches=2)
    end(book, [1, 1], 1)
    end(book, [2, 2], 2)
    end(book, [1, 1, 1], 3)
    dropped = end(book, [3, 3], 4).dropped
    assert [list(branch.ids) for branch in dropped if branch.ids is not None] == [[2, 2]]
    assert len(book.of("default", "a")) == 2


def test_hidden_agents_are_not_listed_and_agents_are_kept_apart() -> None:
    book = BranchBook(max_branches=2)
    end(book, [1, 2], 1, agent=UNNAMED)
    end(book, [1, 2, 3], 2, agent="b")
    assert list(book.agents()) == [("default", "b")]
    assert list(book.agents("other")) == []
    assert book.of("default", UNNAMED)[0].num_tokens == 2


def test_saved_tokens_never_exceed_the_branch_they_speak_of() -> None:
    book = BranchBook(max_branches=2)
    branch = end(book, [1, 2, 3], 1).branch
    book.mark_saved("default", "a", branch.number, 99)
    assert book.of("default", "a")[0].saved_tokens == 3
    book.mark_saved("default", "gone", 0, 5)  # a branch deleted meanwhile is no error
