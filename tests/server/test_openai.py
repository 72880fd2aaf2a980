"""The OpenAI dialect: what is taken, what is refused by name, how a reply is spelled."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.engine.types import ChatResult, Delta, Report, Timings
from rekindle.errors import BadRequest
from rekindle.server.openai import ChatCall, Chunks, Stamp, completion, headers_of, parse_chat, usage_of

STAMP = Stamp("chatcmpl-1", 1, "pocket")
HELLO = {"messages": [{"role": "user", "content": "Hello!"}]}


def parse(**parameters: Any) -> ChatCall:
    return parse_chat({**HELLO, **parameters}, agent="ada", namespace="default")


def report(**changes: Any) -> Report:
    facts: dict[str, Any] = {
        "outcome": "extend",
        "source": "own",
        "matched_bytes": 400,
        "prompt_tokens": 100,
        "reused_tokens": 90,
        "hot_tokens": 64,
        "warm_tokens": 26,
        "computed_tokens": 10,
        "completion_tokens": 3,
        "reuse": "continuation",
        "timings": Timings(0.0, 0.125, 0.0, 12.0, 13.0),
        "explanation": None,
    }
    return Report(**{**facts, **changes})


def test_parameters_reach_the_request() -> None:
    call = parse(
        model="default", temperature=0, top_p=0.5, top_k=4, seed=3, stop="END", max_tokens=7, stream=True,
        stream_options={"include_usage": True}, rekindle={"reuse": "canonical", "return_ids": True},
    )  # fmt: skip
    request, params = call.request, call.request.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0, 0.5, 4, 3)
    assert params.stop == ("END",)
    assert params.max_tokens == 7
    assert (call.stream, call.include_usage, call.return_ids, call.model) == (True, True, True, "default")
    assert (request.agent, request.namespace, request.reuse) == ("ada", "default", "canonical")
    assert request.messages is not None
    assert request.messages[0].content == "Hello!"


def test_defaults() -> None:
    call = parse()
    assert call.request.params.max_tokens is None
    assert call.request.params.temperature == 1.0
    assert call.request.reuse is None
    assert not call.stream


def test_the_newer_name_of_the_limit_wins() -> None:
    assert parse(max_tokens=7, max_completion_tokens=9).request.params.max_tokens == 9


def test_ids_take_the_place_of_messages() -> None:
    request = parse(rekindle={"prompt_ids": [1, 2, 3], "reuse": "off"}).request
    assert request.token_ids == (1, 2, 3)
    assert request.messages is None


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "u"}, {"metadata": {"user_id": "1"}}, {"prompt_cache_key": "k"}, {"store": False}, {"n": 1},
        {"logprobs": False}, {"frequency_penalty": 0.0}, {"response_format": {"type": "text"}}, {"tool_choice": "auto"},
        {"seed": None}, {"n": None}, {"user": None}, {"parallel_tool_calls": True}, {"logit_bias": {}}, {"stop": None},
    ],
)  # fmt: skip
def test_what_cannot_change_the_answer_is_ignored(harmless: dict[str, Any]) -> None:
    assert parse(**harmless).request == parse().request


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"tool_choice": "none"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"best_of": None}, "best_of"),
        ({"messages": None}, "messages"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"stop": [""]}, "stop"),
        ({"stream_options": {"every": 1}}, "stream_options.every"),
        ({"rekindle": {"reuse": "on"}}, "rekindle.reuse"),
        ({"rekindle": {"speed": 1}}, "rekindle.speed"),
        ({"rekindle": {"prompt_ids": []}}, "rekindle.prompt_ids"),
    ],
)
def test_refusals_name_the_parameter(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(**wrong)
    assert caught.value.param == param
    assert param.split(".")[-1] in str(caught.value)


def test_a_body_that_is_no_object_is_refused() -> None:
    with pytest.raises(BadRequest, match="JSON object"):
        parse_chat([1], agent=None, namespace="default")
    with pytest.raises(BadRequest, match="messages"):
        parse_chat({}, agent=None, namespace="default")


def test_usage_is_honest_to_the_token() -> None:
    assert usage_of(report()) == {
        "prompt_tokens": 100,
        "completion_tokens": 3,
        "total_tokens": 103,
        "prompt_tokens_details": {"cached_tokens": 90},
    }
    cold = report(outcome="miss", source=None, reused_tokens=0, hot_tokens=0, warm_tokens=0, computed_tokens=100)
    assert usage_of(cold)["prompt_tokens_details"] == {"cached_tokens": 0}
    assert headers_of(cold) == {
        "X-Rekindle-Outcome": "miss",
        "X-Rekindle-Reused": "0",
        "X-Rekindle-Source": "none",
    }


def test_a_completion_carries_the_report_and_ids_when_asked() -> None:
    result = ChatResult("Hi.", (7, 8, 2), "stop", report(), (1, 2))
    plain, with_ids = (completion(STAMP, result, return_ids=wanted) for wanted in (False, True))
    assert plain["choices"][0]["message"]["content"] == "Hi."
    assert plain["rekindle"]["outcome"] == "extend"
    assert plain["rekindle"]["timings"]["match_ms"] == pytest.approx(0.125, abs=0.01)
    assert "prompt_ids" not in plain["rekindle"]
    assert with_ids["rekindle"]["prompt_ids"] == [1, 2]
    assert with_ids["rekindle"]["completion_ids"] == [7, 8, 2]


def test_chunks_spell_the_role_first_and_the_report_beside_the_reason() -> None:
    chunks = Chunks(STAMP, parse(stream=True, stream_options={"include_usage": True}, rekindle={"return_ids": True}))
    deltas = [
        Delta("", (7,), None, report()),
        Delta("Hi", (8,)),
        Delta(".", (2,), "stop", report()),
    ]
    spelled = [chunk for delta in deltas for chunk in chunks.of(delta, (1, 2))]
    assert [chunk["choices"][0]["delta"] for chunk in spelled[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "Hi"},
        {"content": "."},
        {},
    ]
    last, usage = spelled[-2:]
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["rekindle"]["completion_ids"] == [7, 8, 2]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in spelled[:-1])
