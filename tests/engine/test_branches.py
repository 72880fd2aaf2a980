"""Agents as trees of branches: what continues, what starts anew, and that nobody is overwritten."""

from __future__ import annotations

import numpy as np

from rekindle.agent_ids import new_conversation
from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.memory.branches import BranchBook, KnownBranch, TurnEnd, is_aside
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


def tokens(book: BranchBook) -> list[list[int]]:
    return [branch.ids.tolist() for branch in book.of("default", "a") if isinstance(branch, KnownBranch)]


def test_side_requests_push_out_no_conversation_and_none_of_its_forks() -> None:
    book, system, title = BranchBook(max_branches=4), [1] * 20, [2] * 6
    talk: list[int] = []
    fork, other = [*system, 3, 3, 3, 8, 8, 8], [9] * 10
    for turn in range(10):
        talk = [*(talk or system), 3, 3, 3]
        end(book, talk, 10 * turn, num_replies=turn)
        if not turn:
            end(book, fork, 1)
            end(book, other, 2)
            end(book, [*other, 9, 9], 3)
        end(book, [*title, 20 + turn], 10 * turn + 5)
        book.check()
    assert tokens(book) == [[*title, 29], talk, [*other, 9, 9], fork]


def test_what_may_be_the_beginning_of_a_conversation_stays() -> None:
    book = BranchBook(max_branches=3)
    for number in (1, 2):
        end(book, [number] * 4, number)
        end(book, [number] * 6, number + 0.5)
    end(book, [5] * 9, 10)
    end(book, [6] * 3, 11)
    assert tokens(book) == [[6] * 3, [5] * 9, [2] * 6], "the one used last before a side request"
    end(book, [7] * 3, 12)
    assert tokens(book) == [[7] * 3, [6] * 3, [2] * 6], "then one that had no second turn"


def test_without_conversations_and_in_one_place_the_latest_stays() -> None:
    book = BranchBook(max_branches=2)
    for number in range(5):
        end(book, [number] * 3, number)
    assert tokens(book) == [[4] * 3, [3] * 3]
    single = BranchBook(max_branches=1)
    end(single, [1] * 4, 1)
    end(single, [1] * 6, 2)
    end(single, [2] * 3, 3)
    assert tokens(single) == [[2] * 3]


def test_half_of_the_shorter_one_is_much_in_common() -> None:
    book = BranchBook(max_branches=8)
    end(book, [1] * 10, 1)
    talk = end(book, [1] * 12, 2).branch
    for ids, expected in (([1] * 4 + [2] * 4, False), ([1] * 3 + [2] * 5, True), ([1] * 6 + [2] * 30, False)):
        assert is_aside(end(book, ids, 3, agent="b").branch, [talk]) is expected, ids
    assert not is_aside(talk, []) and not is_aside(end(book, [7], 4).branch.without_ids(), [talk])
