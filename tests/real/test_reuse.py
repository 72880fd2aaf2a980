"""Replies of a real model are those of no reuse, in every state that an agent's memory can be in."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from rekindle import Engine
from rekindle.engine.types import ChatResult
from tests.real.killed_talk import AGENTS, GREEDY, QUESTIONS, SETTINGS, begun

Talk = list[dict[str, str]]
STATES = ("after a kill", "growing", "shared", "edited", "again", "second agent", "offloaded", "at once")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request and its reply."""

    messages: Talk
    reply: ChatResult


class Harbour:
    """Asks, and keeps by state what was asked."""

    def __init__(self, engine: Engine, said: dict[str, Talk]) -> None:
        self.engine, self.said = engine, said
        self.asked: dict[str, list[Asked]] = {state: [] for state in STATES}

    def ask(self, state: str, agent: str, messages: Talk) -> str:
        reply = self.engine.chat(agent, messages, **GREEDY)
        self.asked[state].append(Asked([*messages], reply))
        return reply.text

    def grow(self, state: str, agent: str, question: str) -> None:
        """Continue what an agent has said."""
        talk = self.said.setdefault(agent, [])
        talk += begun(question) if not talk else [{"role": "user", "content": question}]
        talk.append({"role": "assistant", "content": self.ask(state, agent, talk)})


@pytest.fixture(scope="module")
def harbour(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harbour]:
    """Everything is asked here, with no request of `reuse: off` before the last one, whose KV could be reused."""
    store = tmp_path_factory.mktemp("harbour")
    said = talked_and_killed(smollm2, store)
    with Engine.from_pretrained(str(smollm2), store=str(store), **SETTINGS) as engine:
        place = Harbour(engine, said)
        for agent in ("ada", *AGENTS):
            place.grow("after a kill", agent, QUESTIONS[5])
        for question in QUESTIONS[6:]:
            place.grow("growing", "ada", question)
        for at in range(5):
            place.grow("shared", f"new {at}", f"This is boat {at}. {QUESTIONS[at]}")
        whole = place.said["ada"][:-1]
        for at in (3, 7, 11, 15):
            edited = {**whole[at], "content": f"Correction: {whole[at]['content']}"}
            place.ask("edited", "ada", [*whole[:at], edited, *whole[at + 1 :]])
        for end in (4, 10, len(whole)):
            place.ask("again", "ada", whole[:end])
        for agent in ("eve", "finn", "gail"):
            place.ask("second agent", agent, whole)
        for agent in ("ada", "bea"):
            assert engine.flush() and engine.offload(agent)
            place.ask("offloaded", agent, place.said[agent][:-1])
        at_once = [
            [*place.said[agent], {"role": "user", "content": QUESTIONS[9]}] for agent in ("ada", *AGENTS, "new 1")
        ]
        streams = [engine.stream(f"at once {at}", talk, **GREEDY) for at, talk in enumerate(at_once)]
        place.asked["at once"] = [Asked(talk, each.result()) for talk, each in zip(at_once, streams, strict=True)]
        yield place


def talked_and_killed(model: Path, store: Path) -> dict[str, Talk]:
    """What agents said in a process that was killed after all of it was saved."""
    command = [sys.executable, "-m", "tests.real.killed_talk", str(model), str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said: dict[str, Talk] = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    return said


def test_thirty_requests_are_asked(harbour: Harbour) -> None:
    assert sum(len(asked) for asked in harbour.asked.values()) == 30


Reused = Callable[[Sequence[Asked]], bool]
EXPECTED: dict[str, Reused] = {
    "after a kill": lambda asked: all(each.reply.report.warm_tokens > 60 for each in asked),
    "growing": lambda asked: all(each.reply.report.outcome == "extend" for each in asked),
    "shared": lambda asked: all(each.reply.report.reused_tokens > 40 for each in asked),
    "edited": lambda asked: all(
        a.reply.report.reused_tokens < b.reply.report.reused_tokens for a, b in pairwise(asked)
    ),
    "again": lambda asked: asked[-1].reply.report.computed_tokens < 64,
    "second agent": lambda asked: all(each.reply.report.reused_tokens > 300 for each in asked),
    "offloaded": lambda asked: all(each.reply.report.warm_tokens > 40 for each in asked),
    "at once": lambda asked: all(each.reply.report.reused_tokens > 60 for each in asked),
}


@pytest.mark.parametrize("state", STATES)
def test_replies_are_those_of_no_reuse(harbour: Harbour, state: str) -> None:
    asked = harbour.asked[state]
    reports = [each.reply.report for each in asked]
    assert EXPECTED[state](asked), [
        (each.outcome, each.warm_tokens, each.reused_tokens, each.prompt_tokens) for each in reports
    ]
    for each in asked:
        plain = harbour.engine.chat("plain", each.messages, reuse="off", **GREEDY)
        assert plain.report.reused_tokens == 0
        assert each.reply.token_ids == plain.token_ids, each.reply.report
