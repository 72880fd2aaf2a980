"""What followed the end of a text before, and how often that was right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.engine.drafts import MAX_MATCH, MIN_MATCH, NO_DRAFT, Acceptance, Draft, find_draft
from rekindle.text.pictures import PICTURE_IDS

TEXT = st.lists(st.integers(0, 3), max_size=40)


def draft(ids: list[int], *texts: list[int], most: int = 4) -> Draft:
    arrays = [np.array(text, dtype=np.uint32) for text in (ids, *texts)]
    return find_draft(arrays[0], arrays[1:], most=most)


def naive(ids: list[int], texts: list[list[int]], most: int) -> Draft:
    """By its definition: every place that tokens can follow, from the last one of the first text on."""
    best = NO_DRAFT
    for text in (ids, *texts):
        for start in range(len(text) - 1, 0, -1):
            matched = 0
            while matched < min(start, len(ids), MAX_MATCH) and text[start - 1 - matched] == ids[-1 - matched]:
                matched += 1
            if matched >= MIN_MATCH and matched > best.num_matched:
                following = text[start:]
                while text is ids and len(following) < most:
                    following = following + text[start:]
                best = Draft(tuple(following[:most]), matched)
    return best


@given(ids=TEXT, texts=st.lists(TEXT, max_size=2), most=st.integers(1, 9))
def test_a_draft_is_what_its_definition_says(ids: list[int], texts: list[list[int]], most: int) -> None:
    assert draft(ids, *texts, most=most) == naive(ids, texts, most)


def test_the_longest_match_counts_and_of_several_the_last() -> None:
    assert draft([7, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2, 5, 7, 1, 2]) == Draft((3, 8, 1, 2), 3)
    assert draft([7, 1, 2, 3, 8, 1, 2, 4, 9, 6, 1, 2]) == Draft((4, 9, 6, 1), 2)
    assert draft([1, 2], [5, 1, 2, 6], [1, 2, 8, 1, 2, 9]) == Draft((6,), 2)


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    assert draft([9, 1, 2, 3, 1, 2, 3], most=7).ids == (1, 2, 3, 1, 2, 3, 1)
    assert draft([5, 5, 5], most=3).ids == (5, 5, 5)
    assert draft([1, 2, 3], [7, 1, 2, 3, 4], most=3).ids == (4,), "another text ends where it ends"


def test_a_draft_ends_before_a_picture() -> None:
    """Its tokens have ids that no model can say."""
    assert draft([1, 2, 3, PICTURE_IDS, 4, 1, 2]) == Draft((3,), 2)
    assert draft([1, 2, PICTURE_IDS, 4, 1, 2]).ids == ()


@pytest.mark.parametrize("ids", [[], [1], [1, 1], [1, 2, 3], [1, 2, 3, 2]])
def test_what_was_never_said_before_has_no_draft(ids: list[int]) -> None:
    assert draft(ids) == NO_DRAFT
    assert draft([1, 2, 1, 2], most=0) == NO_DRAFT


def test_one_is_as_likely_right_as_those_before_were_and_the_last_ones_count_most() -> None:
    acceptance, guess = Acceptance(), Draft((1, 2, 3), 16)
    assert acceptance.chances(guess).tolist() == [0.5, 0.25, 0.125]
    for _ in range(60):
        assert acceptance.judge(guess, [1, 2, 3, 4]) == 3
    assert acceptance.chances(guess)[-1] > 0.99
    assert acceptance.chances(Draft((1,), 2))[0] == 0.5, "short matches were not judged"
    for _ in range(8):
        assert acceptance.judge(guess, [1, 9]) == 1
    assert 0.4 < acceptance.chances(guess)[0] < 0.6
    for _ in range(60):
        assert acceptance.judge(guess, [9]) == 0
    assert acceptance.chances(guess)[0] < 0.01
    acceptance.check()


def test_a_match_grows_with_each_right_token() -> None:
    acceptance = Acceptance()
    for _ in range(60):
        acceptance.judge(Draft((1, 2), 3), [1, 9])
    chances = acceptance.chances(Draft((1, 2), 3))
    assert chances[0] > 0.99 and chances[1] < 0.01


@given(st.lists(st.tuples(st.integers(2, 40), TEXT, TEXT)))
def test_chances_never_increase(judged: list[tuple[int, list[int], list[int]]]) -> None:
    acceptance = Acceptance()
    for num_matched, ids, following in judged:
        guess = Draft(tuple(ids), num_matched)
        chances = acceptance.chances(guess)
        assert len(chances) == len(ids) and (np.diff(chances) <= 0).all()
        acceptance.judge(guess, following)
        acceptance.check()
