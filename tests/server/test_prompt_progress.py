"""llama.cpp's `return_progress` through the official client: how far a prompt is, before its reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rekindle.engine.types import Progress
from rekindle.server.openai.models import ChatChunk, TextCompletion
from rekindle.server.openai.replies import PromptProgress
from tests.server.conftest import Served

LONG = "A copper kettle hums on the stove of the harbour master's office while the tide turns. " * 8
ASKS: dict[str, Any] = {"return_progress": True}


def progress_of(chunks: Sequence[Any]) -> list[dict[str, int]]:
    """The progress of a stream with one choice, after checking what holds for all of them."""
    said = [chunk.model_extra.get("prompt_progress") for chunk in chunks]
    found = [each for each in said if each is not None]
    assert said[: len(found)] == found, "all of it comes before the reply"
    first, last = found[0], found[-1]
    assert first["processed"] == first["cache"] and last["processed"] == last["total"]
    assert {(each["total"], each["cache"]) for each in found} == {(last["total"], first["cache"])}
    processed = [each["processed"] for each in found]
    assert processed == sorted(set(processed)), "each is further than the one before"
    times = [each["time_ms"] for each in found]
    assert times == sorted(times) and times[0] >= 0
    return found


def chatted(served: Served, text: str, agent: str | None = None, **more: Any) -> list[Any]:
    chunks = served.client(agent).chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": text}],
        max_tokens=3,
        temperature=0,
        stream=True,
        extra_body={**ASKS, **more},
    )
    return list(chunks)


def test_a_chat_says_how_far_its_prompt_is_cold_and_warm(served: Served) -> None:
    cold = chatted(served, LONG, "progress")
    for chunk in cold:
        ChatChunk.model_validate(chunk.model_dump(exclude_unset=True))
    found = progress_of(cold)
    report = cold[-1].model_extra["rekindle"]
    assert (found[0]["cache"], found[0]["total"]) == (report["reused_tokens"], report["prompt_tokens"])
    num_steps = -(-(report["prompt_tokens"] - report["reused_tokens"]) // 16)
    assert len(found) >= num_steps >= 8, "one for each step, of 16 tokens"
    quiet = [chunk for chunk in cold if "prompt_progress" in chunk.model_extra]
    assert all(chunk.choices[0].delta.model_dump(exclude_unset=True) == {} for chunk in quiet)

    warm = chatted(served, LONG + "What hums?", "progress")
    found, report = progress_of(warm), warm[-1].model_extra["rekindle"]
    assert report["outcome"] in ("extend", "diverge") and found[0]["cache"] == report["reused_tokens"] > 100
    assert len(found) < 8


def test_a_text_completion_has_it_too_and_every_choice_its_own(served: Served) -> None:
    chunks = list(
        served.client().completions.create(
            model="default", prompt=[LONG[3:], LONG[5:]], max_tokens=2, stream=True, extra_body=ASKS
        )
    )
    for chunk in chunks:
        TextCompletion.model_validate(chunk.model_dump(exclude_unset=True))
    for index in (0, 1):
        mine = [chunk for chunk in chunks if chunk.choices[0].index == index]
        assert len(progress_of(mine)) >= 8
        assert all(chunk.choices[0].text == "" for chunk in mine if "prompt_progress" in chunk.model_extra)


def test_clients_that_join_deltas_get_the_same_message(served: Served) -> None:
    """OpenAI's helper joins the texts of all deltas, that of the role as well."""
    asked: Any = {"model": "default", "messages": [{"role": "user", "content": LONG[7:]}], "max_tokens": 3}
    with served.client().chat.completions.stream(**asked, temperature=0, extra_body=ASKS) as stream:
        stream.until_done()
        joined = stream.current_completion_snapshot.choices[0].message
    whole = served.client().chat.completions.create(**asked, temperature=0).choices[0].message
    assert (joined.role, joined.content) == (whole.role, whole.content) and joined.content


def test_a_whole_answer_has_no_place_for_it(served: Served) -> None:
    answer = served.chat("Hello!", return_progress=True)
    assert answer.status == 200 and "prompt_progress" not in answer.json and not answer.json["rekindle"]["ignored"]
    assert not any("prompt_progress" in chunk.model_extra for chunk in chatted(served, "Hello!", return_progress=False))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_it_is_true_or_false(served: Served, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    answer = served.send("POST", path, {**body, "stream": True, "return_progress": "yes"})
    assert (answer.status, answer.error["param"]) == (400, "return_progress")
    assert "boolean" in answer.error["message"]


def test_a_prompt_that_made_room_for_others_is_only_said_to_be_further_on() -> None:
    said = PromptProgress()

    def of(reused: int, computed: int) -> dict[str, int] | None:
        found = said.of(0, Progress("extend", "own", 100, reused, computed, 0, 1.5))
        return None if found is None else found["prompt_progress"]

    assert of(32, 0) == {"total": 100, "cache": 32, "processed": 32, "time_ms": 1500}
    assert of(32, 40) == {"total": 100, "cache": 32, "processed": 72, "time_ms": 1500}
    assert of(64, 0) is None and of(64, 8) is None, "it begins again, from blocks of its own"
    assert of(64, 30) == {"total": 100, "cache": 32, "processed": 94, "time_ms": 1500}
    assert of(64, 36) == {"total": 100, "cache": 32, "processed": 100, "time_ms": 1500}
