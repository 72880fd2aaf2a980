"""The demo: its verdict sees what goes wrong. tests/test_package.py plays the whole of it from installed wheels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from rekindle.demo.report import Figures, Turn, checks, reuse_share, turn_line
from rekindle.demo.script import AGENTS, Line, part, system_prompt
from rekindle.harness.client import Reply


def reply(completion: list[int], *, hot: int = 0, warm: int = 0, text: str = "It is here.") -> Reply:
    report = {"outcome": "extend", "prompt_tokens": 100, "hot_tokens": hot, "warm_tokens": warm}
    return Reply(text, [1, 2, 3], completion, {**report, "reused_tokens": hot + warm}, 0.1)


def turn(number: int, phase: Literal["before", "after"], warm: int = 95) -> Turn:
    return Turn("ada", number, phase, Line("Where?"), reply([7], warm=warm), reply([7]))


def figures(*turns: Turn, promise: str = "bitwise") -> Figures:
    model: dict[str, Any] = {"rekindle": {"promise": promise}}
    return Figures(model, {}, [], 1.0, turns)


def holds(found: Figures) -> list[bool]:
    return [check.holds for check in checks(found)]


GOOD = (turn(1, "before"), turn(2, "after"), turn(3, "after"))


def test_a_good_run_holds() -> None:
    assert holds(figures(*GOOD)) == [True, True, True]


def test_a_differing_reply_fails_its_half() -> None:
    broken = replace(GOOD[1], reply=reply([8], warm=95))
    assert holds(figures(GOOD[0], broken, GOOD[2])) == [True, False, True]
    assert "DIFFERS" in turn_line(broken)
    broken = replace(GOOD[0], baseline=replace(GOOD[0].baseline, prompt_ids=[1]))
    assert holds(figures(broken, *GOOD[1:])) == [False, True, True]


def test_where_bits_are_not_promised_replies_may_part_late_and_not_at_once() -> None:
    late = replace(GOOD[1], reply=reply([7, 4, 5, 6], warm=95), baseline=reply([7, 4, 5, 5, 5]))
    early = replace(late, reply=reply([8, 4, 5, 5, 5], warm=95))
    found = figures(GOOD[0], late, GOOD[2], promise="close")
    assert holds(found) == [True, True, True]
    assert "1 of 2 replies after" in checks(found)[1].text and "67% of their tokens" in checks(found)[1].text
    assert holds(figures(GOOD[0], early, GOOD[2], promise="close")) == [True, False, True]
    assert holds(figures(*GOOD, promise="none")) == [False, False, True]
    assert holds(figures(promise="close")) == [False, False, False]


def test_too_little_reuse_in_the_first_turn_after_the_restart_fails() -> None:
    assert holds(figures(GOOD[0], turn(2, "after", warm=50), turn(3, "after", warm=100))) == [True, True, False]


def test_nothing_done_is_no_success() -> None:
    assert holds(figures()) == [False, False, False]
    assert reuse_share([]) == 0.0


def test_recall_is_word_for_word() -> None:
    asked = Line("Where?", wanted="It is here.")
    assert replace(GOOD[0], line=asked).is_right is True
    assert replace(GOOD[0], line=asked, reply=reply([7], text="It is there.")).is_right is False
    assert GOOD[0].is_right is None


def test_the_script_follows_from_its_seed() -> None:
    assert part("Alice", 7) == part("Alice", 7) != part("Alice", 8)
    assert system_prompt(7) == system_prompt(7) != system_prompt(8)
    assert len({part(agent, 7) for agent in AGENTS}) == 4
    for agent in AGENTS:
        script = part(agent, 7)
        assert sum(line.wanted is not None for line in (*script.before, *script.after)) == 3
