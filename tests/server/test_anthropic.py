"""All of /v1/messages through the official client and a real socket; a scripted model says what it should."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from rekindle.config import Settings
from rekindle.server.anthropic.models import AnthropicErrorReply, MessageAnswer, MessageEvent
from tests.server import conftest
from tests.server.conftest import Served
from tests.server.scripted import FORCED, LOOK, SCRIPTS, serving, write_scripted_model
from tests.server.test_pings import LONG

TOOLS: list[Any] = [
    {"name": name, "description": f"To {name}.", "input_schema": {"type": "object", "properties": {}}}
    for name in ("look", "add", "sub")
]
FILLER = "There is a long letter on the table. "
TALK = "".join(SCRIPTS["talk"])
RESULT = "talk now, it is there"
MODEL = "claude-opus-5-5"
OWN = ("temperature", "top_k", "top_p", "rekindle")  # the client itself no longer names them
BEGUN = '<tool_call>\n{"name": "'  # the model goes on from here
REST = "".join(FORCED[BEGUN])
History = list[Any]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("scripted")
    model = write_scripted_model(directory / "model")
    with serving(model=model, store=directory / "store", threads=1, hot_bytes="64MiB") as served:
        yield served


def client(served: Served, agent: str | None = None) -> anthropic.Anthropic:
    headers = {"X-Agent-ID": agent} if agent else {}
    return anthropic.Anthropic(base_url=served.url, api_key="unused", default_headers=headers, max_retries=0)


def say(word: str, *, length: int = 12) -> History:
    return [{"role": "user", "content": f"{word} please. {FILLER * length}"}]


def ask(served: Served, said: History, agent: str | None = None, *, stream: bool = False, **parameters: Any) -> Any:
    """The whole message, asked for at once or put together by the client out of its stream."""
    given = {"model": MODEL, "max_tokens": 64, "messages": said, "temperature": 0, **parameters}
    extra = {name: given.pop(name) for name in [*given] if name in OWN}
    if not stream:
        return client(served, agent).messages.create(**given, extra_body=extra)
    with client(served, agent).messages.stream(**given, extra_body=extra) as events:
        (end,) = [event for event in events if event.type == "message_delta"]
        message = events.get_final_message()
    message.rekindle = end.model_extra["rekindle"]  # the client keeps what it knows of the last events
    return message


def post(served: Served, body: dict[str, Any], path: str = "/v1/messages") -> Any:
    return served.send("POST", path, {"model": MODEL, "max_tokens": 64, "messages": say("talk"), **body})


def events_of(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Names and payloads of a stream; comments are passed over."""
    found = []
    for part in body.decode().split("\n\n"):
        lines = [line for line in part.split("\n") if line and not line.startswith(":")]
        if lines:
            name, data = lines
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def prompt_tokens(usage: Any) -> int:
    """What the usage says that the prompt has; every part is a number."""
    parts = (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
    assert all(isinstance(part, int) and part >= 0 for part in parts), usage
    if usage.cache_creation is not None:
        created = usage.cache_creation.ephemeral_5m_input_tokens + usage.cache_creation.ephemeral_1h_input_tokens
        assert created == usage.cache_creation_input_tokens
    return sum(parts)


def report_of(message: Any) -> dict[str, Any]:
    return dict(message.model_extra["rekindle"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_where_it_was(scripted: Served, stream: bool) -> None:
    said, agent = say("talk"), f"ada-{stream}"
    first = ask(scripted, said, agent, stream=stream, system="Be brief.")
    assert (text_of(first), first.stop_reason, first.stop_sequence) == (TALK, "end_turn", None)
    assert (first.type, first.role, first.id[:4]) == ("message", "assistant", "msg_")
    assert first.usage.cache_read_input_tokens in (0, prompt_tokens(first.usage) - 1)
    assert first.usage.output_tokens == len(SCRIPTS["talk"])
    turn = [*said, {"role": "assistant", "content": first.content}, {"role": "user", "content": "smile now"}]
    second = ask(scripted, turn, agent, stream=stream, system=[{"type": "text", "text": "Be brief."}])
    assert text_of(second) == "".join(SCRIPTS["smile"])
    report = report_of(second)
    assert (report["outcome"], report["source"]) == ("extend", "own")
    assert second.usage.cache_read_input_tokens == report["reused_tokens"]
    assert report["reused_tokens"] >= prompt_tokens(first.usage) + first.usage.output_tokens - 1
    assert prompt_tokens(second.usage) == report["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_taken_back(scripted: Served, stream: bool) -> None:
    said, agent = say("look", length=12 + stream), f"bo-{stream}"
    first = ask(scripted, said, agent, stream=stream, tools=TOOLS)
    text, call = first.content
    assert (text.text, call.name, call.input) == ("Let me look.", "look", json.loads(LOOK))
    assert first.stop_reason == "tool_use"
    scripted.until_idle()
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": RESULT}],
    }
    turn = [*said, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = ask(scripted, turn, agent, stream=stream, tools=TOOLS)
    assert (text_of(second), second.stop_reason) == (TALK, "end_turn")
    # The client sends the arguments as an object, spelled as JSON usually is. They are the same value as what was
    # generated, so only the result is new: at most a token for each of its signs, and what is around it.
    assert prompt_tokens(second.usage) - second.usage.cache_read_input_tokens <= len(RESULT) + 8


@pytest.mark.parametrize("stream", [False, True])
def test_several_calls_or_one(scripted: Served, stream: bool) -> None:
    both = ask(scripted, say("twice"), stream=stream, tools=TOOLS)
    assert [(block.name, block.input) for block in both.content] == [("add", {"a": 1, "b": 2}), ("sub", {"c": 3})]
    assert len({block.id for block in both.content}) == 2
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    one = ask(scripted, say("twice"), stream=stream, tools=TOOLS, tool_choice=choice)
    assert [block.name for block in one.content] == ["add"]
    assert one.stop_reason == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_can_be_forced_or_forbidden(scripted: Served, stream: bool) -> None:
    named = ask(scripted, say("talk"), stream=stream, tools=TOOLS, tool_choice={"type": "tool", "name": "look"})
    assert [(block.name, block.input) for block in named.content if block.type == "tool_use"] == [
        ("look", {"place": "cellar"})
    ]
    assert named.stop_reason == "tool_use"
    some = ask(scripted, say("talk"), stream=stream, tools=TOOLS, tool_choice={"type": "any"})
    assert [(block.name, block.input) for block in some.content] == [("look", {"place": "loft"})]
    none = ask(scripted, say("look"), stream=stream, tools=TOOLS, tool_choice={"type": "none"})
    assert (text_of(none), none.stop_reason) == ("".join(SCRIPTS["look"]), "end_turn")


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_a_block_and_comes_back(scripted: Served, stream: bool) -> None:
    agent = f"cy-{stream}"
    thinking = {"type": "enabled", "budget_tokens": 1024}
    first = ask(scripted, say("muse"), agent, stream=stream, thinking=thinking)
    thought, text = first.content
    assert (thought.type, thought.thinking, text.text) == ("thinking", "Lamps weigh little.", "A feather weighs less.")
    assert thought.signature
    assert first.usage.output_tokens_details.thinking_tokens == 3
    turn = [*say("muse"), {"role": "assistant", "content": first.content}, {"role": "user", "content": "talk"}]
    second = ask(scripted, turn, agent, stream=stream, thinking={"type": "adaptive"})
    assert report_of(second)["outcome"] == "extend", "the thinking stands in the prompt as it was generated"
    none = ask(scripted, say("muse"), stream=stream, thinking={"type": "disabled"})
    assert [block.type for block in none.content] == ["text"]
    assert none.usage.output_tokens_details.thinking_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_that_is_not_shown_is_still_sent_back(scripted: Served, stream: bool) -> None:
    agent = f"di-{stream}"
    thinking = {"type": "adaptive", "display": "omitted"}
    first = ask(scripted, say("ponder"), agent, stream=stream, thinking=thinking, tools=TOOLS)
    thought, call = first.content
    assert (thought.thinking, call.name, call.input) == ("", "add", {"a": 4})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "talk"}
    turn = [*say("ponder"), {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = ask(scripted, turn, agent, stream=stream, thinking=thinking, tools=TOOLS, rekindle={"return_ids": True})
    ids = report_of(second)["prompt_ids"]
    assert "Sums need add." in scripted.engine.encoder.decode(ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("parameters", "text", "reason", "sequence"),
    [
        ({"stop_sequences": ["house", " the"]}, "It is in", "stop_sequence", " the"),
        ({"max_tokens": 2}, "It is in the", "max_tokens", None),
        ({"top_k": 3, "top_p": 0.9, "temperature": 1.0}, TALK, "end_turn", None),
    ],
)
def test_why_a_reply_ends(
    scripted: Served, parameters: dict[str, Any], text: str, reason: str, sequence: str | None, stream: bool
) -> None:
    message = ask(scripted, say("talk"), stream=stream, **parameters)
    assert (text_of(message), message.stop_reason, message.stop_sequence) == (text, reason, sequence)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_context_says_so(scripted: Served, stream: bool) -> None:
    most, ask_first = scripted.engine.max_context, client(scripted).messages.count_tokens
    short, longer = (ask_first(model=MODEL, messages=say("talk", length=n)).input_tokens for n in (0, 1))
    length = (most - short) // (longer - short)
    said = [
        {"role": "user", "content": f"talk{' a' * more} please. {FILLER * (length - 1)}"} for more in range(30)
    ]  # the template says the first word
    left = [most - ask_first(model=MODEL, messages=[each]).input_tokens for each in said]
    room = min(each for each in left if each > 0)
    assert room < len(SCRIPTS["talk"]), left
    message = ask(scripted, [said[left.index(room)]], stream=stream, max_tokens=most)
    assert (message.usage.output_tokens, message.stop_reason) == (room, "model_context_window_exceeded")
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .*tokens"):
        ask(scripted, say("talk", length=length + 2), stream=stream)


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_goes_on_from_its_beginning(scripted: Served, stream: bool) -> None:
    parts = [{"type": "text", "text": part} for part in (BEGUN[:5], BEGUN[5:])]
    for content in (BEGUN, parts):
        message = ask(scripted, [*say("talk"), {"role": "assistant", "content": content}], stream=stream)
        assert (text_of(message), message.stop_reason) == (REST, "end_turn"), "the beginning is not said again"
    message = ask(scripted, [*say("talk"), {"role": "assistant", "content": BEGUN}], stream=stream, tools=TOOLS)
    assert [(block.name, block.input) for block in message.content] == [("look", {"place": "loft"})]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_no_json_is_text_and_one_cut_off_keeps_what_is_whole(scripted: Served, stream: bool) -> None:
    hurt = ask(scripted, say("hurt"), stream=stream, tools=TOOLS)
    assert (text_of(hurt), hurt.stop_reason) == ("".join(SCRIPTS["hurt"]), "end_turn")
    cut = ask(scripted, say("cut"), stream=stream, tools=TOOLS, max_tokens=4)
    assert [(block.name, block.input) for block in cut.content] == [("cut", {})]
    assert cut.stop_reason == "max_tokens"


def test_a_stream_tells_the_whole_answer_in_order(scripted: Served) -> None:
    body = {"messages": say("ponder"), "tools": TOOLS, "stream": True, "temperature": 0}
    answer = post(scripted, body)
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert answer.headers["x-rekindle-outcome"] in ("exact", "extend", "diverge", "miss")
    told = events_of(answer.body)
    assert all(name == payload["type"] for name, payload in told)
    for _, payload in told:
        MessageEvent.model_validate(payload)
    names = [name for name, _ in told]
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    open_block = None
    for name, payload in told[1:-2]:
        if name == "content_block_start":
            assert open_block is None
            open_block = payload["index"]
        assert payload["index"] == open_block, "one block at a time"
        open_block = None if name == "content_block_stop" else open_block
    assert open_block is None
    whole = post(scripted, {**body, "stream": False}).json
    MessageAnswer.model_validate(whole)
    starts = [payload["content_block"]["type"] for name, payload in told if name == "content_block_start"]
    assert starts == [block["type"] for block in whole["content"]] == ["thinking", "tool_use"]
    start, end = told[0][1]["message"], told[-2][1]
    assert start["usage"].keys() <= whole["usage"].keys()
    assert end["usage"] == whole["usage"] | {
        name: end["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")
    }
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["claude-opus-9-latest", "claude-haiku-9-20990101", "default"])
def test_any_name_of_claude_is_the_served_model(scripted: Served, model: str, stream: bool) -> None:
    message = ask(scripted, say("talk"), model=model, stream=stream)
    assert message.model == scripted.engine.spec.name


def test_versions_and_betas_are_accepted_and_what_names_or_bills_is_ignored(scripted: Served) -> None:
    headers = {"anthropic-version": "2099-01-01", "anthropic-beta": "what-2099-01-01,ever-2099-01-01"}
    extra = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "container": None,
        "inference_geo": "us",
        "mcp_servers": [],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "xhigh"},
        "anthropic_version": "bedrock-2023-05-31",
    }
    answer = scripted.send(
        "POST", "/v1/messages?beta=true", {"model": MODEL, "max_tokens": 9, "messages": say("talk"), **extra}, **headers
    )
    assert answer.status == 200
    assert answer.json["context_management"] == {"applied_edits": []}
    beta = client(scripted).beta.messages.create(
        model=MODEL, max_tokens=9, messages=say("talk"), betas=["interleaved-thinking-2025-05-14"]
    )
    assert beta.content


def agents_body(call: int) -> dict[str, Any]:
    """What a coding agent sends of its own accord, at its n-th call: of no use here, and no reason to refuse it."""
    kept = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
    attribution = f"x-anthropic-billing-header: cc_version=2.1.{call}; cc_entrypoint=cli; cch={call * 7919:05x};"
    history: History = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nBe kind.\n</system-reminder>"},
                {
                    "type": "text",
                    "text": "look please",
                    **({} if call > 1 else {"cache_control": {"type": "ephemeral"}}),
                },
            ],
        }
    ]
    if call > 1:
        use = {"type": "tool_use", "id": "call_1", "name": "look", "input": {"place": "attic"}}
        result = {
            "type": "tool_result",
            "tool_use_id": "call_1",
            "content": "talk",
            "cache_control": {"type": "ephemeral"},
        }
        history += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return {
        "model": MODEL,
        "max_tokens": 32_000,
        "stream": True,
        "system": [
            {"type": "text", "text": attribution},
            {"type": "text", "text": "You are an agent."},
            {"type": "text", "text": FILLER * 20, "cache_control": kept},
        ],
        "tools": [{**tool, "eager_input_streaming": True} for tool in TOOLS],
        "metadata": {"user_id": "user_1_account__session_2"},
        "messages": history,
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "temperature": 1,
    }  # fmt: skip


def test_a_coding_agent_is_taken_as_it_comes(scripted: Served) -> None:
    headers = {"anthropic-beta": "claude-code-20250219,context-management-2025-06-27", "x_agent_id": "agent"}
    reports = []
    for call in (1, 2):
        body = {**agents_body(call)}
        answer = scripted.send("POST", "/v1/messages?beta=true", body, **headers)
        assert answer.status == 200, answer.body
        reports.append(events_of(answer.body)[-2][1]["rekindle"])
    assert reports[1]["source"] == "own"
    first = reports[0]["prompt_tokens"]
    assert reports[1]["reused_tokens"] >= first - 8, "the line that changes on every call costs nothing"


MARKED = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, anthropic.BadRequestError, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [MARKED] * 5}]}, anthropic.BadRequestError, "at most 4"),
        ({"system": [{"type": "text"}]}, anthropic.BadRequestError, "system[0].text"),
        ({"max_tokens": None}, anthropic.BadRequestError, "max_tokens"),
        ({"max_tokens": -1}, anthropic.BadRequestError, "max_tokens"),
        ({"temperature": -1}, anthropic.BadRequestError, "temperature"),
        ({"stop_sequences": [""]}, anthropic.BadRequestError, "stop_sequences"),
        ({"tools": [{"type": "custom", "name": "web_search"}]}, anthropic.BadRequestError, "tools[0]"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "fly"}}, anthropic.BadRequestError, "fly"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice"),
        ({"output_format": {"type": "json_schema"}}, anthropic.BadRequestError, "output_format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, anthropic.BadRequestError, "output_config.format"),
        ({"model": "gpt-9"}, anthropic.NotFoundError, "gpt-9"),
    ],
)
def test_errors_are_the_clients_exceptions(
    scripted: Served, wrong: dict[str, Any], kind: type[anthropic.APIStatusError], says: str, stream: bool
) -> None:
    given = {"model": MODEL, "max_tokens": 9, "messages": say("talk")}
    with pytest.raises(kind) as caught:
        client(scripted).messages.create(**given, stream=stream, extra_body=wrong)
    assert says in str(caught.value)
    AnthropicErrorReply.model_validate(caught.value.body)
    assert (
        caught.value.body["error"]["type"]
        == {400: "invalid_request_error", 404: "not_found_error"}[caught.value.status_code]
    )


def test_an_error_behind_the_head_comes_as_an_event(tmp_path: Any) -> None:
    flags = {"store": tmp_path, "threads": 1, "request_timeout_s": 1.0, "ping_s": 0.02, "max_chunk_tokens": 16}
    flags["kernels"] = "torch"  # the prompt shall take longer than that
    long = [{"role": "user", "content": LONG * 2}]  # for the bundled model, whose context is long enough
    with serving(**flags) as served, pytest.raises(anthropic.APIStatusError, match=r"not finished within") as caught:
        ask(served, long, stream=True, max_tokens=200)
    assert caught.value.status_code == 200
    AnthropicErrorReply.model_validate(caught.value.body)


def test_pings_come_while_a_long_prompt_is_computed(scripted: Served, tmp_path: Any) -> None:
    model = scripted.engine.settings.model.model
    flags = {"model": model, "store": tmp_path, "threads": 1, "hot_bytes": "64MiB"}
    body = {"messages": say("talk", length=70), "stream": True, "temperature": 0}
    with serving(**flags, ping_s=0.01, max_chunk_tokens=16) as served:
        told = events_of(post(served, body).body)
    names = [name for name, _ in told]
    start, first = names.index("message_start"), names.index("content_block_start")
    assert names.count("message_start") == 1
    assert names[start:first].count("ping") > 1, "pings follow the start, which does not wait for the prompt"
    usage = told[start][1]["message"]["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] > 1_000, "what it costs is known from the start"
    end = told[-2][1]["usage"]
    assert usage == {name: end[name] for name in usage} | {"output_tokens": 0}


def test_a_prompt_can_be_counted_before_it_is_sent(scripted: Served) -> None:
    more: dict[str, Any] = {"system": "Be brief.", "tools": TOOLS, "tool_choice": {"type": "auto"}}
    counted = client(scripted).messages.count_tokens(model=MODEL, messages=say("look"), **more)
    assert counted.input_tokens == prompt_tokens(ask(scripted, say("look"), **more).usage)
    begun = [*say("talk"), {"role": "assistant", "content": BEGUN}]
    counted = client(scripted).messages.count_tokens(model=MODEL, messages=begun)
    assert counted.input_tokens == prompt_tokens(ask(scripted, begun).usage)
    forced = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "look"}}
    counted = client(scripted).messages.count_tokens(model=MODEL, messages=say("talk"), **forced)
    assert counted.input_tokens == prompt_tokens(ask(scripted, say("talk"), **forced).usage)
    with pytest.raises(anthropic.NotFoundError):
        client(scripted).messages.count_tokens(model="gpt-9", messages=say("look"))
    with pytest.raises(anthropic.BadRequestError) as caught:
        client(scripted).messages.count_tokens(model=MODEL, messages=[{"role": "tool", "content": "x"}])
    assert "messages[0].role" in str(caught.value)


def test_marked_prefixes_are_created_once_and_read_then(scripted: Served) -> None:
    agent, tools = "ed", [*TOOLS[:2], {**TOOLS[2], "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    system = [{"type": "text", "text": f"Be brief. {FILLER * 3}", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    last = [{"type": "text", "text": f"talk. {FILLER * 20}", "cache_control": {"type": "ephemeral"}}]
    said = [{"role": "user", "content": last}]
    first = ask(scripted, said, agent, system=system, tools=tools)
    assert prompt_tokens(first.usage) == report_of(first)["prompt_tokens"]
    assert first.usage.cache_creation_input_tokens > 0
    assert first.usage.cache_creation.ephemeral_1h_input_tokens > 0
    assert first.usage.cache_creation.ephemeral_5m_input_tokens > 0
    again = ask(scripted, said, agent, system=system, tools=tools)
    assert again.usage.cache_creation_input_tokens == 0
    assert again.usage.cache_read_input_tokens == prompt_tokens(first.usage) - 1
    assert again.usage.input_tokens == 1
    off = ask(scripted, said, agent, system=system, tools=tools, rekindle={"reuse": "off"})
    assert (off.usage.cache_read_input_tokens, off.usage.cache_creation_input_tokens) == (0, 0), "nothing is kept"
    assert prompt_tokens(off.usage) == prompt_tokens(first.usage)


def test_a_prompt_without_marks_creates_nothing(scripted: Served) -> None:
    usage = ask(scripted, say("talk", length=7), "flo", rekindle={"reuse": "off"}).usage
    assert (usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (0, 0)
    assert usage.input_tokens > 0
    counted = client(scripted).messages.count_tokens(model=MODEL, messages=say("talk", length=7))
    assert usage.input_tokens == counted.input_tokens


def test_a_warm_up_computes_the_prompt_and_says_nothing(scripted: Served) -> None:
    said = [{"role": "user", "content": f"talk of {'a cold night. ' * 40}"}]
    warm = ask(scripted, said, "gus", max_tokens=0, cache_control={"type": "ephemeral"})
    assert (warm.content, warm.stop_reason, warm.usage.output_tokens) == ([], "max_tokens", 0)
    assert warm.usage.cache_creation_input_tokens > 0
    after = ask(scripted, said, "gus")
    assert text_of(after) == TALK
    assert after.usage.cache_read_input_tokens >= prompt_tokens(after.usage) - 2
    for wrong in (
        {"stream": True},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"tools": TOOLS, "tool_choice": {"type": "any"}},
    ):
        answer = post(scripted, {"max_tokens": 0, **wrong})
        assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")


def test_models_are_told_as_the_client_reads_them(scripted: Served) -> None:
    (model,) = list(client(scripted).models.list())
    assert (model.id, model.type) == (scripted.engine.spec.name, "model")
    assert client(scripted).models.retrieve(model.id).id == model.id
    with pytest.raises(anthropic.NotFoundError) as caught:
        client(scripted).models.retrieve("gpt-9")
    AnthropicErrorReply.model_validate(caught.value.body)


def test_keys_are_asked_for_in_this_dialect(scripted: Served) -> None:
    settings = Settings.load({"api_key": "secret", "model": scripted.engine.settings.model.model}).server
    with conftest.serving(scripted.engine, settings) as guarded:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            client(guarded).messages.create(model=MODEL, max_tokens=9, messages=say("talk"))
        AnthropicErrorReply.model_validate(caught.value.body)
        known = anthropic.Anthropic(base_url=guarded.url, api_key="secret", max_retries=0)
        assert known.messages.create(model=MODEL, max_tokens=9, messages=say("talk")).content
        token = anthropic.Anthropic(base_url=guarded.url, api_key=None, auth_token="secret", max_retries=0)
        assert token.messages.count_tokens(model=MODEL, messages=say("talk")).input_tokens
