"""Deciding together: what is asked, what a reply counts as, and what comes of the ballots."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import BadRequest
from rekindle_sessions.machine.decisions import (
    Again,
    Ballot,
    Decision,
    Mode,
    Question,
    announcement,
    instructions,
    judge,
    read_ballot,
)

COLOURS = ("Red", "Green", "Blue")


def question(mode: Mode = "majority", options: tuple[str, ...] = COLOURS, **more: Any) -> Question:
    if mode == "coordinator":
        more = {"coordinator": "Carol", **more}
    return replace(Question("Which colour?", options), mode=mode, **more)


def cast(*rankings: Sequence[str] | str | None, texts: Sequence[str] = ()) -> tuple[Ballot, ...]:
    """One ballot for each, by voters v0, v1, ...; a word is a ranking of one, None abstains."""
    read = [(each,) if isinstance(each, str) else tuple(each or ()) for each in rankings]
    words = texts or [", ".join(each) or "abstain" for each in read]
    return tuple(Ballot(f"v{at}", text, each) for at, (each, text) in enumerate(zip(read, words, strict=True)))


def decided(asked: Question, *rounds: Sequence[Ballot]) -> Decision:
    decision = judge(asked, rounds)
    assert isinstance(decision, Decision)
    return decision


def votes(decision: Decision) -> list[dict[str, int]]:
    return [dict(count.votes) for count in decision.counts]


# Questions.


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"text": " \n"}, "text"),
        ({"options": ()}, "options"),
        ({"options": ("Red",)}, "options"),
        ({"options": tuple(f"option {at}" for at in range(27))}, "options"),
        ({"options": ("Red", "  ")}, "options"),
        ({"options": ("Red", " red ")}, "options"),
        ({"options": ("Straße", "STRASSE")}, "options"),
        ({"options": ("Red", "Abstain")}, "options"),
        ({"threshold": 0.5}, "threshold"),
        ({"threshold": 1.01}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
        ({"max_rounds": 0}, "max_rounds"),
        ({"mode": "lottery"}, "mode"),
        ({"mode": "coordinator"}, "coordinator"),
        ({"mode": "coordinator", "coordinator": ""}, "coordinator"),
        ({"mode": "ranked", "coordinator": "Carol"}, "coordinator"),
    ],
)
def test_a_question_that_cannot_be_put_is_refused_by_the_field_to_blame(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        replace(question(), **changes)
    assert refused.value.param == param


def test_options_lose_surplus_space_and_stay_as_they_are_when_kept_and_read_again() -> None:
    asked = question(options=("  New\n York ", "Rome"))
    assert asked.options == ("New York", "Rome")
    assert replace(asked) == asked


@pytest.mark.parametrize("mode", ["majority", "ranked", "consensus", "coordinator", "moves"])
def test_instructions_name_every_option_and_end_with_the_question(mode: Mode) -> None:
    told = instructions(question(mode))
    assert all(option in told for option in COLOURS)
    assert "abstain" in told
    assert told.endswith("\n\nWhich colour?")


# Reading.


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("Blue", "Blue"),
        ("blue.", "Blue"),
        ("**BLUE**", "Blue"),
        ("_Blue_", "Blue"),
        ('"Blue"', "Blue"),
        ("1. Blue", "Blue"),
        ("Option Blue!", "Blue"),
        ("Ann: Blue", "Blue"),
        ("**Ann**: Blue", "Blue"),
        ("Blue, because Green is too loud and Red is worse.", "Blue"),
        ("Blue. Green is too loud.", "Blue"),
        ("Blue\nGreen would be loud.", "Blue"),
        ("Vote: Blue", "Blue"),
        ("**Vote:** Blue", "Blue"),
        ("My vote: *Blue*", "Blue"),
        ("Final answer: Blue (not Red)", "Blue"),
        ("My vote is: Blue", "Blue"),
        ("Vote:\nBlue", "Blue"),
        ("Green is calm, and Red is warm.\nVote: Blue", "Blue"),
        ("I vote for Blue. Green is too loud, and so is Red.", "Blue"),
        ("Red has its friends. My choice is Blue.", "Blue"),
        ("I'd take Blue over Green.", "Blue"),
        ("Not Red, please: I think Blue suits us.", "Blue"),
        ("I will not abstain, and prefer Blue.", "Blue"),
        ("Blue and only Blue.", "Blue"),
        ("I am in favour of Blue.", "Blue"),
        ("Let us take Blue instead of Red.", "Blue"),
        ("abstain", None),
        ("I abstain.", None),
        ("Vote: abstain\nBlue would be fine, too.", None),
        ("Blue or Green", None),
        ("Blue, Green", None),
        ("Blue and Green are both fine.", None),
        ("Vote: Blue\nVote: Green", None),
        ("Blue\nVote: Green", None),
        ("Vote: Purple\nBlue is not for me.", None),
        ("Bluebird", None),
        ("Blue-green", None),
        ("A", None),
        ("3", None),
        ("", None),
        ("   \n\n", None),
    ],
)
def test_a_reply_counts_as_the_one_option_that_it_clearly_means(text: str, meant: str | None) -> None:
    ballot = read_ballot(question(), "Ann", text)
    assert ballot == Ballot("Ann", text, () if meant is None else (meant,))


@pytest.mark.parametrize(
    ("options", "text", "meant"),
    [
        (("guilty", "not guilty"), "Not guilty.", "not guilty"),
        (("guilty", "not guilty"), "I find him not guilty, on all counts.", "not guilty"),
        (("guilty", "not guilty"), "I find him guilty.", "guilty"),
        (("New York", "York"), "We should go to New York this time.", "New York"),
        (("yes", "no"), "No-one knows whether that is right, yes.", "yes"),
        (("1", "10"), "10", "10"),
        (("1", "10"), "It is 1.5 on a scale that ends at 10.", "10"),
        (("3", "5"), "3. Because it is the least.", "3"),
        (("C", "C++"), "C++", "C++"),
        (("A", "B"), "I think B is a good one, it has a ring.", "B"),
        (("A", "B"), "a", "A"),
        (("Straße", "Weg"), "STRASSE", "Straße"),
        (("don't go", "go"), "don’t go", "don't go"),
        (("👍", "👎"), "👍", "👍"),
        (("Vote: x", "y"), "Vote: x", "Vote: x"),
        (("Ann", "Bob"), "Ann: she is the best of us.", "Ann"),
        (("Ann", "Bob"), "Ann's the best of us.", "Ann"),
    ],
)
def test_names_are_whole_words_and_the_longest_counts(options: tuple[str, ...], text: str, meant: str) -> None:
    assert read_ballot(question(options=options), "Ann", text).ranking == (meant,)


@pytest.mark.parametrize(
    ("text", "ranking"),
    [
        ("Blue, Red, Green", ("Blue", "Red", "Green")),
        ("Blue > Red > Green", ("Blue", "Red", "Green")),
        ("Blue", ("Blue",)),
        ("1. Blue\n2. Red\n3. Green", ("Blue", "Red", "Green")),
        ("1. Blue - better than Green\n2. Red", ("Blue", "Red")),
        ("Blue\nRed\nGreen", ("Blue", "Red", "Green")),
        ("- Blue\n- Red", ("Blue", "Red")),
        ("Ranking: Blue, Red", ("Blue", "Red")),
        ("Ranking:\n1) Blue\n2) Red", ("Blue", "Red")),
        ("Here is mine, after some thought:\nBlue, then Red\nGreen is impossible.", ("Blue", "Red")),
        ("Blue, Red, Blue, Green", ("Blue", "Red", "Green")),
        ("I like Red best, then Green; Blue is last.", ("Red", "Green", "Blue")),
        ("Blue over Green over Red", ("Blue", "Green", "Red")),
        ("Ann: Blue, Red", ("Blue", "Red")),
        ("abstain", ()),
        ("I abstain from choosing between Blue and Red.", ()),
        ("Purple", ()),
        ("", ()),
    ],
)
def test_a_ranking_is_read_in_the_order_of_naming(text: str, ranking: tuple[str, ...]) -> None:
    assert read_ballot(question("ranked"), "Ann", text).ranking == ranking


def test_a_ranking_of_numbers_is_told_from_its_numbering() -> None:
    asked = question("ranked", options=("1", "2", "3"))
    assert read_ballot(asked, "Ann", "1. 3\n2. 1\n3. 2").ranking == ("3", "1", "2")
    assert read_ballot(asked, "Ann", "3,1,2").ranking == ("3", "1", "2")


some_options = st.lists(st.text(min_size=1, max_size=12), min_size=2, max_size=8)
some_modes = st.sampled_from(["majority", "ranked"])


def made(mode: Mode, options: list[str]) -> Question | None:
    try:
        return question(mode, options=tuple(options))
    except BadRequest:
        return None


@given(some_modes, some_options, st.text(max_size=200), st.text(max_size=8))
def test_any_text_is_read_and_counts_as_options_of_the_question_each_once(
    mode: Mode, options: list[str], text: str, voter: str
) -> None:
    asked = made(mode, options)
    if asked is not None:
        ballot = read_ballot(asked, voter, text)
        assert (ballot.voter, ballot.text) == (voter, text)
        assert set(ballot.ranking) <= set(asked.options)
        assert len(set(ballot.ranking)) == len(ballot.ranking)
        assert mode == "ranked" or len(ballot.ranking) <= 1


@given(st.lists(st.sampled_from([*COLOURS, "vote:", "i", "abstain", "1.", "not", ",", ".", "\n", "x"]), max_size=30))
def test_any_mixture_of_the_words_that_matter_is_read(words: list[str]) -> None:
    for mode in ("majority", "ranked"):
        read_ballot(question(mode), "Ann", " ".join(words))


@given(some_modes, st.lists(st.from_regex(r"[a-z]{2,8}( [a-z]{2,8})?", fullmatch=True), min_size=2, max_size=6))
def test_an_option_repeated_as_it_is_written_is_a_vote_for_it(mode: Mode, options: list[str]) -> None:
    asked = made(mode, options)
    if asked is not None:
        for option in asked.options:
            for text in (option, option.upper(), f"{option}.", f"Vote: {option}", f"**{option}**\n"):
                assert read_ballot(asked, "Ann", text).ranking == (option,), text


@given(st.permutations(["ant", "ant hill", "hill side", "bee"]), st.sampled_from([", ", "\n", " > ", "; "]))
def test_a_ranking_as_asked_for_is_read_whole(order: list[str], between: str) -> None:
    asked = question("ranked", options=("bee", "hill side", "ant hill", "ant"))
    assert read_ballot(asked, "Ann", between.join(order)).ranking == tuple(order)


# Majority, moves.


def test_the_most_first_choices_win_and_all_is_told() -> None:
    decision = decided(question(), cast("Blue", "Red", "Blue", None))
    assert (decision.outcome, decision.tied, decision.abstained) == ("Blue", (), ("v3",))
    assert votes(decision) == [{"Red": 1, "Green": 0, "Blue": 2}]
    assert announcement(decision) == "Decided: Blue. Votes: Red 1, Blue 2; abstained: 1."


def test_less_than_half_can_be_the_most() -> None:
    assert decided(question(), cast("Blue", "Blue", "Red", "Green")).outcome == "Blue"


def test_an_even_vote_decides_nothing() -> None:
    decision = decided(question(), cast("Blue", "Red"))
    assert (decision.outcome, decision.tied) == (None, ("Red", "Blue"))
    assert announcement(decision) == "No decision, tied between Red and Blue. Votes: Red 1, Blue 1."


@pytest.mark.parametrize("mode", ["majority", "ranked", "moves"])
def test_where_all_abstain_nothing_is_decided(mode: Mode) -> None:
    decision = decided(question(mode), cast(None, None))
    assert (decision.outcome, decision.tied, decision.abstained) == (None, (), ("v0", "v1"))
    assert "none" in announcement(decision)


def test_an_open_vote_names_who_abstained() -> None:
    decision = decided(question(is_open=True), cast("Blue", None))
    assert announcement(decision) == "Decided: Blue. Votes: Blue 1; abstained: v1."


def test_moves_all_stand_and_are_told_by_name() -> None:
    asked = question("moves", options=("cooperate", "defect"))
    decision = decided(asked, cast("defect", "cooperate", None))
    assert (decision.outcome, decision.tied) == (None, ())
    assert [ballot.ranking for ballot in decision.ballots] == [("defect",), ("cooperate",), ()]
    assert announcement(decision) == "Moves: v0: defect; v1: cooperate; abstained: v2."


# Runoff.


def test_votes_of_the_last_pass_to_their_next_choice() -> None:
    ballots = cast(*[("Red",)] * 4, *[("Green", "Blue")] * 2, *[("Blue", "Green")] * 3)
    decision = decided(question("ranked"), ballots)
    assert votes(decision) == [{"Red": 4, "Green": 2, "Blue": 3}, {"Red": 4, "Blue": 5}]
    assert decision.outcome == "Blue"
    assert announcement(decision) == "Decided: Blue. Votes: Red 4, Blue 5 (after 2 counts)."


def test_more_than_half_ends_the_count_at_once() -> None:
    decision = decided(question("ranked"), cast(["Red"], ["Red"], ["Blue"], None))
    assert (decision.outcome, len(decision.counts)) == ("Red", 1)


def test_a_ballot_without_a_choice_left_leaves_the_count() -> None:
    ballots = cast(*[("Red",)] * 3, *[("Blue",)] * 2, ("Green",))
    decision = decided(question("ranked"), ballots)
    assert votes(decision) == [{"Red": 3, "Green": 1, "Blue": 2}, {"Red": 3, "Blue": 2}]
    assert decision.outcome == "Red"


def test_all_without_a_vote_leave_together() -> None:
    asked = question("ranked", options=("a1", "b1", "c1", "d1", "e1"))
    decision = decided(asked, cast(*["a1"] * 2, *["b1"] * 2))
    assert votes(decision)[1:] == [{"a1": 2, "b1": 2}]
    assert (decision.outcome, decision.tied) == (None, ("a1", "b1"))


def test_a_final_tie_decides_nothing() -> None:
    decision = decided(question("ranked"), cast(["Red", "Blue"], ["Blue", "Red"]))
    assert (decision.outcome, decision.tied) == (None, ("Red", "Blue"))


def test_of_the_fewest_the_one_with_fewer_before_leaves() -> None:
    asked = question("ranked", options=("a1", "b1", "c1", "d1"))
    # First 5, 2, 3, 1; then, with the ballot of d1, b1 has 3 as c1 has, but had fewer.
    ballots = cast(*["a1"] * 5, *[("b1", "c1")] * 2, *[("c1", "b1")] * 3, ("d1", "b1", "c1"))
    decision = decided(asked, ballots)
    assert votes(decision)[1] == {"a1": 5, "b1": 3, "c1": 3}
    assert votes(decision)[2] == {"a1": 5, "c1": 6}
    assert decision.outcome == "c1"


def test_of_the_fewest_that_are_equal_throughout_the_last_named_leaves() -> None:
    ballots = cast(*["Red"] * 3, *[("Green", "Blue")] * 2, *[("Blue", "Green")] * 2)
    assert decided(question("ranked"), ballots).outcome == "Green"


rankings = st.lists(st.permutations(COLOURS).flatmap(lambda all_: st.integers(0, 3).map(lambda n: tuple(all_[:n]))))


@given(rankings)
def test_a_runoff_never_elects_who_loses_to_everybody_and_elects_whom_most_put_first(
    orders: list[tuple[str, ...]],
) -> None:
    decision = decided(question("ranked"), cast(*orders))

    def beats(one: str, other: str) -> bool:
        ahead = [each.index(one) < each.index(other) if {one, other} <= {*each} else one in each for each in orders]
        behind = [each.index(other) < each.index(one) if {one, other} <= {*each} else other in each for each in orders]
        return sum(ahead) > sum(behind)

    for option in COLOURS:
        if all(beats(other, option) for other in COLOURS if other != option):
            assert decision.outcome != option
        if 2 * sum(each[:1] == (option,) for each in orders) > sum(map(bool, orders)):
            assert decision.outcome == option
    for before, after in zip(decision.counts, decision.counts[1:], strict=False):
        assert {*dict(after.votes)} < {*dict(before.votes)}
        assert all(dict(after.votes)[option] >= dict(before.votes)[option] for option, _ in after.votes)


# Consensus.


def test_consensus_is_asked_for_again_with_tally_and_reasons_nobody_named() -> None:
    asked = question("consensus", max_rounds=2)
    first = cast("Blue", "Red", None, texts=["Blue\nIt is calm.", "Vote: Red\nWarm.", "abstain"])
    again = judge(asked, [first])
    assert isinstance(again, Again)
    assert again.voters == ("v0", "v1", "v2")
    assert again.announcement == (
        "No agreement in round 1 of 2. Votes: Red 1, Blue 1; abstained: 1. For Red: Warm. For Blue: It is calm."
        f"\n\n{instructions(asked)}"
    )
    decision = decided(asked, first, cast("Blue", "Blue", None))
    assert (decision.outcome, decision.num_rounds) == ("Blue", 2)
    assert votes(decision) == [{"Red": 1, "Green": 0, "Blue": 1}, {"Red": 0, "Green": 0, "Blue": 2}]
    assert announcement(decision) == "Decided: Blue. Votes: Blue 2; abstained: 1."


def test_reasons_of_a_secret_vote_are_told_in_the_same_order_whoever_gave_them() -> None:
    texts = ["Blue\nIt is calm.", "Blue\nAll like it.", "Red\nWarm."]
    one, other = (
        judge(question("consensus"), [cast("Blue", "Blue", "Red", texts=[*order, texts[2]])])
        for order in (texts[:2], texts[1::-1])
    )
    assert isinstance(one, Again) and isinstance(other, Again)
    assert one.announcement == other.announcement and "It is calm." in one.announcement


def test_reasons_that_were_heard_are_not_told_again() -> None:
    again = judge(question("consensus", is_open=True), [cast("Blue", "Red", None, texts=["Blue\nCalm.", "Red", "-"])])
    assert isinstance(again, Again)
    assert "Calm" not in again.announcement
    assert "abstained: v2" in again.announcement


def test_without_agreement_in_the_last_round_nothing_is_decided() -> None:
    asked = question("consensus", max_rounds=2)
    decision = decided(asked, cast("Blue", "Red"), cast("Blue", "Red"))
    assert (decision.outcome, decision.tied, decision.num_rounds) == (None, ("Red", "Blue"), 2)
    assert announcement(decision) == "No decision after round 2, tied between Red and Blue. Votes: Red 1, Blue 1."
    assert decided(question("consensus", max_rounds=1), cast(None, None)).outcome is None


@pytest.mark.parametrize(
    ("threshold", "agreeing", "others", "is_enough"),
    [(1.0, 9, 1, False), (0.9, 9, 1, True), (0.7, 7, 3, True), (2 / 3, 2, 1, True), (0.67, 2, 1, False)],
)
def test_a_threshold_is_a_share_of_those_who_vote(
    threshold: float, agreeing: int, others: int, is_enough: bool
) -> None:
    ballots = cast(*["Blue"] * agreeing, *["Red"] * others, None, None)
    result = judge(question("consensus", threshold=threshold), [ballots])
    assert isinstance(result, Decision) == is_enough


def test_long_reasons_are_cut_after_a_word() -> None:
    texts = [f"Blue\n{'because ' * 100}", "Red"]
    again = judge(question("consensus"), [cast("Blue", "Red", texts=texts)])
    assert isinstance(again, Again)
    assert "because …" in again.announcement
    assert len(again.announcement) < 600


# A coordinator.


def test_the_coordinator_is_told_the_tally_and_decides() -> None:
    asked = question("coordinator")
    voters = cast("Blue", "Blue", "Red", None, texts=["Blue", "Blue", "Red\nWarm.", "abstain"])
    again = judge(asked, [voters])
    assert isinstance(again, Again)
    assert again.voters == ("Carol",)
    assert again.announcement == (
        f"Votes: Red 1, Blue 2; abstained: 1. For Red: Warm. Carol, you decide.\n\n{instructions(asked)}"
    )
    own = Ballot("Carol", "Red", ("Red",))
    decision = decided(asked, voters, [own])
    assert (decision.outcome, decision.tied, decision.num_rounds) == ("Red", (), 2)
    assert decision.ballots == (*voters, own)
    assert decision.abstained == ("v3",)
    assert announcement(decision) == "Carol decided: Red. Votes: Red 1, Blue 2; abstained: 1."


def test_a_coordinator_who_abstains_decides_nothing() -> None:
    decision = decided(question("coordinator"), cast("Blue"), [Ballot("Carol", "abstain", ())])
    assert (decision.outcome, decision.abstained) == (None, ("Carol",))
    assert announcement(decision) == "Carol decided: nothing. Votes: Blue 1."


# What holds for all of them.


@given(st.sampled_from(["majority", "ranked", "consensus", "moves"]), rankings, st.randoms())
def test_each_ballot_counts_once_and_the_order_of_voters_does_not_matter(
    mode: Mode, orders: list[tuple[str, ...]], chance: random.Random
) -> None:
    asked = question(mode, max_rounds=1, threshold=0.6)
    ballots = cast(*(each if mode == "ranked" else each[:1] for each in orders))
    decision = decided(asked, ballots)
    assert sum(votes(decision)[0].values()) == len(ballots) - len(decision.abstained)
    for count in votes(decision):
        assert sum(count.values()) <= len(ballots)
    assert decision.outcome is None or not decision.tied
    assert decision.ballots == ballots
    mixed = list(ballots)
    chance.shuffle(mixed)
    again = decided(asked, mixed)
    assert (again.outcome, again.tied, again.counts) == (decision.outcome, decision.tied, decision.counts)
    assert {*again.abstained} == {*decision.abstained}
    assert announcement(again) == announcement(decision) or mode == "moves"


@given(rankings, st.randoms())
def test_what_is_told_between_rounds_does_not_tell_who_said_what(
    orders: list[tuple[str, ...]], chance: random.Random
) -> None:
    ballots = list(cast(*(each[:1] for each in orders)))
    chance.shuffle(ballots)
    result = judge(question("consensus"), [ballots])
    if isinstance(result, Again):
        assert not any(ballot.voter in result.announcement for ballot in ballots)
        assert len(result.voters) == len(ballots)


def test_who_votes_twice_in_one_round_is_no_round() -> None:
    ballots = cast("Blue", "Red")
    with pytest.raises(AssertionError):
        judge(question(), [(*ballots, ballots[0])])


def test_every_pair_of_options_can_be_tied() -> None:
    for pair in combinations(COLOURS, 2):
        assert decided(question(), cast(*pair)).tied == pair
