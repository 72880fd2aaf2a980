"""Bodies of Ollama's clients: what each parameter becomes, what is ignored by name, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.engine.types import GenerationRequest
from rekindle.errors import BadRequest
from rekindle.model.params import SamplingParams
from rekindle.model.sampling_defaults import HABITS, SamplingDefaults
from rekindle.server.gate.caller import Caller
from rekindle.server.ollama.bodies import LOADING
from rekindle.server.ollama.calls import ModelSide, OllamaCall, parse_chat, parse_generate
from rekindle.text.constraints.types import Calls
from rekindle.text.replies import ReplyFormat, ThinkingFormat
from rekindle.text.replies.envelope import HERMES, EnvelopeForm

SAID = [{"role": "user", "content": "Hi"}]
FORM = ReplyFormat(ThinkingFormat("<think>", "</think>"), EnvelopeForm(HERMES))
SIDE = ModelSide("able", FORM, 4096)
PLAIN = ModelSide("plain", ReplyFormat(), 4096)
TOOL = {"type": "function", "function": {"name": "add"}}


def chat(side: ModelSide = SIDE, **body: Any) -> OllamaCall:
    return parse_chat({"messages": SAID, **body}, Caller(), side)


def request(side: ModelSide = SIDE, **body: Any) -> GenerationRequest:
    found = chat(side, **body).request
    assert found is not None
    return found


def params(**options: Any) -> SamplingParams:
    return request(options=options).params


def ignored(**body: Any) -> list[str]:
    return sorted(request(**body).omitted.ignored)


def test_without_options_replies_are_drawn_as_ollama_draws_them() -> None:
    assert (
        request().params
        == request(options=None).params
        == params(temperature=None)
        == SamplingParams(**HABITS["ollama"])
    )


def test_no_penalties_means_none_of_the_models_either() -> None:
    """`repeat_last_n` 0 counts no token, whatever the model's makers penalise."""
    side = replace(SIDE, defaults=SamplingDefaults({"repetition_penalty": 1.3}))
    assert request(side).params.repetition_penalty == 1.3
    assert request(side, options={"repeat_last_n": 0}).params.repetition_penalty == 1


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"num_predict": 7}, {"max_tokens": 7}),
        ({"num_predict": 7.0}, {"max_tokens": 7}),
        ({"num_predict": -1}, {"max_tokens": None}),
        ({"num_predict": -2}, {"max_tokens": None}),
        ({"num_predict": 0}, {"max_tokens": None}),
        ({"temperature": 0, "top_p": 0.5, "min_p": 0.1}, {"temperature": 0, "top_p": 0.5, "min_p": 0.1}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"seed": 3}, {"seed": 3}),
        ({"seed": -1}, {"seed": None}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["x", "y"]}, {"stop": ("x", "y")}),
        ({"repeat_penalty": 1.5, "presence_penalty": 1}, {"repetition_penalty": 1.5, "presence_penalty": 1}),
        ({"repeat_penalty": 1.5, "repeat_last_n": -1}, {"repetition_penalty": 1.5}),
        ({"repeat_penalty": 1.5, "frequency_penalty": 1, "repeat_last_n": 0}, {}),
    ],
)
def test_options_become_sampling_parameters(options: dict[str, Any], meant: dict[str, Any]) -> None:
    assert params(**options) == SamplingParams(**{**HABITS["ollama"], **meant})
    assert ignored(options=options) == []


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"options": {"num_ctx": 4096, "repeat_last_n": 64, "mirostat": 0, "mirostat_tau": 5.0, "typical_p": 1.0}}, []),
        ({"options": dict.fromkeys(LOADING, 1)}, []),
        ({"options": {"num_ctx": 4097}}, ["options.num_ctx"]),
        ({"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, ["options.repeat_last_n"]),
        ({"options": {"mirostat": 2, "mirostat_tau": 5}}, ["options.mirostat", "options.mirostat_tau"]),
        (
            {"options": {"num_keep": 4, "typical_p": 0.7, "x": 1}},
            ["options.num_keep", "options.typical_p", "options.x"],
        ),
        ({"options": {"embedding_only": 0}}, ["options.embedding_only"]),
        ({"truncate": False, "shift": False}, []),
        ({"truncate": True, "shift": True, "colour": "red"}, ["colour", "shift", "truncate"]),
        ({"messages": [{**SAID[0], "colour": "red"}]}, ["messages[].colour"]),
        ({"keep_alive": "1h30m", "format": "", "tools": [], "stream": True}, []),
    ],
)
def test_what_cannot_be_done_is_named_and_refused_by_a_strict_server(body: dict[str, Any], names: list[str]) -> None:
    assert ignored(**body) == names
    if names:
        with pytest.raises(BadRequest, match="|".join(name.rpartition(".")[2] for name in names)):
            parse_chat({"messages": SAID, **body}, Caller(), SIDE, strict=True)
    else:
        assert parse_chat({"messages": SAID, **body}, Caller(), SIDE, strict=True).request is not None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"options": []}, "options"),
        ({"options": {"num_predict": "many"}}, "options.num_predict"),
        ({"options": {"num_predict": 0.5}}, "options.num_predict"),
        ({"options": {"num_predict": True}}, "options.num_predict"),
        ({"options": {"temperature": -1}}, "temperature"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"top_p": 2}}, "top_p"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ({"options": {"stop": [""]}}, "stop"),
        ({"options": {"seed": 1 << 70}}, "seed"),
        ({"format": "xml"}, "use 'json', or a JSON schema"),
        ({"format": ["json"]}, "format"),
        ({"think": "hard"}, "use true, false, low, medium, high, max"),
        ({"think": ""}, "use true, false, low"),
        ({"think": 1}, "think"),
        ({"keep_alive": "soon"}, "^keep_alive: use seconds, or a duration such as 5m$"),
        ({"keep_alive": "5"}, "keep_alive"),
        ({"keep_alive": []}, "keep_alive"),
        ({"stream": "yes"}, "stream"),
        ({"model": 5}, "model"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "set logprobs"),
        ({"messages": {}}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, r"messages\[0\]"),
        ({"messages": [{"content": "Hi"}]}, "role"),
        ({"messages": [{"role": "king", "content": "Hi"}]}, "role"),
        ({"messages": [{"role": "user", "content": 5}]}, "content"),
        ({"messages": [{"role": "user", "content": "Hi", "images": "x"}]}, r"messages\[0\].images"),
        ({"messages": [{"role": "user", "content": "Hi", "images": [5]}]}, r"messages\[0\].images"),
        ({"messages": [{"role": "tool", "content": "Hi", "tool_name": 5}]}, "name"),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "tool_calls"),
        ({"messages": [{"role": "assistant", "thinking": 5}]}, "must be a string"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": "add"}, "tools"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_name(body: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        chat(**body)


def test_a_format_constrains_the_reply_and_tools_may_be_called_in_its_place() -> None:
    assert request(format="json").constraint is not None
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    found = request(format=schema, tools=[TOOL])
    assert found.constraint is not None and found.constraint.value == schema and found.calls == Calls(())
    assert request(tools=[TOOL]).constraint is None and request().calls is None


def test_thinking_reaches_the_template_and_is_refused_where_there_is_none() -> None:
    assert request().template_kwargs == {}
    assert request(think=True).template_kwargs == {"enable_thinking": True}
    assert request(think=False).template_kwargs == {"enable_thinking": False}
    assert request(think="low").template_kwargs == {"enable_thinking": True, "reasoning_effort": "low"}
    assert request(PLAIN, think=False).template_kwargs == {}
    for think in (True, "low"):
        with pytest.raises(BadRequest, match="'plain' does not support thinking"):
            request(PLAIN, think=think)
    with pytest.raises(BadRequest, match="'plain' does not support tools"):
        request(PLAIN, tools=[TOOL])


def test_prompts_of_another_form_are_refused_with_what_to_do() -> None:
    for body, words in (
        ({"suffix": "x"}, "does not support insert"),
        ({"template": "{{ .Prompt }}"}, "send raw: true"),
        ({"context": [1, 2]}, "/api/chat"),
        ({"raw": True, "system": "x"}, "raw mode does not support template, system, or context"),
        ({"raw": True, "think": True}, "think"),
        ({"images": "x"}, "images"),
        ({"prompt": 5}, "prompt"),
    ):
        with pytest.raises(BadRequest, match=words):
            parse_generate({"prompt": "Hi", **body}, Caller(), SIDE)
    empty = {"suffix": "", "template": "", "context": [], "system": "", "images": [], "raw": False}
    found = parse_generate({"prompt": "Hi", **empty}, Caller(), SIDE).request
    assert found is not None and found.messages == request().messages


def test_what_is_wrong_with_a_message_is_named_as_it_was_sent() -> None:
    """Pictures stand before the content in the prompt, not in the body."""
    unfit: Any = {"role": "user", "content": ["Hi", 5], "images": ["AAAA"]}
    for messages, where in (
        ([unfit], "messages[0].content[1]"),
        ([*SAID, {**unfit, "content": 5}], "messages[1].content"),
    ):
        with pytest.raises(BadRequest) as caught:
            chat(messages=messages)
        assert caught.value.param == where
    for name in ("prompt", "system"):
        with pytest.raises(BadRequest) as caught:
            parse_generate({"prompt": "Hi", name: "\ud800"}, Caller(), SIDE, strict=True)
        assert caught.value.param == name and str(caught.value).startswith(f"{name} contains half")


def test_results_have_the_ids_of_their_calls() -> None:
    function = {"index": 0, "name": "add", "arguments": {"a": 1}}
    called = {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "function": function}, {"id": "c2", "function": function}],
    }
    named: Any = [{"role": "tool", "tool_name": "add", "content": text} for text in "12"]
    messages = request(messages=[*SAID, called, *named]).messages or ()
    assert [message.tool_call_id for message in messages[2:]] == ["c1", "c2"]
    assert [message.name for message in messages[2:]] == ["add", "add"]
    assert messages[1].tool_calls[0].arguments == '{"a": 1}'
    other: Any = {"role": "tool", "tool_call_id": "c2", "content": "2"}
    messages = request(messages=[*SAID, called, other, {**other, "tool_call_id": None}]).messages or ()
    assert [message.tool_call_id for message in messages[2:]] == ["c2", "c1"]
    unknown = request(messages=[*SAID, called, {**named[0], "tool_name": "sub"}]).messages or ()
    assert unknown[2].tool_call_id is None


@given(
    names=st.lists(st.sampled_from("ab"), min_size=1, max_size=8),
    results=st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.sampled_from([None, None, "1", "5", "x"]))),
)
def test_results_take_the_first_call_that_is_left(
    names: list[str], results: list[tuple[str | None, str | None]]
) -> None:
    calls = [{"id": str(at), "function": {"name": name}} for at, name in enumerate(names)]
    said = [{"role": "tool", "content": "1", "name": name, "tool_call_id": own} for name, own in results]
    messages = request(messages=[*SAID, {"role": "assistant", "tool_calls": calls}, *said]).messages or ()
    left, expected = list(enumerate(names)), []
    for name, own in results:
        fits = [each for each in left if (str(each[0]) == own if own is not None else name in (None, each[1]))]
        left = [each for each in left if each not in fits[:1]]
        expected.append(own if own is not None or not fits else str(fits[0][0]))
    assert [message.tool_call_id for message in messages[2:]] == expected


def test_calls_without_ids_get_some_where_the_template_needs_them() -> None:
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}] * 2}
    said = [*SAID, called, *[{"role": "tool", "tool_name": "add", "content": "1"}] * 2]
    short = ModelSide("short", ReplyFormat(tools=EnvelopeForm(HERMES), call_ids="short"), 4096)
    messages = request(short, messages=said).messages or ()
    ids = [call.id for call in messages[1].tool_calls]
    assert [message.tool_call_id for message in messages[2:]] == ids and len(set(ids)) == 2
    assert all(each is not None and len(each) == 9 and each.isalnum() for each in ids)
    assert [call.id for call in (request(messages=said).messages or ())[1].tool_calls] == [None, None]


@pytest.mark.parametrize(
    ("keep_alive", "stays"),
    [
        *((each, True) for each in (None, 5, -1, "5m", "1h30m", "-1s", "0.5ms", "10µs", ".5h")),
        *((each, False) for each in (0, 0.0, "0", "0s", "0h0.0m")),
    ],
)
def test_a_model_is_to_stay_for_any_time_but_none(keep_alive: object, stays: bool) -> None:
    assert chat(messages=[], keep_alive=keep_alive).stays == stays


def test_roles_are_taken_in_any_case() -> None:
    assert request(messages=[{"role": "User", "content": "Hi"}]).messages == request().messages
