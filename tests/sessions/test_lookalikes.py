"""Names that people would take for each other are not given twice in a session; old sessions stay as they are."""

from __future__ import annotations

import unicodedata

import pytest

from rekindle.errors import BadRequest
from rekindle_sessions.machine.coordination import Coordination
from rekindle_sessions.machine.participants import PAIRS, SCRIPTS, check_look, check_new_plan, mixed_scripts, skeleton
from rekindle_sessions.machine.types import Participant, Plan


def plan(*names: str, host: str = "Host") -> Plan:
    return Plan(tuple(Participant(name) for name in names), host=host)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Ada", "\u0410d\u0430"),  # two letters of Cyrillic
        ("Eve", "\u0415v\u0435"),
        ("Ada", "Ad\u0251"),
        ("\u00e9", "e\u0301"),
        ("Zo\u00eb", "Zo\u0435\u0308"),
        ("Max", "\u039cax"),
        ("Kim", "K\u0131m"),
        ("COP", "\u0421\u041e\u0420"),  # all of it Cyrillic
        ("cop", "\u0441\u043e\u0440"),
        ("HOPE", "\u041d\u041e\u0420\u0415"),
        ("TOM", "\u13a2\u041e\u041c"),
        ("Bo", "B\ufe0fo"),
        ("Bo", "Bo\u3164"),
        ("\u041f\u0430\u0443\u043b", "\u041f\u03b1\u0443\u043b"),  # Greek in a Cyrillic word
        ("Bo", "\uff22\uff4f"),
        ("Bo", "BO"),
    ],
)
def test_no_two_look_alike(first: str, second: str) -> None:
    for names in ((first, second), (second, first)):
        with pytest.raises(BadRequest) as refused:
            check_new_plan(plan(*names))
        assert refused.value.param in ("agents[0].name", "agents[1].name")
    with pytest.raises(BadRequest):
        check_new_plan(plan("Xenia", second, host=first))


def test_a_word_of_two_scripts_is_no_name() -> None:
    with pytest.raises(BadRequest, match="Cyrillic and Latin letters"):
        check_new_plan(plan("\u0410da", "Bo"))
    assert (
        mixed_scripts("\u0418\u0432\u0430\u043d Bot")
        == mixed_scripts("\u65e5\u672cAI")
        == mixed_scripts("a1-\u03b1")
        == ()
    )
    assert mixed_scripts("x \u0430\u0301d") == ("CYRILLIC", "LATIN")


@pytest.mark.parametrize(
    "names",
    [
        ("Ada", "Adam"),
        ("e", "\u00e9"),
        ("\u0418\u0432\u0430\u043d", "\u0410\u043d\u043d\u0430", "\u041d\u0438\u043d\u0430"),
        ("\u0391\u03bd\u03bd\u03b1", "\u0396\u03c9\u03ae"),
        ("\u82b1\u5b50", "\u592a\u90ce"),
        ("Agent 1", "Agent 2", "Agent I"),
        ("n", "\u043d"),
    ],
)
def test_names_that_differ_are_taken(names: tuple[str, ...]) -> None:
    check_new_plan(plan(*names))


def test_a_session_that_is_older_than_the_rule_goes_on() -> None:
    held = Coordination(plan("Ada", "\u0410da"))
    assert held.names == ("Ada", "\u0410da", "Host")
    with pytest.raises(BadRequest, match="looks like 'Ada'"):
        check_look("\u0410d\u0430".replace("d", "\u0501"), held.names, param="name")


def test_every_letter_of_the_table_looks_like_one_of_another_script() -> None:
    for others, latins in PAIRS:
        for other, latin in zip(others, latins, strict=True):
            assert latin.isascii() and not other.isascii() and skeleton(other) == latin.casefold()
            assert unicodedata.name(other).split()[0] in SCRIPTS


@pytest.mark.parametrize("name", ["Bo\uff1a", "Bo\ufe55 yes", "Bo\uff0c Cy", "\uff08Bo\uff09"])
def test_no_new_name_has_a_sign_that_looks_like_one_around_names(name: str) -> None:
    with pytest.raises(BadRequest, match=r"looks like '[:,(]'"):
        check_look(name, (), param="name")
