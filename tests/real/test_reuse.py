"""Replies of a real model are those of no reuse, in every state that an agent's memory can be in."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.real.conftest import FirstStart
from tests.real.talks import AGENTS, QUESTIONS, Reply, Talk, asked, begun, computed, harbour_serving
from tests.server.conftest import Served

STATES = ("after a kill", "growing", "shared", "edited", "again", "second agent", "offloaded", "at once")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request and its reply."""

    talk: Talk
    reply: Reply


class Harbour:
    """Asks, and keeps by state what was asked."""

    def __init__(self, served: Served, said: dict[str, Talk]) -> None:
        self.served, self.said = served, said
        self.asked: dict[str, list[Asked]] = {state: [] for state in STATES}

    def ask(self, state: str, agent: str, talk: Talk) -> str:
        reply = asked(self.served, agent, talk)
        self.asked[state].append(Asked([*talk], reply))
        return reply.text

    def grow(self, state: str, agent: str, question: str) -> None:
        """Continue what an agent has said."""
        talk = self.said.setdefault(agent, [])
        talk += begun(question) if not talk else [{"role": "user", "content": question}]
        talk.append({"role": "assistant", "content": self.ask(state, agent, talk)})


@pytest.fixture(scope="module")
def harbour(real_file: Path, first_start: FirstStart, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harbour]:
    """Everything is asked here, with no request of `reuse: off` before the last one, whose KV could be reused."""
    store = first_start.store(tmp_path_factory.mktemp("harbour"))
    said = talked_and_killed(real_file, store)
    with harbour_serving(str(real_file), str(store)) as served:
        place, engine = Harbour(served, said), served.engine
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
            assert engine.flush() and engine.agent(agent).offload()
            place.ask("offloaded", agent, place.said[agent][:-1])
        at_once = [
            [*place.said[agent], {"role": "user", "content": QUESTIONS[9]}] for agent in ("ada", *AGENTS, "new 1")
        ]
        with ThreadPoolExecutor(len(at_once)) as pool:
            replies = pool.map(partial(asked, served), [f"at once {at}" for at in range(len(at_once))], at_once)
            place.asked["at once"] = [Asked(talk, reply) for talk, reply in zip(at_once, replies, strict=True)]
        yield place


def talked_and_killed(model: Path, store: Path) -> dict[str, Talk]:
    """What agents said in a process that was killed after all of it was saved."""
    command = [sys.executable, "-m", "tests.real.talks", str(model), str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said: dict[str, Talk] = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    return said


def test_thirty_requests_are_asked(harbour: Harbour) -> None:
    assert sum(len(asked) for asked in harbour.asked.values()) == 30


Reused = Callable[[Sequence[Mapping[str, Any]]], bool]
# What the base model is given begins with the same long text for all: it comes from disk once.
EXPECTED: dict[str, Reused] = {
    "after a kill": lambda reports: (
        reports[0]["warm_tokens"] > 60 and all(each["reused_tokens"] > 60 for each in reports)
    ),
    "growing": lambda reports: all(each["outcome"] == "extend" for each in reports),
    "shared": lambda reports: all(each["reused_tokens"] > 40 for each in reports),
    "edited": lambda reports: all(a["reused_tokens"] < b["reused_tokens"] for a, b in pairwise(reports)),
    "again": lambda reports: reports[-1]["computed_tokens"] < 64,
    "second agent": lambda reports: all(each["reused_tokens"] > 300 for each in reports),
    "offloaded": lambda reports: sum(each["warm_tokens"] for each in reports) > 40,
    "at once": lambda reports: all(each["reused_tokens"] > 60 for each in reports),
}


@pytest.mark.parametrize("state", STATES)
def test_replies_are_those_of_no_reuse(harbour: Harbour, state: str) -> None:
    asked_so = harbour.asked[state]
    reports = [each.reply.report for each in asked_so]
    assert EXPECTED[state](reports), reports
    for each in asked_so:
        plain = computed(harbour.served, each.reply.prompt_ids)
        assert plain.report["reused_tokens"] == 0 and plain.prompt_ids == each.reply.prompt_ids
        assert each.reply.token_ids == plain.token_ids, each.reply.report
