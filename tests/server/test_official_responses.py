"""The responses API through the official client and a real socket; a scripted model says what it should."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import responses as official
from pydantic import TypeAdapter

from rekindle.server.responses.models import ResponseAnswer, ResponseEvent
from tests.server.conftest import Served
from tests.server.scripted import LOOK, SCRIPTS, serving, write_scripted_model

TOOLS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("look", "add")]
FILLER = "There is a long letter on the table. "
EVENT: TypeAdapter[Any] = TypeAdapter(official.ResponseStreamEvent)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("scripted")
    model = write_scripted_model(directory / "model")
    with serving(model=model, store=directory / "store", threads=1, hot_bytes="64MiB") as served:
        yield served


def say(word: str, *, length: int = 12) -> str:
    return f"{word} please. {FILLER * length}"


def ask(served: Served, given: Any, agent: str | None = None, **parameters: Any) -> Any:
    options = {"model": "default", "temperature": 0, "max_output_tokens": 64, **parameters}
    return served.client(agent).responses.create(input=given, **options)


def kinds(stream: Any) -> tuple[list[str], list[Any]]:
    """The types of events, runs of deltas as one, and the events; each as the official client describes it."""
    events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    found: list[str] = []
    for event in events:
        EVENT.validate_python(event.model_dump(by_alias=True))
        if not (found and found[-1] == event.type and event.type.endswith(".delta")):
            found.append(event.type)
    return found, events


def test_a_text_comes_in_the_official_order(scripted: Served) -> None:
    found, events = kinds(ask(scripted, say("talk"), stream=True))
    assert found == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    text = "".join(SCRIPTS["talk"])
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert events[-1].response.output_text == text
    assert events[0].response.status == events[0].response.model_extra.get("status", "in_progress") == "in_progress"
    assert events[2].item.content == []
    assert events[2].item.status == "in_progress"


def test_whole_and_streamed_are_the_same_but_for_ids_and_times(scripted: Served) -> None:
    options = {"agent": "same", "tools": TOOLS, "instructions": "Be short.", "metadata": {"a": "b"}}
    ask(scripted, say("look"), **options)
    whole = ask(scripted, say("look"), **options)
    *_, last = ask(scripted, say("look"), **options, stream=True)

    def bare(response: Any) -> Any:
        found = response.model_dump()
        for item in found["output"]:
            item["id"] = item["call_id"] = None
        for name in ("id", "created_at"):
            del found[name]
        del found["rekindle"]["timings"]
        return found

    assert bare(whole) == bare(last.response)
    assert whole.metadata == {"a": "b"}
    assert whole.instructions == "Be short."


def test_a_call_goes_out_and_comes_back_by_items(scripted: Served) -> None:
    first = ask(scripted, say("look"), "ada", tools=TOOLS)
    message, call = first.output
    assert (message.type, message.content[0].text) == ("message", "Let me look.")
    assert (call.type, call.name, call.arguments, call.status) == ("function_call", "look", LOOK, "completed")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "talk now, it is there"}
    said = [item.model_dump(exclude_none=True) for item in first.output]
    second = ask(scripted, [{"role": "user", "content": say("look")}, *said, result], "ada", tools=TOOLS)
    assert second.output_text == "".join(SCRIPTS["talk"])
    report = second.model_extra["rekindle"]
    assert (report["outcome"], report["source"]) == ("extend", "own")
    assert report["reused_tokens"] >= first.usage.total_tokens - 1


@pytest.mark.parametrize("agent", [None, "bo"])
def test_a_call_goes_out_and_its_result_comes_back_alone(scripted: Served, agent: str | None) -> None:
    """The server keeps the conversation; unnamed ones go on in the same hidden agent, found by their text.

    Unnamed prompts run as they are encoded afresh, which the script's tokens are not: that must be anticipated.
    """
    given = say("look", length=13 if agent else 14)
    first = ask(scripted, given, agent, tools=TOOLS)
    if agent is None:
        scripted.until_idle()
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "talk now, it is there"}
    second = ask(scripted, [result], agent, tools=TOOLS, previous_response_id=first.id)
    assert second.output_text == "".join(SCRIPTS["talk"])
    assert second.previous_response_id == first.id
    report = second.model_extra["rekindle"]
    assert report["outcome"] == "extend"
    assert report["reused_tokens"] >= first.usage.total_tokens - 1
    third = ask(scripted, "smile now", agent, tools=TOOLS, previous_response_id=second.id)
    assert third.output_text == "".join(SCRIPTS["smile"])
    assert third.model_extra["rekindle"]["outcome"] == "extend"


def test_a_streamed_call_comes_in_the_official_order(scripted: Served) -> None:
    found, events = kinds(ask(scripted, say("look"), tools=TOOLS, stream=True))
    assert found[2:] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 3, "arguments come as they are generated"
    assert "".join(pieces) == LOOK
    indexes = [event.output_index for event in events if hasattr(event, "output_index")]
    assert indexes == sorted(indexes)


def test_thoughts_are_an_item_of_their_own(scripted: Served) -> None:
    found, events = kinds(ask(scripted, say("muse"), stream=True))
    assert found[2:8] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    thought, message = events[-1].response.output
    assert (thought.type, thought.summary, thought.content[0].text) == ("reasoning", [], "Lamps weigh little.")
    assert message.content[0].text == "A feather weighs less."
    usage = events[-1].response.usage
    assert usage.output_tokens_details.reasoning_tokens == 3
    assert usage.output_tokens == len(SCRIPTS["muse"])


@pytest.mark.parametrize("way", ["items", "previous", "encrypted", "by id"])
def test_thoughts_come_back_whichever_way_a_client_sends_them(scripted: Served, way: str) -> None:
    """Not a token of the turn is computed again."""
    given = say("ponder", length=20 + len(way))
    options: dict[str, Any] = {"include": ["reasoning.encrypted_content"], "store": False} if way == "encrypted" else {}
    first = ask(scripted, given, way, tools=TOOLS, **options)
    thought, call = first.output
    assert thought.content[0].text == "Sums need add."
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "talk about it"}
    said = [item.model_dump(exclude_none=True) for item in first.output]
    if way == "encrypted":
        said[0] = {"type": "reasoning", "summary": [], "encrypted_content": thought.encrypted_content}
    elif way == "by id":
        said = [{"type": "reasoning", "id": thought.id, "summary": []}, {"type": "item_reference", "id": call.id}]
    items = [result] if way == "previous" else [{"role": "user", "content": given}, *said, result]
    more = {"previous_response_id": first.id} if way == "previous" else {}
    second = ask(scripted, items, way, tools=TOOLS, **options, **more)
    assert second.output_text == "".join(SCRIPTS["talk"])
    report = second.model_extra["rekindle"]
    assert report["outcome"] == "extend"
    assert report["reused_tokens"] >= first.usage.total_tokens - 1


def test_instructions_are_those_of_one_response(scripted: Served) -> None:
    first = ask(scripted, say("talk"), instructions="One. " * 30)
    again = ask(scripted, "smile", previous_response_id=first.id, extra_body={"rekindle": {"return_ids": True}})
    prompt = scripted.engine.encoder.decode(again.model_extra["rekindle"]["prompt_ids"])
    assert "One." not in prompt
    assert prompt.index("talk please") < prompt.index("in the attic") < prompt.index("smile")
    assert again.instructions is None


def test_a_reply_that_is_cut_off_is_incomplete(scripted: Served) -> None:
    found, events = kinds(ask(scripted, say("talk"), max_output_tokens=2, stream=True))
    assert found[-2:] == ["response.output_item.done", "response.incomplete"]
    response = events[-1].response
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output[0].status, response.output_text) == ("incomplete", "".join(SCRIPTS["talk"][:2]))
    cut = ask(scripted, say("cut"), tools=TOOLS, max_output_tokens=4)
    assert (cut.output[0].type, cut.output[0].status) == ("function_call", "incomplete")
    assert cut.output[0].arguments == '{"long": "and longer and so on '
    thinking = ask(scripted, say("muse"), max_output_tokens=3)
    assert [(item.type, item.status) for item in thinking.output] == [("reasoning", "incomplete")]


@pytest.mark.parametrize("stream", [False, True])
def test_usage_is_whole_and_zeros_are_zeros(scripted: Served, stream: bool) -> None:
    given = f"talk {stream} {FILLER * 15}"
    usages = []
    for options in ({}, {}, {"extra_body": {"rekindle": {"reuse": "off"}}}):
        answer = ask(scripted, given, f"usage {stream}".replace(" ", "-"), stream=stream, **options)
        response = list(answer)[-1].response if stream else answer
        usages.append(response.usage)
        report = response.model_extra["rekindle"]
        assert response.usage.input_tokens_details.cached_tokens == report["reused_tokens"]
    for usage in usages:
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        assert usage.output_tokens_details.reasoning_tokens == 0
    fresh, exact, off = (usage.input_tokens_details for usage in usages)
    assert fresh.cached_tokens + fresh.cache_write_tokens == usages[0].input_tokens
    assert (exact.cached_tokens, exact.cache_write_tokens) == (usages[1].input_tokens - 1, 1)
    assert (off.cached_tokens, off.cache_write_tokens) == (0, 0)


def test_a_call_can_be_forced_or_forbidden(scripted: Served) -> None:
    for choice, arguments in (
        ({"type": "function", "name": "look"}, '{"place": "cellar"}'),
        ("required", '{"place": "loft"}'),
    ):
        forced = ask(scripted, say("talk"), tools=TOOLS, tool_choice=choice)
        (call,) = (item for item in forced.output if item.type == "function_call")
        assert (call.name, call.arguments, call.status) == ("look", arguments, "completed")
        assert forced.tool_choice == choice or forced.tool_choice.model_dump() == choice
    text = ask(scripted, say("look"), tools=TOOLS, tool_choice="none")
    assert text.output_text == "".join(SCRIPTS["look"])
    one = ask(scripted, say("twice"), tools=TOOLS, parallel_tool_calls=False)
    both = ask(scripted, say("twice"), tools=TOOLS)
    assert [item.name for item in one.output] == ["add"]
    assert [item.name for item in both.output] == ["add", "sub"]


def test_functions_in_a_namespace_are_called_by_both_names(scripted: Served) -> None:
    """As coding agents offer what their plug-ins can do; the tools of other servers are left out, visibly."""
    tools = [
        {"type": "namespace", "name": "house", "description": "The house.", "tools": [{**TOOLS[0], "name": "look"}]},
        {"type": "web_search"},
    ]
    answer = ask(scripted, say("look"), tools=tools, extra_body={"rekindle": {"return_ids": True}})
    report = answer.model_extra["rekindle"]
    assert report["left_out_tools"] == ["web_search"]
    prompt = scripted.engine.encoder.decode(report["prompt_ids"])
    assert "house__look" in prompt
    assert "web_search" not in prompt


def test_kept_responses_are_shown_listed_and_deleted(scripted: Served) -> None:
    client = scripted.client("keeper")
    first = ask(scripted, say("look"), "keeper", tools=TOOLS)
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "talk"}
    second = ask(scripted, [result], "keeper", tools=TOOLS, previous_response_id=first.id)
    assert client.responses.retrieve(second.id).model_dump() == second.model_dump()
    listed = client.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in listed] == ["message", "message", "function_call", "function_call_output"]
    pages = client.responses.input_items.list(second.id, limit=1)
    assert [item.id for item in pages] == [item.id for item in listed][::-1], "every page, the last item first"
    assert client.responses.delete(first.id) is None
    for wrong in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.delete(first.id),
        lambda: client.responses.input_items.list(first.id),
    ):
        with pytest.raises(openai.NotFoundError, match=first.id):
            wrong()
    with pytest.raises(openai.BadRequestError, match="which it continues") as caught:
        ask(scripted, "talk", previous_response_id=second.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


def test_what_is_not_to_be_stored_is_not(scripted: Served) -> None:
    answer = ask(scripted, say("talk"), store=False)
    with pytest.raises(openai.NotFoundError):
        scripted.client().responses.retrieve(answer.id)


@pytest.mark.parametrize("how", ["purge", "delete"])
def test_an_agents_end_is_that_of_its_responses(scripted: Served, how: str) -> None:
    gone, stays = (ask(scripted, say("talk"), agent) for agent in ("going", "staying"))
    path = "/v1/agents/going"
    sent = scripted.send("POST", f"{path}/purge") if how == "purge" else scripted.send("DELETE", path)
    assert sent.status == 200
    client = scripted.client()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(gone.id)
    assert client.responses.retrieve(stays.id).id == stays.id


@pytest.mark.parametrize(
    ("wrong", "kind", "param"),
    [
        ({"tools": [{"type": 5}]}, openai.BadRequestError, "tools[0].type"),
        ({"tool_choice": {"type": "web_search"}, "tools": TOOLS}, openai.BadRequestError, "tool_choice"),
        ({"model": "gpt-9"}, openai.NotFoundError, "model"),
        ({"text": {"format": {"type": "xml"}}}, openai.BadRequestError, "text.format"),
        ({"truncation": "middle"}, openai.BadRequestError, "truncation"),
        ({"background": True}, openai.BadRequestError, "background"),
        ({"conversation": "conv_1"}, openai.BadRequestError, "conversation"),
        ({"include": ["message.output_text.logprobs"]}, openai.BadRequestError, "include"),
        ({"previous_response_id": "resp_never"}, openai.BadRequestError, "previous_response_id"),
        ({"reasoning": {"effort": "extreme"}}, openai.BadRequestError, "reasoning.effort"),
        ({"max_output_tokens": 0}, openai.BadRequestError, "max_output_tokens"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"input": []}, openai.BadRequestError, "input"),
        ({"input": say("talk", length=2_000)}, openai.BadRequestError, "input"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            openai.BadRequestError,
            "input[0].call_id",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_exceptions(
    scripted: Served, wrong: dict[str, Any], kind: type[openai.APIStatusError], param: str, stream: bool
) -> None:
    with pytest.raises(kind) as caught:
        ask(scripted, say("talk"), extra_body=wrong, stream=stream)
    assert caught.value.param == param


def test_an_error_behind_the_head_is_an_event_and_the_clients_exception(scripted: Served, tmp_path: Any) -> None:
    model = scripted.engine.settings.model.model
    flags = {"model": model, "store": tmp_path, "threads": 1, "hot_bytes": "64MiB", "request_timeout_s": 1.0}
    flags["ping_s"] = 0.02  # the head does not wait for the first token, which may be late
    flags["speculate"] = "off"  # the reply repeats itself, and shall take longer than that
    endless = {"max_output_tokens": 1_500, "extra_body": {"ignore_eos": True}, "stream": True}
    with serving(**flags) as served:
        with pytest.raises(openai.APIError, match=r"second|time|long") as caught:
            list(ask(served, say("talk"), **endless))
        assert not isinstance(caught.value, openai.APIStatusError)
        body = {"input": say("talk"), "temperature": 0, "max_output_tokens": 1_500, "ignore_eos": True, "stream": True}
        data = served.send("POST", "/v1/responses", body).body.decode()
        *_, error, failed, rest = data.split("\n\n")
        assert error.startswith("event: error\n")
        assert failed.startswith("event: response.failed\n")
        assert '"status":"failed"' in failed
        assert '"code":"server_error"' in failed
        assert rest == ""


@pytest.mark.parametrize("word", ["talk", "look", "muse", "ponder", "twice", "cut"])
def test_answers_and_events_are_as_described(scripted: Served, word: str) -> None:
    body = {"input": say(word), "tools": [*TOOLS, {"type": "web_search"}], "include": ["reasoning.encrypted_content"]}
    whole = scripted.send("POST", "/v1/responses", body)
    assert whole.status == 200
    ResponseAnswer.model_validate(whole.json)
    assert whole.headers["x-rekindle-reused"] == str(whole.json["usage"]["input_tokens_details"]["cached_tokens"])
    streamed = scripted.send("POST", "/v1/responses", {**body, "stream": True})
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, rest = streamed.body.decode().split("\n\n")
    assert rest == ""
    for event in events:
        name, data = event.split("\n")
        found = ResponseEvent.model_validate(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found.type}"


def test_the_clients_own_stream_helper_puts_it_together(scripted: Served) -> None:
    tools: Any = [{**TOOLS[0], "strict": False}]
    with scripted.client().responses.stream(model="default", input=say("look"), tools=tools, temperature=0) as stream:
        final = stream.get_final_response()
    assert (final.output_text, final.output[-1].arguments) == ("Let me look.", LOOK)


def test_a_slow_prompt_begins_at_once_and_shows_that_it_lives(scripted: Served, tmp_path: Any) -> None:
    flags = {"model": scripted.engine.settings.model.model, "store": tmp_path, "threads": 1, "hot_bytes": "64MiB"}
    with serving(**flags, max_chunk_tokens=16, ping_s=0.005) as served:
        body = {"input": say("talk", length=60), "temperature": 0, "stream": True}
        sent = served.send("POST", "/v1/responses", body)
    blocks = sent.body.decode().split("\n\n")
    names = [block.split("\n")[0].removeprefix("event: response.") for block in blocks]
    begun = names.index("created")
    assert names.index("output_item.added") - begun > 2, "something was said in between"
    assert names.count("created") == names.count("in_progress") == 1
    alive = [name for name in names if name.startswith(": prefill ")]
    assert alive
    assert all("of them reused" in name for name in alive)
    completed = next(block for block in blocks if block.startswith("event: response.completed"))
    assert json.loads(completed.partition("data: ")[2])["response"]["rekindle"]["outcome"] == "miss"


def test_a_fork_reads_its_parents_memory(scripted: Served) -> None:
    first = ask(scripted, say("look", length=17), "stem", tools=TOOLS)
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "talk"}
    report = ask(scripted, [result], "twig", tools=TOOLS, previous_response_id=first.id).model_extra["rekindle"]
    assert (report["outcome"], report["source"]) == ("extend", "parent")
    assert report["reused_tokens"] >= first.usage.total_tokens - 1


def test_namespaces_do_not_see_each_others(scripted: Served, tmp_path: Any) -> None:
    flags = {"model": scripted.engine.settings.model.model, "store": tmp_path, "threads": 1, "hot_bytes": "64MiB"}
    with serving(**flags, api_keys={"one": "key-one-1234567890", "two": "key-two-1234567890"}) as served:
        one, two = "key-one-1234567890", "key-two-1234567890"
        made = served.send("POST", "/v1/responses", {"input": say("talk")}, key=one).json
        path = f"/v1/responses/{made['id']}"
        assert served.send("GET", path, key=one).status == 200
        for method, at in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items")):
            assert served.send(method, at, key=two).status == 404
        for body in (
            {"input": "x", "previous_response_id": made["id"]},
            {"input": [{"type": "item_reference", "id": made["output"][0]["id"]}]},
        ):
            assert served.send("POST", "/v1/responses", body, key=two).status == 400
            assert served.send("POST", "/v1/responses", body, key=one).status == 200


def test_conversations_outlive_the_server(scripted: Served, tmp_path: Any) -> None:
    flags = {"model": scripted.engine.settings.model.model, "store": tmp_path, "threads": 1, "hot_bytes": "64MiB"}
    with serving(**flags) as served:
        first = ask(served, say("look"), "lasting", tools=TOOLS)
    assert (tmp_path / "responses.db").stat().st_mode & 0o777 == 0o600
    with serving(**flags) as served:
        assert served.client().responses.retrieve(first.id).model_dump() == first.model_dump()
        result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "talk"}
        second = ask(served, [result], "lasting", tools=TOOLS, previous_response_id=first.id)
        assert second.output_text == "".join(SCRIPTS["talk"])
        assert second.model_extra["rekindle"]["outcome"] == "extend"


def test_without_a_store_they_live_in_memory(scripted: Served, tmp_path: Any) -> None:
    model = scripted.engine.settings.model.model
    with serving(model=model, store="off", threads=1, hot_bytes="64MiB") as served:
        first = ask(served, say("talk"))
        assert ask(served, "smile", previous_response_id=first.id).output_text == "".join(SCRIPTS["smile"])
