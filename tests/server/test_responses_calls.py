"""The responses API: what is taken, what is refused by name, which conversation items make, how output is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import responses as official
from pydantic import TypeAdapter

from rekindle.engine.generation import Generation
from rekindle.engine.types import Delta, FinishReason, Progress
from rekindle.errors import BadRequest
from rekindle.model.params import SamplingParams
from rekindle.server.answers.answer import Stamp
from rekindle.server.border import Problem
from rekindle.server.gate.caller import Caller
from rekindle.server.responses.calls import ResponseCall, parse_response
from rekindle.server.responses.item_fields import Item
from rekindle.server.responses.items import sealed
from rekindle.server.responses.reply import ResponseReply
from rekindle.server.responses.stored import StoredResponse
from rekindle.text.messages import Message, ToolCall
from rekindle.text.replies import ReplyFormat, ThinkingFormat
from rekindle.text.replies.envelope import EnvelopeForm
from tests.server.test_openai import report

ADA = Caller(agent="ada", parent="eve")
LOOK = {"type": "function", "name": "look", "strict": True, "description": "Looks.", "parameters": {"b": 1, "a": 2}}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a":  1}'}
FORM = ReplyFormat(tools=EnvelopeForm(), thinking=ThinkingFormat("<think>", "</think>", "\n", "\n", "\n\n"))
EVENT: TypeAdapter[Any] = TypeAdapter(official.ResponseStreamEvent)
HI = {"role": "user", "content": "Hi."}


class Lookup:
    """Stored responses in a dictionary."""

    def __init__(self, *kept: StoredResponse) -> None:
        self._kept = kept

    def chain(self, namespace: str, id: str) -> list[StoredResponse]:
        assert namespace == "default"
        at = [kept.id for kept in self._kept].index(id)
        return list(self._kept[: at + 1])

    def item(self, namespace: str, id: str) -> Item | None:
        assert namespace == "default"
        found = [item for kept in self._kept for item in kept.all_items if item["id"] == id]
        return found[-1] if found else None


def parse(given: Any = "Hello!", *kept: StoredResponse, **parameters: Any) -> ResponseCall:
    return parse_response({"input": given, **parameters}, ADA, Lookup(*kept))


def messages(given: Any, *kept: StoredResponse, **parameters: Any) -> tuple[Message, ...]:
    found = parse(given, *kept, **parameters).request.messages
    assert found is not None
    return found


def answer(
    call: ResponseCall, *texts: str, reason: FinishReason = "stop"
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Events and whole response of a reply that comes in these texts, a token each."""
    reply = ResponseReply(Stamp("resp_1", 7, "toy"), call, Generation(), form=FORM)
    events = [event for at, text in enumerate(texts) for event in reply.take(0, Delta(text, (at,)))]
    last = Delta("", (), reason, report(completion_tokens=len(texts)))
    events += [*reply.take(0, last), *reply.ending()]
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events, reply.whole()


def kept(call: ResponseCall, *texts: str) -> StoredResponse:
    return StoredResponse("default", "ada", json.loads(json.dumps(answer(call, *texts)[1])), call.items)


def test_parameters_reach_the_request() -> None:
    call = parse(
        model="default", temperature=0, top_p=0.5, top_k=4, min_p=0.1, seed=3, max_output_tokens=7, stream=True,
        min_tokens=2, ignore_eos=True, tools=[LOOK], rekindle={"reuse": "canonical", "return_ids": True},
        reasoning={"effort": "low"}, chat_template_kwargs={"tone": "dry"}, store=False, stream_options={},
    )  # fmt: skip
    request, params = call.request, call.request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0, 0.5, 4, 0.1, 3)
    assert (params.max_tokens, params.min_tokens, params.ignore_eos) == (7, 2, True)
    assert (call.stream, call.store, call.return_ids, call.model) == (True, False, True, "default")
    assert (request.agent, request.parent, request.namespace, request.reuse) == ("ada", "eve", "default", "canonical")
    assert request.template_kwargs == {"enable_thinking": True, "reasoning_effort": "low", "tone": "dry"}
    assert request.structured
    shown = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"b": 1, "a": 2}}}
    assert json.dumps(request.tools) == json.dumps([shown]), "in the order of the API, whatever else was sent"
    assert parse(reasoning={"effort": "none"}).request.template_kwargs == {"enable_thinking": False}


def test_defaults() -> None:
    call = parse()
    assert call.request.params == SamplingParams()
    assert (call.stream, call.store, call.return_ids, call.read_tools, call.parallel) == (
        False,
        True,
        False,
        (),
        True,
    )
    assert call.request.messages == (Message("user", "Hello!"),)


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "u"}, {"service_tier": "auto"}, {"prompt_cache_key": "k"}, {"truncation": "disabled"}, {"text": None},
        {"background": False}, {"include": []}, {"include": ["web_search_call.action.sources"]}, {"tools": None},
        {"text": {"format": {"type": "text"}}}, {"top_logprobs": 0}, {"client_metadata": {}},
        {"previous_response_id": None}, {"instructions": None}, {"max_tool_calls": 3}, {"context_management": []},
        {"prompt_cache_options": {"mode": "implicit"}}, {"safety_identifier": "s"}, {"tools": []}, {"stream": None},
    ],
)  # fmt: skip
def test_what_cannot_change_the_answer_is_ignored(harmless: dict[str, Any]) -> None:
    assert parse(**harmless).request == parse().request


def test_a_verbosity_is_named() -> None:
    call = parse(text={"format": {"type": "text"}, "verbosity": "low"})
    assert call.request.omitted.ignored == ("text.verbosity",)
    with pytest.raises(BadRequest) as caught:
        parse_response({"input": "Hello!", "text": {"verbosity": "low"}}, ADA, Lookup(), strict=True)
    assert caught.value.param == "text.verbosity"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"input": 7}, "input"),
        ({"input": [7]}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [HI, {"role": "user", "content": "\ufdd0"}]}, "input[1].content"),
        ({"input": [HI, {"role": "user", "content": [{"type": "input_file"}]}]}, "input[1].content[0]"),
        ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{**CALL, "call_id": None}]}, "input[0].call_id"),
        ({"input": [CALL, {"type": "function_call_output", "call_id": "c1"}]}, "input[1].output"),
        ({"input": [CALL, {"type": "function_call_output", "call_id": "c2", "output": ""}]}, "input[1].call_id"),
        ({"input": [{"type": "item_reference", "id": "msg_9"}]}, "input[0].id"),
        ({"input": [{"id": "msg_9"}]}, "input[0].id"),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content"),
        ({"input": [{"type": "reasoning", "content": [{}]}]}, "input[0].content"),
        ({"instructions": "\ud800"}, "instructions"),
        ({"stop": ["x"]}, "stop"),
        ({"n": 2}, "n"),
        ({"tools": [{**LOOK, "name": ""}]}, "tools[0].name"),
        ({"tools": [LOOK, {"type": "computer_use_preview"}]}, "tools[1]"),
        ({"tools": [LOOK, {"type": "custom"}]}, "tools[1].name"),
        ({"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar"}}]}, "tools[0].format"),
        ({"tools": [{"type": "custom", "name": "x", "description": 7}]}, "tools[0].description"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "x", "input": {}}]}, "input[0].input"),
        ({"input": [{"type": "shell_call", "call_id": "c", "action": {"commands": "ls"}}]}, "input[0].action"),
        ({"input": [{"type": "local_shell_call", "call_id": "c"}]}, "input[0].action"),
        ({"input": [{"type": "apply_patch_call", "call_id": "c", "operation": {"path": "a"}}]}, "input[0].operation"),
        ({"input": [CALL, {"type": "shell_call_output", "call_id": "c1", "output": "x"}]}, "input[1].output"),
        ({"input": [CALL, {"type": "apply_patch_call_output", "call_id": "c1"}]}, "input[1].status"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0]"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "x"}]}]}, "tools[0].tools[0]"),
        ({"tools": [{**LOOK, "description": "\ufdd0"}]}, "tools"),
        ({"tools": [{**LOOK, "parameters": {"minimum": float("nan")}}]}, "tools"),
        ({"tools": [{"type": "web_search", "city": "\ud800"}]}, "tools"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "look", "x": "\ud800"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "look", "x": float("inf")}}, "tool_choice"),
        (
            {"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": []}]}},
            "tool_choice",
        ),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "tools": [LOOK]}, "tool_choice"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"metadata": {f"k{at}": "" for at in range(17)}}, "metadata"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_response({"input": "Hello!", **wrong}, ADA, Lookup(), strict=True)
    assert caught.value.param == param
    assert param.partition("[")[0].partition(".")[0] in str(caught.value)


def test_a_reply_is_one_message_whatever_its_items() -> None:
    items = [
        HI,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm. "}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Let me"}]},
        CALL,
        {"type": "message", "role": "assistant", "content": " look."},
        {**CALL, "call_id": "c2", "namespace": "house"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "dust"}]},
        {"type": "function_call_output", "call_id": "c2", "output": ""},
        {"role": "assistant", "content": "One."},
        {"role": "assistant", "content": "Two."},
        {"role": "developer", "content": "Be kind."},
    ]
    calls = (ToolCall("c1", "look", '{"a":  1}'), ToolCall("c2", "house__look", '{"a":  1}'))
    assert messages(items) == (
        Message("user", "Hi."),
        Message("assistant", "Let me look.", tool_calls=calls, reasoning="Hm. "),
        Message("tool", "dust", tool_call_id="c1"),
        Message("tool", "", tool_call_id="c2"),
        Message("assistant", "One."),
        Message("assistant", "Two."),
        Message("system", "Be kind."),
    )


def test_instructions_alone_are_a_conversation() -> None:
    """Clients warm up with them."""
    assert messages([], instructions="Be kind.") == (Message("system", "Be kind."),)


def test_instructions_and_the_first_system_messages_are_one() -> None:
    head = [{"role": "developer", "content": "B."}, {"role": "system", "content": "C."}]
    assert messages([*head, HI], instructions="A.") == (Message("system", "A.\n\nB.\n\nC."), Message("user", "Hi."))
    assert messages([HI, *head])[1:] == (Message("system", "B."), Message("system", "C."))


def test_a_conversation_goes_on_behind_its_reply() -> None:
    first = kept(
        parse("Look!", tools=[LOOK]),
        "<think>",
        "\nHm.\n",
        "</think>\n\n",
        "So",
        '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>',
    )
    call_id = first.response["output"][-1]["call_id"]
    result = {"type": "function_call_output", "call_id": call_id, "output": "dust"}
    wanted = (
        Message("user", "Look!"),
        Message("assistant", "So", tool_calls=(ToolCall(call_id, "look", '{"a": 1}'),), reasoning="Hm."),
        Message("tool", "dust", tool_call_id=call_id),
    )
    assert messages([result], first, previous_response_id="resp_1") == wanted
    assert messages([{"role": "user", "content": "Look!"}, *first.response["output"], result]) == wanted
    thought, *others = first.response["output"]
    for shown in (
        {"type": "reasoning", "id": thought["id"], "summary": []},
        {"type": "item_reference", "id": thought["id"]},
    ):
        assert messages([{"role": "user", "content": "Look!"}, shown, *others, result], first) == wanted
    shown = {"type": "reasoning", "summary": [], "encrypted_content": sealed("Hm.")}
    assert messages([{"role": "user", "content": "Look!"}, shown, *others, result]) == wanted
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAB..."}
    assert messages([foreign, *others])[0].reasoning is None


@pytest.mark.parametrize(
    ("given", "is_named"),
    [
        ({"encrypted_content": "gAAA", "summary": [{"type": "summary_text", "text": "SUM"}]}, True),
        ({"encrypted_content": "gAAA", "id": "rs_unknown", "summary": []}, True),
        ({"encrypted_content": sealed("Hm.")[:-3]}, True),
        ({"summary": [{"type": "summary_text", "text": "SUM"}]}, True),
        ({"encrypted_content": sealed("Hm."), "summary": [{"type": "summary_text", "text": "SUM"}]}, False),
        ({"content": [{"type": "reasoning_text", "text": "Hm."}], "encrypted_content": "gAAA"}, False),
        ({"id": "rs_unknown", "summary": [], "encrypted_content": None}, False),
    ],
)
def test_reasoning_that_cannot_be_read_here_is_named(given: dict[str, Any], is_named: bool) -> None:
    items = [{"role": "user", "content": "Hi."}, {"type": "reasoning", **given}, {"role": "user", "content": "On."}]
    named = [(each.kind, each.count, each.param) for each in parse(items).request.omitted.left_out]
    assert named == ([("reasoning", 1, "input[1]")] if is_named else [])
    if is_named:
        with pytest.raises(BadRequest) as caught:
            parse_response({"input": items}, ADA, Lookup(), strict=True)
        assert caught.value.param == "input[1]"


def test_a_fork_goes_on_from_whoever_remembers() -> None:
    """The caller of these tests has a parent of its own; others have that of the response they go on from."""
    first = kept(parse("Hi."), "Ho.")
    body = {"input": "On.", "previous_response_id": "resp_1"}
    for caller, parent in ((ADA, "eve"), (Caller(agent="bo"), "ada"), (Caller(agent="ada"), None), (Caller(), None)):
        assert parse_response(body, caller, Lookup(first)).request.parent == parent


def test_who_echoes_thoughts_is_known_where_the_server_does_it() -> None:
    first = kept(parse("Hi."), "Ho.")
    assert parse("On.", first, previous_response_id="resp_1").request.echoes_thoughts is True
    assert parse("Hi.").request.echoes_thoughts is True
    assert parse([HI, {"role": "assistant", "content": "Ho."}, HI]).request.echoes_thoughts is None


@pytest.mark.parametrize(
    ("choice", "kind", "name"),
    [
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"name": "look"}, {"name": "add"}]}, "auto", None),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"name": "add"}]}, "required", "add"),
        ({"type": "function", "name": "add"}, "required", "add"),
        ("none", "none", None),
    ],
)
def test_tool_choices(choice: Any, kind: str, name: str | None) -> None:
    call = parse(tools=[LOOK, {**LOOK, "name": "add"}], tool_choice=choice)
    assert (call.tool_choice.kind, call.tool_choice.name) == (kind, name)
    assert bool(call.read_tools) == (kind != "none")


def test_tools_of_other_servers_are_left_out_and_namespaces_are_flat() -> None:
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "house", "description": "It.", "tools": [LOOK]}]
    call = parse(tools=tools)
    assert call.request.tools is not None
    assert [tool["function"]["name"] for tool in call.request.tools] == ["house__look"]
    _, whole = answer(call, '<tool_call>\n{"name": "house__look", "arguments": {}}\n</tool_call>')
    (item,) = whole["output"]
    assert (item["name"], item["namespace"]) == ("look", "house")
    assert whole["rekindle"]["left_out_tools"] == ["web_search"]
    assert parse(tools=[{"type": "web_search"}]).request.tools is None


def test_thoughts_are_sealed_where_asked_for() -> None:
    call = parse(include=["reasoning.encrypted_content"])
    _, whole = answer(call, "<think>", "\nHm. é\n", "</think>", "\n\nSo.")
    assert whole["output"][0]["encrypted_content"] == sealed("Hm. é")
    assert messages([whole["output"][0] | {"content": None, "id": None}])[0].reasoning == "Hm. é"
    _, plain = answer(parse(), "<think>", "\nHm.\n", "</think>", "\n\nSo.")
    assert "encrypted_content" not in plain["output"][0]


def test_an_empty_reply_is_an_empty_message() -> None:
    events, whole = answer(parse())
    assert [item["type"] for item in whole["output"]] == ["message"]
    assert whole["output"][0]["content"][0]["text"] == ""
    assert [event["type"] for event in events][2:4] == ["response.output_item.added", "response.content_part.added"]


def test_a_response_is_as_the_official_client_describes_it() -> None:
    call = parse("Hi.", tools=[LOOK], instructions="Be kind.", metadata={"a": "b"}, reasoning={"effort": "low"})
    _, whole = answer(call, "Ho.", reason="length")
    found = official.Response.model_validate(whole)
    assert (found.status, found.incomplete_details and found.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert found.usage is not None
    assert found.usage.input_tokens_details.cached_tokens + found.usage.input_tokens_details.cache_write_tokens == 100
    assert set(whole) >= {"parallel_tool_calls", "tool_choice", "tools", "truncation", "text", "store", "background"}


def test_a_failure_tells_both_kinds_of_client() -> None:
    reply = ResponseReply(Stamp("resp_1", 7, "toy"), parse(), Generation(), form=FORM)
    opened = reply.opened(Progress("miss", None, 9, 0, 3, 0, 0.1))
    assert [event["type"] for event in opened] == ["response.created", "response.in_progress"]
    begun = reply.take(0, Delta("Ho", (1,)))
    assert begun[0]["type"] == "response.output_item.added", "created once"
    error, failed = reply.broken(Problem(503, "server_error", "busy", code="overloaded"))
    assert (error["error"]["message"], error["message"], error["code"]) == ("busy", "busy", "overloaded")
    assert failed["response"]["error"] == {"code": "server_error", "message": "busy"}
    assert failed["sequence_number"] == len(opened) + len(begun) + 1
    for event in (*opened, *begun, error, failed):
        EVENT.validate_python(event)


@given(
    st.lists(
        st.sampled_from(
            [
                "<think>",
                "</think>",
                "\n",
                "a",
                '<tool_call>\n{"name": "look", "arguments": ',
                '{"a": 1}',
                "}\n</tool_call>",
                "</tool_call>",
                " ",
            ]
        ),
        max_size=12,
    )
)
def test_whatever_is_generated_events_and_response_agree(texts: list[str]) -> None:
    """Deltas join to the items, items are added and done once and in order, nothing is left open."""
    events, whole = answer(parse(tools=[LOOK]), *texts)
    pieces: dict[int, str] = {}
    done: dict[int, Item] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            pieces[event["output_index"]] = pieces.get(event["output_index"], "") + event["delta"]
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(done)
            assert event["item"]["status"] == "in_progress"
            assert not (event["item"].get("content") or event["item"].get("arguments"))
        if event["type"] == "response.output_item.done":
            assert event["output_index"] == len(done)
            done[event["output_index"]] = event["item"]
    assert list(done.values()) == whole["output"]
    for index, item in done.items():
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert text == pieces.get(index, "")
        assert item["status"] in ("completed", "incomplete")
