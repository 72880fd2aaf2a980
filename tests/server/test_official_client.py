"""All of chat completions through the official client and a real socket; a scripted model says what it should."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from rekindle.server.openai.models import ChatChunk, ChatCompletion, ErrorReply
from tests.server.conftest import Served
from tests.server.scripted import LOOK, SCRIPTS, serving, write_scripted_model

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "add")]
NAMED = {"type": "function", "function": {"name": "look"}}
FILLER = "There is a long letter on the table. "
History = list[dict[str, Any]]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("scripted")
    model = write_scripted_model(directory / "model")
    with serving(model=model, store=directory / "store", threads=1, hot_bytes="64MiB") as served:
        yield served


def say(word: str, *, length: int = 12) -> History:
    return [{"role": "user", "content": f"{word} please. {FILLER * length}"}]


def ask(served: Served, said: History, agent: str | None = None, **parameters: Any) -> Any:
    given = {"model": "default", "temperature": 0, "max_tokens": 64, **parameters}
    return served.client(agent).chat.completions.create(messages=said, **given)


def post(served: Served, body: dict[str, Any], path: str = "/v1/chat/completions") -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    connection.close()
    return answer


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


def assembled(stream: Any) -> tuple[str, dict[int, dict[str, str]], list[Any]]:
    """Text, calls and chunks of a stream of one choice, put together as agents do."""
    text, calls, chunks = "", {}, list(stream)
    for delta in (chunk.choices[0].delta for chunk in chunks if chunk.choices):
        text += delta.content or ""
        for piece in delta.tool_calls or []:
            call = calls.setdefault(piece.index, {"id": piece.id, "name": piece.function.name, "arguments": ""})
            assert piece.id in (None, call["id"])
            call["arguments"] += piece.function.arguments
    return text, calls, chunks


def test_a_call_goes_out_and_comes_back_and_the_next_turn_extends(scripted: Served) -> None:
    """What the model generated is what the template writes of it: not a token of the turn is computed again."""
    said = say("look")
    first = ask(scripted, said, "ada", tools=TOOLS)
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    assert calls_of(choice.message) == [("look", LOOK)]
    (call,) = choice.message.tool_calls
    answer = {"role": "tool", "tool_call_id": call.id, "content": "talk now, it is there"}
    turn = [*said, choice.message.model_dump(exclude_none=True), answer]
    second = ask(scripted, turn, "ada", tools=TOOLS)
    assert second.choices[0].message.content == "".join(SCRIPTS["talk"])
    assert second.choices[0].finish_reason == "stop"
    report = second.model_extra["rekindle"]
    assert (report["outcome"], report["source"]) == ("extend", "own")
    stored = first.usage.prompt_tokens + first.usage.completion_tokens
    assert report["reused_tokens"] >= stored - 1  # the KV of the last token is that of the next turn


def test_a_streamed_call_says_the_same_piece_by_piece(scripted: Served) -> None:
    said = say("look")
    text, calls, chunks = assembled(ask(scripted, said, "bo", tools=TOOLS, stream=True))
    assert text == "Let me look."
    assert list(calls) == [0]
    assert (calls[0]["name"], calls[0]["arguments"]) == ("look", LOOK)
    assert calls[0]["id"].startswith("call_")
    pieces = [chunk for chunk in chunks if chunk.choices[0].delta.tool_calls]
    assert len(pieces) > 4, "arguments come as they are generated"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]
    call = {"id": calls[0]["id"], "type": "function", "function": {"name": "look", "arguments": calls[0]["arguments"]}}
    turn = [*said, {"role": "assistant", "content": text, "tool_calls": [call]}, {"role": "tool", "content": "talk"}]
    assert ask(scripted, turn, "bo", tools=TOOLS).model_extra["rekindle"]["outcome"] == "extend"


def test_calls_spelled_otherwise_than_the_template_does_cost_their_own_tokens_only(scripted: Served) -> None:
    said = say("twice", length=50)
    first = ask(scripted, said, "cy", tools=TOOLS)
    message = first.choices[0].message
    assert message.content is None
    assert calls_of(message) == [("add", '{"a": 1,"b":2}'), ("sub", '{"c":\n3}')]
    assert len({call.id for call in message.tool_calls}) == 2
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "talk"} for call in message.tool_calls]
    second = ask(scripted, [*said, message.model_dump(exclude_none=True), *answers], "cy", tools=TOOLS)
    report = second.model_extra["rekindle"]
    assert report["outcome"] == "diverge"
    assert report["reused_tokens"] > 0.9 * report["prompt_tokens"]


@pytest.mark.parametrize(("stream"), [False, True])
def test_one_call_where_parallel_ones_are_not_wanted(scripted: Served, stream: bool) -> None:
    answer = ask(scripted, say("twice"), tools=TOOLS, parallel_tool_calls=False, stream=stream)
    if stream:
        text, calls, chunks = assembled(answer)
        assert (text, [call["arguments"] for call in calls.values()]) == ("", ['{"a": 1,"b":2}'])
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
    else:
        assert calls_of(answer.choices[0].message) == [("add", '{"a": 1,"b":2}')]
        assert answer.choices[0].finish_reason == "tool_calls"
        endless = {
            "tools": TOOLS,
            "parallel_tool_calls": False,
            "max_tokens": 1_500,
            "extra_body": {"ignore_eos": True},
        }
        assert ask(scripted, say("twice"), **endless).usage.completion_tokens < 1_000, "nobody generates what none want"


def test_what_is_no_call_is_text(scripted: Served) -> None:
    (choice,) = ask(scripted, say("hurt"), tools=TOOLS).choices
    assert choice.message.content == "".join(SCRIPTS["hurt"])
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")


def test_a_call_that_is_cut_off_keeps_what_it_had(scripted: Served) -> None:
    (choice,) = ask(scripted, say("cut"), tools=TOOLS, max_tokens=4).choices
    assert calls_of(choice.message) == [("cut", '{"long": "and longer and so on ')]
    assert choice.finish_reason == "length"
    (choice,) = ask(scripted, say("cut"), tools=TOOLS).choices
    assert calls_of(choice.message) == [("cut", '{"long": "and longer and so on until')]
    assert choice.finish_reason == "stop"


def test_tools_stay_in_the_prompt_when_no_call_is_wanted(scripted: Served) -> None:
    said = say("look")
    with_calls = ask(scripted, said, "eve", tools=TOOLS)
    (choice,) = (answer := ask(scripted, said, "eve", tools=TOOLS, tool_choice="none")).choices
    assert choice.message.content == "".join(SCRIPTS["look"])
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
    assert answer.model_extra["rekindle"]["outcome"] == "exact"
    assert answer.usage.prompt_tokens == with_calls.usage.prompt_tokens
    (plain,) = ask(scripted, said).choices
    assert plain.message.content == "".join(SCRIPTS["look"]), "without tools nothing is a call"


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(scripted: Served, stream: bool) -> None:
    options = {"n": 6, "temperature": 1, "seed": 3, "stream": stream}
    if stream:
        chunks = list(ask(scripted, say("toss"), **options, stream_options={"include_usage": True}))
        *others, last = chunks
        texts = ["".join(c.choices[0].delta.content or "" for c in others if c.choices[0].index == i) for i in range(6)]
        ends = [chunk.choices[0].index for chunk in others if chunk.choices[0].finish_reason]
        assert sorted(ends) == list(range(6))
        assert all(chunk.usage is None for chunk in others)
        assert last.choices == []
        usage = last.usage
    else:
        answer = ask(scripted, say("toss"), **options)
        texts = [choice.message.content for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert all(choice.finish_reason == "stop" for choice in answer.choices)
        usage = answer.usage
    assert set(texts) == {" heads", " tails"}
    alone = [ask(scripted, say("toss"), temperature=1, seed=3 + i).choices[0].message.content for i in range(6)]
    assert texts == alone, "choice i is drawn with seed + i"
    assert usage.completion_tokens == 6
    assert usage.prompt_tokens == ask(scripted, say("toss")).usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(scripted: Served, stream: bool) -> None:
    answer = ask(scripted, say("toss"), logprobs=True, top_logprobs=2, stream=stream)
    choices = [c.choices[0] for c in answer if c.choices] if stream else answer.choices
    tokens = [token for choice in choices for token in (choice.logprobs.content if choice.logprobs else [])]
    (token,) = tokens
    assert token.logprob == pytest.approx(-0.6931, abs=1e-3)
    assert {each.token for each in token.top_logprobs} == {" heads", " tails"}
    assert bytes(token.bytes).decode() == token.token
    without = ask(scripted, say("toss"))
    assert without.choices[0].logprobs is None
    smile = ask(scripted, say("smile"), logprobs=True).choices[0]
    assert b"".join(bytes(token.bytes) for token in smile.logprobs.content).decode() == smile.message.content
    assert all(token.top_logprobs == [] for token in smile.logprobs.content)


def test_parameters_reach_the_sampler(scripted: Served) -> None:
    vocabulary = scripted.engine.encoder.vocabulary
    ids = {vocabulary.shown(token).decode("utf-8", "replace"): token for token in range(vocabulary.size)}
    for word in (" heads", " tails"):
        biased = ask(scripted, say("toss"), n=4, temperature=1, logit_bias={str(ids[word]): 20})
        assert {choice.message.content for choice in biased.choices} == {word}
    talk = SCRIPTS["talk"]
    for parameters, text, reason in (
        ({"stop": [" the"]}, "It is in", "stop"),
        ({"stop": "house"}, "".join(talk).partition("house")[0], "stop"),
        ({"extra_body": {"stop_token_ids": [ids[talk[2]]]}}, "".join(talk[:2]), "stop"),
        ({"max_completion_tokens": 2}, "".join(talk[:2]), "length"),
        ({"presence_penalty": 2, "frequency_penalty": -2, "seed": 1}, "".join(talk), "stop"),
        ({"extra_body": {"min_p": 0.5, "top_k": 3, "repetition_penalty": 1.1}}, "".join(talk), "stop"),
    ):
        (choice,) = ask(scripted, say("talk"), **parameters).choices
        assert (choice.message.content, choice.finish_reason) == (text, reason), parameters


def test_a_stream_ends_in_one_report_usage_and_done(scripted: Served) -> None:
    body = {"messages": say("look"), "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}, "n": 2}
    status, headers, data = post(scripted, {**body, "max_tokens": 64, "logprobs": True})
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert headers["x-rekindle-outcome"] in ("exact", "extend", "diverge", "miss")
    *events, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    for chunk in chunks:
        ChatChunk.model_validate(chunk)
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert [len(chunk["choices"]) for chunk in chunks] == [1] * (len(chunks) - 1) + [0]
    reported = [chunk["choices"][0]["index"] for chunk in chunks if chunk.get("rekindle")]
    assert sorted(reported) == [0, 1]


def test_a_whole_answer_is_as_described(scripted: Served) -> None:
    for word, options in (("look", {"tools": TOOLS}), ("toss", {"n": 3, "logprobs": True, "top_logprobs": 1})):
        body = {"messages": say(word), "rekindle": {"return_ids": True}, **options}
        status, headers, data = post(scripted, body)
        assert status == 200
        answer = json.loads(data)
        ChatCompletion.model_validate(answer)
        assert headers["x-rekindle-reused"] == str(answer["rekindle"]["reused_tokens"])


@pytest.mark.parametrize(
    ("wrong", "kind", "param"),
    [
        ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice"),
        ({"tool_choice": NAMED | {"function": {"name": "dig"}}, "tools": TOOLS}, openai.BadRequestError, "tool_choice"),
        ({"tool_choice": "maybe", "tools": TOOLS}, openai.BadRequestError, "tool_choice"),
        ({"reasoning_effort": "hard"}, openai.BadRequestError, "reasoning_effort"),
        ({"chat_template_kwargs": {"tools": []}}, openai.BadRequestError, "chat_template_kwargs"),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "tools[0].function"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, openai.BadRequestError, "tool_choice"),
        ({"n": 9}, openai.BadRequestError, "n"),
        ({"logit_bias": {"100000": 1}}, openai.BadRequestError, "logit_bias"),
        ({"model": "gpt-9"}, openai.NotFoundError, "model"),
        ({"response_format": {"type": "xml"}}, openai.BadRequestError, "response_format"),
        ({"guided_regex": "(a"}, openai.BadRequestError, "guided_regex"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_exceptions(
    scripted: Served, wrong: dict[str, Any], kind: type[openai.APIStatusError], param: str, stream: bool
) -> None:
    with pytest.raises(kind) as caught:
        ask(scripted, wrong.get("messages", say("talk")), extra_body=wrong, stream=stream)
    assert caught.value.param == param
    ErrorReply.model_validate({"error": caught.value.body})


def test_an_error_behind_the_head_comes_as_an_event(scripted: Served, tmp_path: Any) -> None:
    model = scripted.engine.settings.model.model
    flags = {"model": model, "store": tmp_path, "threads": 1, "hot_bytes": "64MiB", "request_timeout_s": 1.0}
    flags["ping_s"] = 0.02  # the head does not wait for the first token, which may be late
    flags["speculate"] = "off"  # the reply repeats itself, and shall take longer than that
    with serving(**flags) as served, pytest.raises(openai.APIError, match=r"second|time|long") as caught:
        list(ask(served, say("talk"), stream=True, max_tokens=1_500, extra_body={"ignore_eos": True}))
    assert not isinstance(caught.value, openai.APIStatusError)


def test_a_model_without_a_template_says_so_where_tools_are_sent(tmp_path: Path) -> None:
    other = tmp_path / "model"
    write_scripted_model(other)
    (other / "chat_template.jinja").unlink()
    with serving(model=other, store=tmp_path / "store", threads=1, hot_bytes="64MiB") as plain:
        with pytest.raises(openai.BadRequestError, match="no chat template") as caught:
            ask(plain, say("talk"), tools=TOOLS)
        assert caught.value.param == "tools"
        assert plain.engine.reply_format.tools is None


THOUGHT, ANSWER = "Lamps weigh little.", "A feather weighs less."


def test_thoughts_stand_beside_the_answer_and_come_back(scripted: Served) -> None:
    said = say("muse")
    first = ask(scripted, said, "eve")
    message = first.choices[0].message
    assert (message.reasoning_content, message.content) == (THOUGHT, ANSWER) and message.reasoning == THOUGHT
    assert first.choices[0].finish_reason == "stop"
    thought = first.usage.completion_tokens_details.reasoning_tokens
    assert (thought, first.usage.completion_tokens) == (3, 5), "a token that ends a thought began in it"
    turn = [*said, message.model_dump(exclude_none=True), {"role": "user", "content": "talk, please."}]
    report = ask(scripted, turn, "eve").model_extra["rekindle"]
    assert (report["outcome"], report["source"]) == ("extend", "own")
    assert report["reused_tokens"] >= first.usage.total_tokens - 1


def test_thoughts_stream_apart_from_the_answer(scripted: Served) -> None:
    chunks = list(ask(scripted, say("muse"), stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        ChatChunk.model_validate(chunk.model_dump(exclude_unset=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    thoughts = [delta.reasoning_content for delta in deltas if hasattr(delta, "reasoning_content")]
    assert thoughts == [delta.reasoning for delta in deltas if hasattr(delta, "reasoning")]
    assert "".join(thoughts) == THOUGHT
    assert len(thoughts) > 1, "thoughts come as they are generated"
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    first_text = next(at for at, delta in enumerate(deltas) if delta.content)
    assert all(not hasattr(delta, "reasoning_content") for delta in deltas[first_text:])
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 3


def test_a_call_may_follow_a_thought(scripted: Served) -> None:
    message = ask(scripted, say("ponder"), tools=TOOLS).choices[0].message
    assert (message.reasoning_content, message.content) == ("Sums need add.", None)
    assert calls_of(message) == [("add", '{"a": 4}')]


def test_a_reply_cut_off_in_its_thought_has_no_content(scripted: Served) -> None:
    (choice,) = ask(scripted, say("muse"), max_tokens=2).choices
    assert (choice.message.reasoning_content, choice.message.content) == ("Lamps weigh little", "")
    assert choice.finish_reason == "length"


@pytest.mark.parametrize(
    "asked",
    [
        {"reasoning_effort": "none"},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"reasoning_effort": "high", "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ],
)
def test_thinking_can_be_switched_off(scripted: Served, asked: dict[str, Any]) -> None:
    message = ask(scripted, say("muse"), **asked).choices[0].message
    assert message.content == "".join(SCRIPTS["talk"])
    assert not hasattr(message, "reasoning_content") and not hasattr(message, "reasoning")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("choice", "place"), [(NAMED, "cellar"), ("required", "loft")])
def test_a_call_can_be_forced(scripted: Served, choice: Any, place: str, stream: bool) -> None:
    """The script would talk; the reply begins with the call all the same."""
    answer = ask(scripted, say("talk"), tools=TOOLS, tool_choice=choice, stream=stream)
    if stream:
        text, calls, chunks = assembled(answer)
        found = [(call["name"], call["arguments"]) for call in calls.values()]
        reason = next(chunk.choices[0].finish_reason for chunk in reversed(chunks) if chunk.choices)
    else:
        (one,) = answer.choices
        text, found, reason = one.message.content or "", calls_of(one.message), one.finish_reason
    assert (text, found, reason) == ("", [("look", f'{{"place": "{place}"}}')], "tool_calls")


def test_every_choice_of_a_forced_call_is_one(scripted: Served) -> None:
    choices = ask(scripted, say("talk"), tools=TOOLS, tool_choice=NAMED, n=2).choices
    assert [calls_of(choice.message) for choice in choices] == [[("look", '{"place": "cellar"}')]] * 2
    assert len({choice.message.tool_calls[0].id for choice in choices}) == 2
