"""What a game gives, and what rules make of what was said and decided."""

from __future__ import annotations

from dataclasses import replace

from rekindle_sessions.machine.decisions import Ballot, Count, Decision, Question
from rekindle_sessions.scenes.games import Game
from rekindle_sessions.scenes.outcomes import Decided, Rule, Said, Scored
from rekindle_sessions.scenes.story import Story
from rekindle_sessions.scenes.templating import Template

QUESTION = Question("Which?", ("share", "keep"), "moves")
GAME = Game(
    Template("?", "game"),
    QUESTION.options,
    {("share", "share"): (3, 3), ("share", "keep"): (0, 5), ("keep", "share"): (5, 0), ("keep", "keep"): (1, 1.5)},
)


def decision(*moves: str | None) -> Decision:
    ballots = tuple(
        Ballot(name, move or "hm", () if move is None else (move,)) for name, move in zip("AB", moves, strict=True)
    )
    return Decision(QUESTION, None, (Count((("share", 0), ("keep", 0))),), (), (), ballots)


def test_points_are_those_of_the_table() -> None:
    story = Story({}, "ABC")
    for moves, points, scores in (
        (("share", "share"), (3, 3), (3, 3)),
        (("share", "keep"), (0, 5), (3, 8)),
        (("keep", "share"), (5, 0), (8, 8)),
        (("keep", "keep"), (1, 1.5), (9, 9.5)),
        ((None, "keep"), (0, 0), (9, 9.5)),
    ):
        assert story.moved(GAME, ("A", "B"), decision(*moves)) == dict(zip("AB", points, strict=True))
        assert (story.scores["A"], story.scores["B"]) == scores
        assert story.moves == dict(zip("AB", moves, strict=True))
    assert story.values()["scores"] == {"A": 9, "B": 9.5, "C": 0}


def test_who_makes_no_move_makes_the_default_one() -> None:
    story = Story({}, "AB")
    assert story.moved(replace(GAME, default="keep"), ("A", "B"), decision(None, "share")) == {"A": 5, "B": 0}
    assert story.moves == {"A": "keep", "B": "share"}


def test_rules_look_back() -> None:
    story = Story({"x": "y"}, "AB")
    story.said("one", "A", "The Key is there.")
    story.decided("vote", replace(decision("share", "keep"), outcome="keep"))
    story.scores["A"] = 2
    for check, holds in (
        (Said("key"), True),
        (Said("key", "B"), False),
        (Said("key", "A", "two"), False),
        (Said("key", "B", never=True), True),
        (Said("key", never=True), False),
        (Decided("vote"), True),
        (Decided("vote", "share"), False),
        (Decided("other"), False),
        (Scored("A", at_least=2, at_most=2), True),
        (Scored("A", at_least=3), False),
        (Scored("A", at_most=1), False),
        (Scored("A", more_than="B"), True),
        (Scored("B", more_than="A"), False),
    ):
        assert check.holds(story) is holds, check
    text = Template("{{ held }}/{{ of }} {{ x }} {{ decisions.vote.outcome }} {{ words.A }}{{ words.B }}", "outcome[0]")
    verdict = Rule(text, None, (Said("key"), Decided("vote"))).verdict(story)
    assert verdict is not None
    assert (verdict.text, verdict.holds) == ("2/2 y keep The Key is there.", True)
    assert Rule(text, None, (Said("key"), Said("no"))).verdict(story) is None
    other = Rule(text, Template("only {{ held }}", "o"), (Said("key"), Said("no"))).verdict(story)
    assert other is not None and (other.text, other.holds) == ("only 1", False)
