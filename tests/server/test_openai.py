"""The OpenAI dialect: what is taken, what is refused by name, how a reply is spelled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rekindle.engine.generation import Generation
from rekindle.engine.types import Delta, Report, Timings
from rekindle.errors import BadRequest
from rekindle.model.logprobs import TokenLogprob
from rekindle.model.params import SamplingParams
from rekindle.server.answers.answer import Stamp, headers_of
from rekindle.server.answers.choice import Choice
from rekindle.server.gate.caller import Caller
from rekindle.server.openai.calls import ChatCall, parse_chat, parse_completion
from rekindle.server.openai.models import ChatChunk, ChatCompletion
from rekindle.server.openai.replies import ChatReply, usage_of
from rekindle.text.replies import ReplyFormat
from rekindle.text.replies.envelope import EnvelopeForm

STAMP = Stamp("chatcmpl-1", 1, "pocket")
ADA = Caller(agent="ada")
HELLO = {"messages": [{"role": "user", "content": "Hello!"}]}
LOOK = {"type": "function", "function": {"name": "look", "strict": True, "parameters": {"b": 1, "a": 2}}}


def parse(**parameters: Any) -> ChatCall:
    return parse_chat({**HELLO, **parameters}, ADA)


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
        model="default", temperature=0, top_p=0.5, top_k=4, min_p=0.1, seed=3, stop="END", max_tokens=7, stream=True,
        presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.25, logit_bias={"7": -100, "12": 1.5},
        stop_token_ids=[2, 3], ignore_eos=True, min_tokens=2, n=3, logprobs=True, top_logprobs=4,
        stream_options={"include_usage": True}, rekindle={"reuse": "canonical", "return_ids": True},
    )  # fmt: skip
    (request,) = call.requests
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0, 0.5, 4, 0.1, 3)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -1, 1.25)
    assert (params.logit_bias, params.stop_token_ids) == (((7, -100), (12, 1.5)), (2, 3))
    assert (params.stop, params.max_tokens, params.ignore_eos, params.min_tokens) == (("END",), 7, True, 2)
    assert params.logprobs == 4
    assert (call.stream, call.include_usage, call.return_ids, call.model) == (True, True, True, "default")
    assert (call.num_choices, call.has_logprobs) == (3, True)
    assert (request.agent, request.namespace, request.reuse) == ("ada", "default", "canonical")
    assert request.structured, "marks that are special tokens are needed to read the reply"
    assert request.messages is not None
    assert request.messages[0].content == "Hello!"


def test_what_the_template_is_told_and_who_the_parent_is_reach_the_request() -> None:
    body = {**HELLO, "reasoning_effort": "low", "chat_template_kwargs": {"docs": ["a"]}}
    (request,) = parse_chat(body, Caller(agent="ada", parent="eve")).requests
    assert request.template_kwargs == {"enable_thinking": True, "reasoning_effort": "low", "docs": ["a"]}
    assert request.parent == "eve"


def test_only_one_call_of_a_tool_that_is_named() -> None:
    named = {"type": "function", "function": {"name": "look"}}
    assert not parse(tools=[LOOK], tool_choice=named).parallel
    assert parse(tools=[LOOK], tool_choice="required").parallel


def test_defaults() -> None:
    call = parse()
    (request,) = call.requests
    assert request.params == SamplingParams()
    assert request.reuse is None
    assert (call.stream, call.num_choices, call.has_logprobs, bool(call.read_tools)) == (False, 1, False, False)
    assert parse(logprobs=True).requests[0].params.logprobs == 0


def test_the_newer_name_of_the_limit_wins() -> None:
    assert parse(max_tokens=7, max_completion_tokens=9).requests[0].params.max_tokens == 9


def test_ids_take_the_place_of_messages() -> None:
    (request,) = parse(rekindle={"prompt_ids": [1, 2, 3], "reuse": "off"}).requests
    assert request.token_ids == (1, 2, 3)
    assert request.messages is None


def test_tools_reach_the_template_as_sent_and_calls_are_read_unless_none_are_wanted() -> None:
    for choice, reads in ((None, True), ("auto", True), ("none", False)):
        call = parse(tools=[LOOK], tool_choice=choice)
        assert call.requests[0].tools == [LOOK]
        assert bool(call.read_tools) == reads
    assert json.dumps(parse(tools=[LOOK]).requests[0].tools) == json.dumps([LOOK])
    assert not parse(tools=[]).read_tools
    assert parse(tools=[LOOK]).parallel
    assert not parse(tools=[LOOK], parallel_tool_calls=False).parallel


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "u"}, {"metadata": {"user_id": "1"}}, {"prompt_cache_key": "k"}, {"store": False}, {"n": 1},
        {"logprobs": False}, {"frequency_penalty": 0.0}, {"response_format": {"type": "text"}}, {"tool_choice": "auto"},
        {"seed": None}, {"n": None}, {"user": None}, {"parallel_tool_calls": True}, {"logit_bias": {}}, {"stop": None},
        {"modalities": ["text"]}, {"top_logprobs": None}, {"tools": None}, {"stop_token_ids": []}, {"min_p": 0},
        {"prompt_cache_options": {"ttl": "1h"}},
    ],
)  # fmt: skip
def test_what_cannot_change_the_answer_is_ignored(harmless: dict[str, Any]) -> None:
    assert parse(**harmless) == parse()


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"n": 2.5}, "n"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": True}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"07": 1}}, "logit_bias"),
        ({"logit_bias": {"\u0667": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"7": 101}}, "logit_bias"),
        ({"logit_bias": [7]}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"x" * 5_000: 1}, "x" * 100),
        ({"rekindle": {"x" * 5_000: 1}}, "rekindle." + "x" * 91),
        ({"logit_bias": {"7": True}}, "logit_bias.7"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": 7}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"tools": [{"function": {}}]}, "tools.0.function.name"),
        ({"tools": [{"function": {"name": 3}}]}, "tools.0.function.name"),
        ({"tools": "look"}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": "\ud800"}}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_choice": [3]}, "guided_choice.0"),
        ({"guided_json": "{"}, "guided_json"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"thinking": "on"}, "thinking"),
        ({"functions": "look"}, "functions"),
        ({"reasoning_effort": "hard"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"no name": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": ["\ufdd0"]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"messages": None}, "messages"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": [[]]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"stop_token_ids": ["5"]}, "stop_token_ids.0"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"every": 1}}, "stream_options.every"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"rekindle": {"reuse": "on"}}, "rekindle.reuse"),
        ({"rekindle": {"speed": 1}}, "rekindle.speed"),
        ({"rekindle": {"prompt_ids": []}}, "rekindle.prompt_ids"),
        ({"rekindle": {"prompt_ids": [True]}}, "rekindle.prompt_ids.0"),
    ],
)
def test_refusals_name_the_parameter(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_chat({**HELLO, **wrong}, ADA, strict=True)
    assert caught.value.param == param
    assert param.split(".")[0] in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_refusal_says_what_would_do() -> None:
    with pytest.raises(BadRequest, match=r"valid string, or .*valid list"):
        parse(stop=5)
    with pytest.raises(BadRequest, match="use 'auto', 'none', 'required', or name a function"):
        parse(tools=[LOOK], tool_choice="always")


@pytest.mark.parametrize("parser", [parse_chat, parse_completion])
def test_a_body_that_is_no_object_is_refused(parser: Any) -> None:
    for body in ([1], "x", None, 3):
        with pytest.raises(BadRequest, match="JSON object"):
            parser(body, ADA)
    with pytest.raises(BadRequest, match=r"messages|prompt"):
        parser({}, ADA)


def choices_of(*reports: Report) -> list[Choice]:
    return [Choice(index, Generation(), report=each) for index, each in enumerate(reports)]


def test_usage_is_honest_to_the_token() -> None:
    assert usage_of(choices_of(report())) == {
        "prompt_tokens": 100,
        "completion_tokens": 3,
        "total_tokens": 103,
        "prompt_tokens_details": {"cached_tokens": 90},
    }
    cold = report(outcome="miss", source=None, reused_tokens=0, hot_tokens=0, warm_tokens=0, computed_tokens=100)
    assert usage_of(choices_of(cold))["prompt_tokens_details"] == {"cached_tokens": 0}
    assert headers_of(cold) == {
        "X-Rekindle-Outcome": "miss",
        "X-Rekindle-Reused": "0",
        "X-Rekindle-Source": "none",
    }


def test_usage_counts_a_prompt_once_and_every_completion() -> None:
    cold = report(outcome="miss", source=None, reused_tokens=0, hot_tokens=0, warm_tokens=0, computed_tokens=100)
    four = choices_of(report(), report(completion_tokens=5), cold, report(completion_tokens=7))
    assert usage_of(four[:2], 2)["total_tokens"] == 108
    assert usage_of(four, 2)["prompt_tokens"] == 200
    assert usage_of(four, 2)["completion_tokens"] == 18
    assert usage_of(four, 2)["prompt_tokens_details"] == {"cached_tokens": 90}


FORM = ReplyFormat(tools=EnvelopeForm())


def reply_of(call: ChatCall, form: ReplyFormat = FORM) -> ChatReply:
    generations = [Generation() for _ in range(call.num_choices)]
    for generation in generations:
        generation.prompt_ids = (1, 2)
    return ChatReply(STAMP, call, generations, form=form)


def spelled(reply: ChatReply, *deltas: tuple[int, Delta]) -> list[dict[str, Any]]:
    """The chunks of some deltas, each of the described shape."""
    chunks = [chunk for index, delta in deltas for chunk in reply.take(index, delta)] + reply.ending()
    for chunk in chunks:
        ChatChunk.model_validate(chunk)
    return chunks


def test_a_completion_carries_the_report_and_ids_when_asked() -> None:
    for wanted in (False, True):
        reply = reply_of(parse(rekindle={"return_ids": wanted}))
        spelled(reply, (0, Delta("Hi", (7, 8), None, report())), (0, Delta(".", (2,), "stop", report())))
        whole = reply.whole()
        ChatCompletion.model_validate(whole)
        assert whole["choices"][0]["message"] == {"role": "assistant", "content": "Hi.", "refusal": None}
        assert whole["rekindle"]["outcome"] == "extend"
        assert whole["rekindle"]["timings"]["match_ms"] == pytest.approx(0.125, abs=0.01)
        ids = (whole["rekindle"].get("prompt_ids"), whole["rekindle"].get("completion_ids"))
        assert ids == (([1, 2], [7, 8, 2]) if wanted else (None, None))


def test_chunks_spell_the_role_first_and_the_report_beside_the_reason() -> None:
    call = parse(stream=True, stream_options={"include_usage": True}, rekindle={"return_ids": True})
    deltas = [Delta("", (7,), None, report()), Delta("Hi", (8,)), Delta(".", (2,), "stop", report())]
    chunks = spelled(reply_of(call), *((0, delta) for delta in deltas))
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "Hi"},
        {"content": "."},
        {},
    ]
    last, usage = chunks[-2:]
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["rekindle"]["completion_ids"] == [7, 8, 2]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_choices_interleave_and_each_ends_once() -> None:
    reply = reply_of(parse(n=2, stream=True))
    chunks = spelled(
        reply,
        (1, Delta("b", (8,), None, report())),
        (0, Delta("a", (7,), None, report())),
        (1, Delta("B", (9,), "length", report())),
        (0, Delta("A", (9,), "stop", report())),
    )
    seen = [(chunk["choices"][0]["index"], chunk["choices"][0]["delta"].get("content")) for chunk in chunks]
    assert seen == [(1, ""), (1, "b"), (0, ""), (0, "a"), (1, "B"), (1, None), (0, "A"), (0, None)]
    ends = [(c["choices"][0]["index"], c["choices"][0]["finish_reason"]) for c in chunks if "rekindle" in c]
    assert ends == [(1, "length"), (0, "stop")]
    whole = reply.whole()
    ChatCompletion.model_validate(whole)
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["aA", "bB"]
    assert whole["usage"]["completion_tokens"] == 6


CALL = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'


def calls_in(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]


@pytest.mark.parametrize(
    ("text", "reason", "said", "calls", "told"),
    [
        (f"Wait.{CALL}", "stop", "Wait.", [("look", '{"a": 1}')], "tool_calls"),
        (CALL + "\n" + CALL, "stop", None, [("look", '{"a": 1}')] * 2, "tool_calls"),
        (CALL, "length", None, [("look", '{"a": 1}')], "length"),
        (CALL[:45], "length", None, [("look", '{"a')], "length"),
        (CALL[:45], "stop", None, [("look", '{"a')], "stop"),
        (CALL[:20], "length", CALL[:20], [], "length"),
        ("", "stop", "", [], "stop"),
    ],
)
def test_calls_in_replies(text: str, reason: Any, said: str, calls: list[tuple[str, str]], told: str) -> None:
    reply = reply_of(parse(tools=[LOOK]))
    deltas = [Delta(char, (7,), None, report()) for char in text] + [Delta("", (), reason, report())]
    chunks = spelled(reply, *((0, delta) for delta in deltas))
    whole = reply.whole()
    ChatCompletion.model_validate(whole)
    (choice,) = whole["choices"]
    assert (choice["message"]["content"], calls_in(choice["message"]), choice["finish_reason"]) == (said, calls, told)
    streamed: dict[int, list[str]] = {}
    for piece in (piece for chunk in chunks for piece in chunk["choices"][0]["delta"].get("tool_calls", [])):
        streamed.setdefault(piece["index"], []).append(piece["function"]["arguments"])
    assert ["".join(pieces) for pieces in streamed.values()] == [arguments for _, arguments in calls]
    assert chunks[-1]["choices"][0]["finish_reason"] == told


def test_without_a_form_nothing_is_a_call() -> None:
    reply = reply_of(parse(tools=[LOOK], tool_choice="none"))
    spelled(reply, (0, Delta(CALL, (7,), "stop", report())))
    assert reply.whole()["choices"][0]["message"]["content"] == CALL


def test_after_the_only_call_that_is_wanted_nothing_follows() -> None:
    reply = reply_of(parse(tools=[LOOK], parallel_tool_calls=False, logprobs=True))
    (wanted, unwanted) = ((TokenLogprob(7, -0.5, text),) for text in (b"call", b"more"))
    spelled(reply, (0, Delta(CALL, (7,), None, report(), wanted)))
    assert reply.has_ended(0)
    last = Delta("more", (7,), "cancelled", report(), unwanted)
    chunks = spelled(reply, (0, Delta(CALL, (7,), logprobs=unwanted)), (0, last))
    assert [each["token"] for each in reply.whole()["choices"][0]["logprobs"]["content"]] == ["call"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == ["tool_calls"]
    assert calls_in(reply.whole()["choices"][0]["message"]) == [("look", '{"a": 1}')]


def test_logprobs_of_text_that_is_held_back_come_with_the_next_chunk() -> None:
    def token(text: str) -> TokenLogprob:
        return TokenLogprob(7, -0.5, text.encode(), (TokenLogprob(8, -1.5, b"\xf0\x9f"),))

    reply = reply_of(parse(tools=[LOOK], logprobs=True, top_logprobs=1))
    deltas = [
        Delta("a", (7,), None, report(), logprobs=(token("a"),)),
        Delta("<tool", (7,), logprobs=(token("<tool"),)),
        Delta("s> ", (7,), logprobs=(token("s> "),)),
        Delta("", (7,), "stop", report(), logprobs=(token("é"),)),
    ]
    chunks = spelled(reply, *((0, delta) for delta in deltas))
    told = [[each["token"] for each in (c["choices"][0]["logprobs"] or {}).get("content", [])] for c in chunks]
    assert told == [[], ["a"], ["<tool", "s> "], ["é"]]
    (choice,) = reply.whole()["choices"]
    assert [each["token"] for each in choice["logprobs"]["content"]] == ["a", "<tool", "s> ", "é"]
    assert choice["logprobs"]["content"][3] == {
        "token": "é",
        "logprob": -0.5,
        "bytes": [195, 169],
        "top_logprobs": [{"token": "\ufffd", "logprob": -1.5, "bytes": [240, 159]}],
    }
