"""Two tenants of one server: nothing of the one reaches the other, whatever the other asks."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rekindle_pocket import conversations
from tests.hostile.conftest import ADMIN, KEYS, Target

CANARY = "zanzibar-heliotrope-4711"
OPENING = 32  # tokens that all prompts of one tenant begin with: the system message
LEFT, RIGHT = KEYS["left"], KEYS["right"]
SECRET = [{"role": "user", "content": f"Remember that the word is {CANARY}. " * 6}]


def test_the_same_prompt_is_cold_for_the_other_tenant(target: Target) -> None:
    mine = target.chat(SECRET, key=LEFT, agent="spy")
    assert target.chat(SECRET, key=LEFT, agent="spy")["rekindle"]["outcome"] == "exact"
    for agent in ("spy", None, "other"):
        theirs = target.chat(SECRET, key=RIGHT, agent=agent, max_tokens=1)
        first_time = agent == "spy"
        if first_time:
            assert (
                theirs["usage"]["prompt_tokens_details"]["cached_tokens"]
                <= OPENING
                < theirs["usage"]["prompt_tokens"] / 2
            )
    assert mine["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0


def test_no_answer_to_the_other_tenant_holds_a_word(target: Target) -> None:
    target.chat(SECRET, key=LEFT, agent="canary-agent")
    near = [{"role": "user", "content": "Remember that the word is " + "x. " * 40}]
    seen = [json.dumps(target.chat(near, key=RIGHT, agent=agent)) for agent in ("canary-agent", None)]
    for method, path in (
        ("GET", "/v1/agents"),
        ("GET", "/v1/agents/canary-agent/why"),
        ("GET", "/v1/stats"),
        ("GET", "/metrics"),
        ("GET", "/v1/models"),
        ("GET", "/health/ready"),
        ("GET", "/openapi.json"),
    ):
        seen.append(target.send(method, path, key=RIGHT).body.decode())
    seen.append(target.send("GET", "/metrics", key=ADMIN).body.decode())
    assert not [text for text in seen if CANARY in text]
    assert "canary-agent" not in seen[-1]


def test_another_tenants_agent_does_not_exist(target: Target) -> None:
    target.chat(SECRET, key=LEFT, agent="only-left")
    for method, path in (
        ("GET", ""),
        ("GET", "/why"),
        ("GET", "/export"),
        ("POST", "/offload"),
        ("POST", "/pin"),
        ("DELETE", "/pin"),
        ("POST", "/purge"),
        ("POST", "/fork"),
        ("POST", "/rewind"),
        ("DELETE", ""),
    ):
        bodies: dict[str, Any] = {"/fork": {"target": "copy"}, "/rewind": {"turns": 1}, "/pin": {}}
        answer = target.send(method, f"/v1/agents/only-left{path}", bodies.get(path), key=RIGHT)
        assert answer.status == 404, f"{method} {path}: {answer.status} {answer.body!r}"
    assert "only-left" not in target.send("GET", "/v1/agents", key=RIGHT).body.decode()
    assert target.chat(SECRET, key=LEFT, agent="only-left")["rekindle"]["outcome"] == "exact"


def test_purging_ones_own_leaves_the_others(target: Target) -> None:
    said = [{"role": "user", "content": conversations.story(random.Random(5), 12)}]
    for key in (LEFT, RIGHT):
        target.chat(said, key=key, agent="twin")
    assert target.send("POST", "/v1/agents/twin/purge", key=LEFT).status == 200
    assert target.send("GET", "/v1/agents/twin", key=LEFT).status == 404
    assert target.chat(said, key=RIGHT, agent="twin")["rekindle"]["outcome"] == "exact"
    usage = target.chat(said, key=LEFT, agent="twin")["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] <= OPENING < usage["prompt_tokens"] / 4


def test_answers_reach_whoever_asked(target: Target) -> None:
    asked = [
        (key, [{"role": "user", "content": f"{conversations.story(random.Random(number), 6)} Tell me of {number}."}])
        for number, key in enumerate([LEFT, RIGHT] * 6)
    ]

    def ask(one: tuple[str, list[dict[str, str]]]) -> Any:
        return target.chat(one[1], key=one[0], max_tokens=12, rekindle={"return_ids": True})

    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, asked))
    for one, answer in zip(asked, together, strict=True):
        alone = ask(one)
        assert answer["choices"] == alone["choices"]
        assert answer["rekindle"]["prompt_ids"] == alone["rekindle"]["prompt_ids"]
