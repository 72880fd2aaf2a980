"""Completions: prompts of every kind, their order, echo and logprobs, with the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from rekindle.engine.generation import Generation
from rekindle.engine.types import Delta
from rekindle.errors import BadRequest
from rekindle.model.logprobs import TokenLogprob
from rekindle.server.answers.answer import Stamp
from rekindle.server.gate.caller import Caller
from rekindle.server.openai.calls import parse_completion
from rekindle.server.openai.models import TextCompletion
from rekindle.server.openai.text import CompletionReply
from tests.server.conftest import Served
from tests.server.scripted import SCRIPTS, serving, write_scripted_model
from tests.server.test_official_client import post
from tests.server.test_openai import report

ADA = Caller(agent="ada", namespace="left")
TALK, SMILE = "".join(SCRIPTS["talk"]), "".join(SCRIPTS["smile"])
CUE = "Some words.<|im_end|>\n<|im_start|><|talk|>"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", [("Hi", None)]),
        (["Hi", "Ho"], [("Hi", None), ("Ho", None)]),
        ([1, 2], [(None, (1, 2))]),
        ([[1, 2], [3]], [(None, (1, 2)), (None, (3,))]),
    ],
)
def test_prompts_of_every_kind(prompt: Any, expected: list[Any]) -> None:
    call = parse_completion({"prompt": prompt, "rekindle": {"reuse": "off"}}, ADA)
    assert [(request.text, request.token_ids) for request in call.requests] == expected
    for request in call.requests:
        assert (request.agent, request.namespace, request.reuse) == ("ada", "left", "off")
        assert request.params.max_tokens == 16


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"suffix": "b"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 2, "n": 1}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"return_token_ids": 1}, "return_token_ids"),
        ({"echo": 1}, "echo"),
        ({"messages": []}, "messages"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"rekindle": {"prompt_ids": [1]}}, "rekindle.prompt_ids"),
    ],
)
def test_refusals_name_the_parameter(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_completion({"prompt": "a", **wrong}, ADA, strict=True)
    assert caught.value.param == param


@pytest.mark.parametrize("harmless", [{"suffix": ""}, {"suffix": None}, {"best_of": 1}, {"echo": False}, {"n": 1}])
def test_what_means_nothing_is_taken(harmless: dict[str, Any]) -> None:
    assert parse_completion({"prompt": "a", **harmless}, ADA) == parse_completion({"prompt": "a"}, ADA)


def test_offsets_count_characters_of_the_text() -> None:
    call = parse_completion({"prompt": "a", "logprobs": 1}, ADA)
    reply = CompletionReply(
        Stamp("cmpl-1", 1, "pocket"), call, [Generation()], decode=lambda ids: "", token_bytes=lambda _: b""
    )
    halves = [
        TokenLogprob(1, -1.0, "é".encode()[:1], (TokenLogprob(9, -0.5, b"x"),)),
        TokenLogprob(2, -2.0, "é".encode()[1:]),
    ]
    least = TokenLogprob(3, float("-inf"), b"!")
    chunks = [
        *reply.take(0, Delta("a", (0,), None, report(), (TokenLogprob(0, -0.25, b"a"),))),
        *reply.take(0, Delta("", (1,), logprobs=(halves[0],))),
        *reply.take(0, Delta("é", (2,), logprobs=(halves[1],))),
        *reply.take(0, Delta("!", (3,), "length", report(), (least,))),
    ]
    spelled = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry["text_offset"] for entry in spelled] == [[0], [1, 1], [2]]
    assert spelled[1]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert spelled[1]["top_logprobs"] == [{"x": -0.5, "bytes:\\xc3": -1.0}, {"bytes:\\xa9": -2.0}]
    whole = reply.whole()
    TextCompletion.model_validate(whole)
    assert whole["choices"][0]["logprobs"]["text_offset"] == [0, 1, 1, 2]
    assert json.loads(json.dumps(whole, allow_nan=False))["choices"][0]["logprobs"]["token_logprobs"][-1] == -9999.0


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("scripted")
    model = write_scripted_model(directory / "model")
    with serving(model=model, store=directory / "store", threads=1, hot_bytes="64MiB") as served:
        yield served


def complete(served: Served, prompt: Any, agent: str | None = None, **parameters: Any) -> Any:
    given = {"model": "default", "temperature": 0, **parameters}
    return served.client(agent).completions.create(prompt=prompt, **given)


def test_control_tokens_are_parsed_and_memory_is_kept(scripted: Served) -> None:
    first = complete(scripted, CUE, "ada")
    assert first.object == "text_completion"
    assert (first.choices[0].text, first.choices[0].finish_reason) == (TALK, "stop")
    later = complete(scripted, f"{CUE}{TALK}<|im_end|>\n<|im_start|><|smile|>", "ada")
    assert later.choices[0].text == SMILE
    report = later.model_extra["rekindle"]
    assert (report["outcome"], report["source"]) == ("extend", "own")
    assert later.usage.prompt_tokens_details.cached_tokens == report["reused_tokens"] > 0


def test_results_stand_in_the_order_of_prompts(scripted: Served) -> None:
    answer = complete(scripted, [CUE, "<|smile|>", "<|toss|>"], n=2, temperature=1, seed=1)
    texts = [choice.text for choice in answer.choices]
    assert texts[:4] == [TALK, TALK, SMILE, SMILE]
    assert set(texts[4:]) <= {" heads", " tails"}
    assert [choice.index for choice in answer.choices] == list(range(6))
    alone = sum(complete(scripted, prompt).usage.prompt_tokens for prompt in (CUE, "<|smile|>", "<|toss|>"))
    assert answer.usage.prompt_tokens == alone
    assert answer.usage.completion_tokens == 2 * 5 + 2 * 3 + 2


def test_ids_are_run_as_they_are(scripted: Served) -> None:
    encoder = scripted.engine.encoder
    ids = [[int(token) for token in encoder.encode(encoder.render_text(text))] for text in (CUE, "<|smile|>")]
    assert [choice.text for choice in complete(scripted, ids).choices] == [TALK, SMILE]
    assert complete(scripted, ids[0]).choices[0].text == TALK
    echoed = complete(scripted, ids[0], echo=True).choices[0].text
    assert echoed == encoder.decode(ids[0]) + TALK


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_prompt_as_it_was_sent(scripted: Served, stream: bool) -> None:
    answer = complete(scripted, [CUE, "<|smile|>"], echo=True, stream=stream)
    if stream:
        texts = {0: "", 1: ""}
        for choice in (chunk.choices[0] for chunk in answer):
            texts[choice.index] += choice.text
        assert list(texts.values()) == [CUE + TALK, "<|smile|>" + SMILE]
    else:
        assert [choice.text for choice in answer.choices] == [CUE + TALK, "<|smile|>" + SMILE]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(scripted: Served, stream: bool) -> None:
    answer = complete(scripted, "<|smile|>", logprobs=2, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    tops = [top for choice in choices for top in choice.logprobs.top_logprobs]
    values = [value for choice in choices for value in choice.logprobs.token_logprobs]
    assert tokens == SCRIPTS["smile"]
    assert [SMILE[start:][: len(token)] for start, token in zip(offsets, tokens, strict=True)] == tokens
    assert all(top[token] == value for top, token, value in zip(tops, tokens, values, strict=True))
    assert all(2 <= len(top) <= 3 for top in tops)


def test_a_stream_is_as_described(scripted: Served) -> None:
    body = {"prompt": [CUE, "<|toss|>"], "stream": True, "stream_options": {"include_usage": True}, "logprobs": 1}
    status, headers, data = post(scripted, body, "/v1/completions")
    assert status == 200
    assert headers["x-rekindle-outcome"]
    *events, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    for chunk in chunks:
        TextCompletion.model_validate(chunk)
    assert sorted(c["choices"][0]["index"] for c in chunks[:-1] if c["choices"][0]["finish_reason"]) == [0, 1]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_a_whole_answer_is_as_described(scripted: Served) -> None:
    body = {"prompt": [CUE, "<|toss|>"], "n": 2, "logprobs": 0, "rekindle": {"return_ids": True}}
    status, _, data = post(scripted, body, "/v1/completions")
    assert status == 200
    answer = json.loads(data)
    TextCompletion.model_validate(answer)
    assert all(len(choice["rekindle"]["prompt_ids"]) > 0 for choice in answer["choices"])


@pytest.mark.parametrize(
    ("prompt", "code"), [("", None), ("word " * 3_000, "context_length_exceeded"), ([10**6], None), ([-1], None)]
)
def test_what_cannot_be_run_names_the_prompt(scripted: Served, prompt: Any, code: str | None) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(scripted, prompt, stream=stream)
        assert (caught.value.param, caught.value.code) == ("prompt", code)


def test_one_bad_prompt_fails_them_all(scripted: Served) -> None:
    with pytest.raises(openai.BadRequestError):
        complete(scripted, [CUE, ""])
    assert complete(scripted, CUE).choices[0].text == TALK


def ids_of(served: Served, text: str) -> list[int]:
    encoder = served.engine.encoder
    return [int(token) for token in encoder.encode(encoder.render_text(text))]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_the_prompt(scripted: Served, stream: bool) -> None:
    text = "Ada writes one line.<|smile|>"
    result = scripted.engine.generate(text, max_tokens=2, temperature=0, prompt_logprobs=1, logprobs=1)
    assert result.prompt_logprobs is not None
    answer = complete(scripted, [text, text], echo=True, logprobs=1, max_tokens=2, stream=stream)
    choices = [chunk.choices[0] for chunk in answer if chunk.choices] if stream else answer.choices
    for index in (0, 1):
        parts = [choice.logprobs for choice in choices if choice.index == index]
        values = [value for part in parts for value in part.token_logprobs]
        right = [*result.prompt_logprobs, *result.logprobs]
        assert values == [None, *(each.logprob for each in right if each is not None)]
        tokens = [token for part in parts for token in part.tokens]
        assert "".join(tokens) == text + result.text
        offsets = [offset for part in parts for offset in part.text_offset]
        assert offsets == [len("".join(tokens[:at])) for at in range(len(tokens))]
        tops = [top for part in parts for top in part.top_logprobs]
        assert tops[0] is None
        best = [each.top[0].logprob for each in right if each is not None]
        assert [max(top.values()) for top in tops[1:]] == best


def test_no_tokens_are_generated_where_none_are_wanted(scripted: Served) -> None:
    text = "Nothing follows this."
    answer = complete(scripted, text, echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, answer.usage.completion_tokens) == (text, "length", 0)
    assert len(choice.logprobs.tokens) == len(ids_of(scripted, text)) == answer.usage.prompt_tokens
    assert [list(top) for top in choice.logprobs.top_logprobs[1:]] == [[token] for token in choice.logprobs.tokens[1:]]
    chunks = list(complete(scripted, text, max_tokens=0, stream=True))
    assert [(chunk.choices[0].text, chunk.choices[0].finish_reason) for chunk in chunks] == [("", "length")]


def test_the_prompt_s_logprobs_and_ids_as_vllm_writes_them(scripted: Served) -> None:
    extra = {"prompt_logprobs": 2, "return_token_ids": True}
    ids = ids_of(scripted, CUE)
    answer = complete(scripted, CUE, max_tokens=3, extra_body=extra).choices[0].model_extra
    assert answer["prompt_token_ids"] == ids
    assert len(answer["token_ids"]) == 3
    first, *others = answer["prompt_logprobs"]
    assert (first, len(others)) == (None, len(ids) - 1)
    for token, place in zip(ids[1:], others, strict=True):
        own = place[str(token)]
        ranks = sorted(each["rank"] for each in place.values())
        assert ranks == ([1, 2] if own["rank"] <= 2 else [1, 2, own["rank"]])
        assert own["decoded_token"] == scripted.engine.encoder.vocabulary.token_bytes(token).decode()
    chunks = list(complete(scripted, CUE, max_tokens=3, stream=True, extra_body={"return_token_ids": True}))
    assert chunks[0].choices[0].model_extra["prompt_token_ids"] == ids
    assert [each for chunk in chunks for each in chunk.choices[0].model_extra["token_ids"]] == answer["token_ids"]


def test_a_chat_has_them_in_its_head(scripted: Served) -> None:
    def chat(**parameters: Any) -> Any:
        messages: Any = [{"role": "user", "content": "Hi <|talk|>"}]
        given = {"model": "default", "temperature": 0, "max_tokens": 4, **parameters}
        return scripted.client().chat.completions.create(messages=messages, **given)

    answer = chat(extra_body={"prompt_logprobs": 1, "return_token_ids": True, "rekindle": {"return_ids": True}})
    head, own = answer.model_extra, answer.model_extra["rekindle"]
    assert head["prompt_token_ids"] == own["prompt_ids"]
    assert len(head["prompt_logprobs"]) == len(own["prompt_ids"])
    assert answer.choices[0].model_extra["token_ids"] == own["completion_ids"]
    chunks = list(chat(stream=True, extra_body={"return_token_ids": True}))
    assert chunks[0].model_extra["prompt_token_ids"] == own["prompt_ids"]
    ids = [chunk.choices[0].model_extra.get("token_ids", []) for chunk in chunks if chunk.choices]
    assert [each for some in ids for each in some] == own["completion_ids"]
