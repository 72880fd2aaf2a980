"""/api/chat and /api/generate through the official client and a real socket; a scripted model says what it should."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from typing import Any

import ollama
import pytest

from rekindle.server.ollama.models import OllamaChatAnswer, OllamaGenerateAnswer
from tests.server.conftest import Answer, Served
from tests.server.logged import listening, text
from tests.server.scripted import FORCED, LOOK, SCRIPTS, serving, write_scripted_model
from tests.text.test_omissions import NOT_SHOWN, PNG

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": {"type": "object"}}}
    for name in ("look", "add", "sub")
]
TALK = "".join(SCRIPTS["talk"])
FILLER = "There is a long letter on the table. " * 12
Talk = list[dict[str, Any]]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("ollama")
    model = write_scripted_model(directory / "model")
    with serving(model=model, store=directory / "store", threads=1, hot_bytes="64MiB") as served:
        yield served


def client(served: Served, agent: str) -> ollama.Client:
    return ollama.Client(host=served.url, headers={"X-Agent-ID": agent})


def say(words: str) -> Talk:
    return [{"role": "user", "content": f"{words} {FILLER}"}]


def ask(served: Served, said: Talk, agent: str, *, stream: bool = False, **more: Any) -> ollama.ChatResponse:
    """The whole reply, asked for at once or put together out of its lines."""
    given: dict[str, Any] = {"model": "default", "messages": said, **more}
    if not stream:
        return client(served, agent).chat(**given)
    pieces = list(client(served, agent).chat(**given, stream=True))
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    last = pieces[-1]
    last.message.content = "".join(piece.message.content or "" for piece in pieces)
    last.message.thinking = "".join(piece.message.thinking or "" for piece in pieces) or None
    last.message.tool_calls = [call for piece in pieces for call in piece.message.tool_calls or ()] or None
    return last


def chat(served: Served, body: dict[str, Any], **headers: str) -> Answer:
    return served.send("POST", "/api/chat", {"model": "default", "messages": say("talk"), **body}, **headers)


def lines_of(answer: Answer) -> list[Any]:
    assert (answer.status, answer.headers["content-type"]) == (200, "application/x-ndjson"), answer.body
    assert answer.body.endswith(b"\n")
    return [json.loads(line) for line in answer.body.splitlines()]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_where_it_was(scripted: Served, stream: bool) -> None:
    said, agent = [{"role": "system", "content": "Be brief."}, *say("talk")], f"ada-{stream}"
    first = ask(scripted, said, agent, stream=stream)
    assert (first.message.content, first.done_reason, first.model) == (TALK, "stop", "default")
    assert first.eval_count == len(SCRIPTS["talk"])
    turn = [*said, first.message.model_dump(exclude_none=True), {"role": "user", "content": "smile now"}]
    second = ask(scripted, turn, agent, stream=stream)
    assert second.message.content == "".join(SCRIPTS["smile"])
    report = chat(scripted, {"messages": turn, "stream": False}, x_agent_id=agent).json["rekindle"]
    assert (report["outcome"], report["source"]) == ("exact", "own")
    assert second.prompt_eval_count == report["prompt_tokens"] > (first.prompt_eval_count or 0), "reused ones count"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_taken_back(scripted: Served, stream: bool) -> None:
    said, agent = say("look"), f"bo-{stream}"
    first = ask(scripted, said, agent, stream=stream, tools=TOOLS)
    (call,) = first.message.tool_calls or ()
    assert (first.message.content, call.function.name) == ("Let me look.", "look")
    assert (call.function.arguments, first.done_reason) == (json.loads(LOOK), "stop")
    result = {"role": "tool", "tool_name": "look", "content": "talk now"}
    second = ask(scripted, [*said, first.message.model_dump(exclude_none=True), result], agent, tools=TOOLS)
    assert second.message.content == TALK


def test_every_call_has_a_line_of_its_own_and_a_whole_object(scripted: Served) -> None:
    lines = lines_of(chat(scripted, {"messages": say("twice"), "tools": TOOLS}))
    called = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert [(each["function"]["name"], each["function"]["arguments"]) for each in called] == [
        ("add", {"a": 1, "b": 2}),
        ("sub", {"c": 3}),
    ]
    assert [each["function"]["index"] for each in called] == [0, 1] and len({each["id"] for each in called}) == 2


def test_a_call_that_is_cut_off_is_text_that_nobody_runs(scripted: Served) -> None:
    body = {"messages": say("cut"), "tools": TOOLS, "options": {"num_predict": 3}}
    lines = lines_of(chat(scripted, body))
    whole = chat(scripted, {**body, "stream": False}).json
    assert whole["message"] == {"role": "assistant", "content": "".join(SCRIPTS["cut"][:3])}
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"]
    assert [each["done_reason"] for each in (lines[-1], whole)] == ["length"] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_apart_and_can_be_switched_off(scripted: Served, stream: bool) -> None:
    for think in (None, True, "high"):
        reply = ask(scripted, say("muse"), "cy", stream=stream, think=think).message
        assert (reply.thinking, reply.content) == ("Lamps weigh little.", "A feather weighs less.")
    assert ask(scripted, say("muse"), "cy", stream=stream, think=False).message.content == TALK
    turn = [*say("muse"), reply.model_dump(exclude_none=True), {"role": "user", "content": "talk"}]
    assert ask(scripted, turn, "cy").message.content == TALK
    raw = scripted.send("POST", "/api/generate", {"prompt": "muse", "stream": False}).json
    assert (raw["thinking"], raw["response"]) == ("Lamps weigh little.", "A feather weighs less.")


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_answers_and_lines_are_as_described(scripted: Served, path: str) -> None:
    kind = OllamaChatAnswer if path == "/api/chat" else OllamaGenerateAnswer
    body = {"messages": say("muse")} if path == "/api/chat" else {"prompt": "muse"}
    for more in ({}, {"logprobs": True, "top_logprobs": 2}, {"options": {"num_predict": 1}}):
        lines = lines_of(scripted.send("POST", path, {**body, **more}))
        for line in (*lines, scripted.send("POST", path, {**body, **more, "stream": False}).json):
            kind.model_validate(line)
            assert datetime.fromisoformat(line["created_at"]).tzinfo is not None
        durations = [lines[-1][f"{name}_duration"] for name in ("total", "load", "prompt_eval", "eval")]
        assert all(isinstance(each, int) for each in durations) and durations[0] >= durations[3] > 0
        assert all("total_duration" not in line for line in lines[:-1])


def test_log_probabilities_come_once_and_for_every_token(scripted: Served) -> None:
    body = {"messages": say("muse"), "logprobs": True, "top_logprobs": 2, "options": {"temperature": 0}}
    whole = chat(scripted, {**body, "stream": False}).json["logprobs"]
    streamed = [token for line in lines_of(chat(scripted, body)) for token in line.get("logprobs", ())]
    assert [token["token"] for token in whole] == [token["token"] for token in streamed] == SCRIPTS["muse"]
    assert all(len(token["top_logprobs"]) == 2 for token in whole)
    parsed = client(scripted, "di").chat(model="default", messages=say("talk"), logprobs=True)
    assert [token.token for token in parsed.logprobs or ()] == SCRIPTS["talk"]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "load"),
        ({"keep_alive": "5m"}, "load"),
        ({"keep_alive": -1}, "load"),
        ({"keep_alive": 0}, "unload"),
        ({"keep_alive": "0s"}, "unload"),
    ],
)
def test_a_request_without_words_loads_or_unloads_and_nothing_happens(
    scripted: Served, path: str, given: dict[str, Any], reason: str
) -> None:
    empty = {"messages": []} if path == "/api/chat" else {"prompt": ""}
    for body in (given, {**empty, **given}):
        answer = scripted.send("POST", path, {"model": "default:latest", **body})
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        found = answer.json
        assert (found["done"], found["done_reason"], found["model"]) == (True, reason, "default:latest")
        assert found.get("response", found.get("message", {}).get("content")) == ""
    assert ask(scripted, say("talk"), "ed").message.content == TALK


def test_a_prompt_has_its_system_message_or_is_the_models_input(scripted: Served) -> None:
    ours = client(scripted, "fay")
    told = ours.generate(model="default", prompt="talk", system=FILLER)
    assert (told.response, told.done_reason) == (TALK, "stop")
    same = [{"role": "system", "content": FILLER}, {"role": "user", "content": "talk"}]
    assert ask(scripted, same, "fay").prompt_eval_count == told.prompt_eval_count
    raw = ours.generate(model="default", prompt="<|im_start|><|muse|>", raw=True)
    assert raw.response == "".join(SCRIPTS["muse"]), "nothing is read out of it"
    assert raw.thinking is None and raw.prompt_eval_count == 2
    streamed = ours.generate(model="default", prompt="<|im_start|><|talk|>", raw=True, stream=True)
    assert "".join(piece.response or "" for piece in streamed) == TALK


def test_a_last_message_of_the_assistant_is_the_beginning_of_the_reply(scripted: Served) -> None:
    begin = '<tool_call>\n{"name": "'  # the model goes on from here
    begun = [*say("talk"), {"role": "assistant", "content": begin}]
    assert ask(scripted, begun, "gus").message.content == "".join(FORCED[begin])
    assert ask(scripted, [*begun, *say("talk")], "gus").message.content == TALK, "not the last one"


def test_pictures_become_lines_of_text(scripted: Served) -> None:
    shown = [{"role": "user", "content": "talk of it", "images": [base64.b64decode(PNG)]}]
    line = f"[image, 64 x 48{NOT_SHOWN}"
    ours = client(scripted, "hal")
    assert ours.chat(model="default", messages=shown).message.content is not None
    body = {"messages": [{**shown[0], "images": [PNG]}], "stream": False}
    seen = chat(scripted, body, x_agent_id="hal").json["rekindle"]
    assert [(each["kind"], each["param"], each["text"]) for each in seen["left_out"]] == [
        ("image", "messages[0].images[0]", line)
    ]
    plain = {"messages": [{"role": "user", "content": f"{line}\ntalk of it"}], "stream": False}
    assert chat(scripted, plain, x_agent_id="hal").json["rekindle"]["outcome"] == "exact"
    asked = {"prompt": "talk of it", "images": [PNG], "stream": False}
    asked_for = scripted.send("POST", "/api/generate", asked, x_agent_id="hal").json["rekindle"]
    assert (asked_for["outcome"], asked_for["left_out"][0]["param"]) == ("exact", "images[0]")
    raw = scripted.send("POST", "/api/generate", {**asked, "prompt": "<|im_start|><|talk|>", "raw": True}).json
    assert (raw["response"], raw["rekindle"]["left_out"][0]["text"], raw["prompt_eval_count"]) == (TALK, "", 2)


def test_a_line_of_the_log_says_what_was_ignored(scripted: Served) -> None:
    body = {"options": {"num_ctx": 1 << 20, "mirostat": 1}, "colour": "red"}
    with listening() as heard:
        chat(scripted, body, x_agent_id="ida", x_request_id="mine")
        (record,) = heard.until(scripted, "mine")
    assert "POST /api/chat 200" in text(record) and "agent=ida" in text(record)
    assert "ignored: colour options.mirostat options.num_ctx" in text(record)


def test_a_model_is_known_by_its_names_with_a_tag_or_without(scripted: Served) -> None:
    for name in ("model", "model:latest", "default", "default:latest"):
        assert chat(scripted, {"model": name, "options": {"num_predict": 1}}).status == 200
        assert scripted.chat("talk", model=name).status == 200, "clients name to one API what another listed"
    for path in ("/api/chat", "/api/generate"):
        with pytest.raises(ollama.ResponseError) as caught:
            for name in ("llama3.2", "model:7b"):
                ollama.Client(host=scripted.url).generate(model=name, prompt="talk")
        assert caught.value.status_code == 404
        assert caught.value.error.startswith('model "llama3.2" not found, try pulling it first')
        assert set(scripted.send("POST", path, {"model": "x", "messages": say("talk")}).json) == {"error"}


def test_a_client_that_leaves_ends_its_reply(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me of the attic."}], "rekindle": {"reuse": "off"}}
    with listening() as heard:
        with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)) as connection:
            connection.request("POST", "/api/chat", json.dumps(body), {"X-Request-ID": "left"})
            connection.getresponse().readline()
        (record,) = heard.until(served, "left")
    assert "the client left" in text(record)
    served.until_idle()
