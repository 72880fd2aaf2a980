"""The server over a real socket, with the official client and with raw bytes."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import openai
import pytest

from rekindle.config import ServerSettings
from rekindle.harness.client import Client
from rekindle_pocket import conversations
from tests.server.conftest import Served, serving
from tests.server.logged import listening, text

FACT = "Remember that the copper key is in the attic."
QUESTION = "Where is the copper key?"
Messages = list[dict[str, str]]


def messages(*texts: str) -> Messages:
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]


def ask(client: openai.OpenAI, said: Messages, **parameters: Any) -> Any:
    given = {"temperature": 0, "max_tokens": 12, **parameters}
    return client.chat.completions.create(model="default", messages=said, **given)


def handbook(seed: int, sentences: int) -> str:
    return conversations.story(random.Random(seed), sentences)


def raw(served: Served, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request(method, path, body=body, headers=headers)
    response = connection.getresponse()
    answer = response.status, json.loads(response.read() or b"null")
    connection.close()
    return answer


@pytest.fixture
def fresh(served: Served) -> Iterator[Served]:
    """A namespace in which nobody has said a word."""
    with serving(served.engine, ServerSettings(api_keys={"fresh": "unused"})) as running:
        yield running


def test_a_second_turn_pays_for_its_new_words_only(fresh: Served) -> None:
    client = fresh.client("ada")
    first = ask(client, messages(FACT))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert first.model_extra["rekindle"]["outcome"] == "miss"
    raw_answer = client.chat.completions.with_raw_response.create(
        model="default",
        messages=messages(FACT, first.choices[0].message.content, QUESTION),
        temperature=0,
        max_tokens=12,
    )
    second = raw_answer.parse()
    report = second.model_extra["rekindle"]
    assert report["outcome"] in ("extend", "diverge")
    assert report["source"] == "own"
    assert report["reused_tokens"] == second.usage.prompt_tokens_details.cached_tokens > 0
    assert report["prompt_tokens"] == second.usage.prompt_tokens == report["reused_tokens"] + report["computed_tokens"]
    assert raw_answer.headers["x-rekindle-outcome"] == report["outcome"]
    assert raw_answer.headers["x-rekindle-reused"] == str(report["reused_tokens"])
    assert raw_answer.headers["x-rekindle-source"] == "own"


def test_the_same_prompt_again_is_exact(served: Served) -> None:
    client = served.client("exa")
    said = messages(handbook(1, 20), "Noted.", QUESTION)
    first, second = ask(client, said), ask(client, said)
    assert second.model_extra["rekindle"]["outcome"] == "exact"
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens - 1
    assert second.choices[0].message.content == first.choices[0].message.content


def test_a_stream_says_what_the_whole_says(served: Served) -> None:
    client = served.client("stella")
    whole = ask(client, messages(FACT))
    chunks = list(ask(client, messages(FACT), stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    *_, last, usage = chunks
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.model_extra["rekindle"]["outcome"] == "exact"
    assert usage.usage.prompt_tokens_details.cached_tokens > 0
    assert usage.usage.completion_tokens == whole.usage.completion_tokens


def test_parallel_agents_with_different_states(served: Served) -> None:
    """One cold, one extending, one asking again: each answer is the one it gets alone with reuse off."""
    system = [{"role": "system", "content": handbook(2, 40)}]
    turns = {
        "cold": [*system, *messages(handbook(3, 10))],
        "extending": [*system, *messages(FACT, "Noted.", QUESTION)],
        "again": [*system, *messages(FACT)],
    }
    ask(served.client("extending"), turns["again"])
    ask(served.client("again"), turns["again"])
    replies: dict[str, Any] = {}

    def work(agent: str) -> None:
        replies[agent] = ask(served.client(agent), turns[agent], extra_body={"rekindle": {"return_ids": True}})

    threads = [threading.Thread(target=work, args=(agent,)) for agent in turns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for agent, reply in replies.items():
        ids = reply.model_extra["rekindle"]["prompt_ids"]
        off = {"reuse": "off", "prompt_ids": ids, "return_ids": True}
        alone = ask(served.client(), turns[agent], extra_body={"rekindle": off})
        assert alone.model_extra["rekindle"]["reused_tokens"] == 0
        assert alone.model_extra["rekindle"]["completion_ids"] == reply.model_extra["rekindle"]["completion_ids"], agent
    assert replies["again"].model_extra["rekindle"]["outcome"] == "exact"
    assert all(reply.model_extra["rekindle"]["reused_tokens"] > 0 for reply in replies.values())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_in_mid_prefill_is_cancelled(served: Served, stream: bool) -> None:
    agent = f"gone-{stream}"
    said = messages(handbook(4 + stream, 300))
    body = json.dumps({"messages": said, "stream": stream, "temperature": 0}).encode()
    block_tokens = served.engine.spec.layout.block_tokens
    wanted = served.engine.stats().num_steps + 2 * block_tokens // 16 + 1  # a step has 16 tokens at most
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Agent-ID: {agent}\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while served.engine.stats().num_steps < wanted:
            time.sleep(0.001)
    served.until_idle()
    whole = ask(served.client(agent), said, max_tokens=1)
    report = whole.model_extra["rekindle"]
    assert report["prompt_tokens"] > 2_000
    assert block_tokens < report["reused_tokens"] < 0.9 * report["prompt_tokens"]
    served.engine.check()


def test_agents_are_listed_shown_offloaded_and_deleted(served: Served) -> None:
    name = "équipe/ada b"
    path = "/v1/agents/%C3%A9quipe%2Fada%20b"
    ask(served.client("%C3%A9quipe%2Fada%20b"), messages(handbook(6, 20)))
    served.engine.flush()
    status, listed = raw(served, "GET", "/v1/agents")
    assert status == 200
    assert name in [agent["id"] for agent in listed["data"]]
    status, shown = raw(served, "GET", path)
    assert (status, shown["id"]) == (200, name)
    assert shown["saved_tokens"] == shown["num_tokens"] > 0
    assert shown["hot_tokens"] > 0
    status, offloaded = raw(served, "POST", f"{path}/offload")
    assert status == 200
    assert offloaded["hot_tokens"] < shown["hot_tokens"]
    assert offloaded["warm_tokens"] > 0
    again = ask(served.client("%C3%A9quipe%2Fada%20b"), messages(handbook(6, 20)))
    assert again.model_extra["rekindle"]["warm_tokens"] > 0
    assert raw(served, "DELETE", path) == (200, {"id": name, "object": "agent", "deleted": True})
    for method in ("GET", "DELETE"):
        assert raw(served, method, path)[0] == 404
    assert raw(served, "POST", f"{path}/offload")[0] == 404


def test_models(served: Served) -> None:
    (model,) = served.client().models.list().data
    for written in (model.id, model.id.upper(), model.id.title()):
        assert served.client().models.retrieve(written).id == model.id
        assert ask(served.client(), messages("Hello!"), extra_body={"model": written}).model == model.id
    with pytest.raises(openai.NotFoundError, match="not served here"):
        ask(served.client(), messages("Hello!"), extra_body={"model": "gpt-9"})


def test_errors_keep_their_shape(served: Served) -> None:
    client = served.client()
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages("Hello!"), extra_body={"best_of": 2})
    assert caught.value.param == "best_of"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages(handbook(7, 600)))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="messages"):
        ask(client, [{"role": "oracle", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="x-agent-id"):
        ask(served.client("%00"), messages("Hello!"))
    chat = "/v1/chat/completions"
    assert raw(served, "POST", chat, b"{")[0] == 400
    assert raw(served, "GET", "/v1/agents/nobody")[0] == 404
    assert raw(served, "GET", "/nowhere")[1]["error"]["type"] == "invalid_request_error"
    assert raw(served, "GET", chat)[0] == 405
    assert raw(served, "GET", "/v1/models", Host="evil.example")[0] == 403
    assert raw(served, "GET", "/v1/models", Origin="https://evil.example")[0] == 403
    assert raw(served, "POST", chat, b" " * (33 << 20))[0] == 413


def test_failures_are_logged_with_their_agent(served: Served) -> None:
    client, own_ids = served.client("bo"), count()
    with listening() as heard:

        def line(said: Messages, **parameters: Any) -> str:
            """The one line of such a request, whether it is answered or refused."""
            own_id = f"failure-{next(own_ids)}"
            with contextlib.suppress(openai.APIStatusError):
                ask(client, said, extra_headers={"X-Request-ID": own_id}, **parameters)
            (record,) = heard.until(served, own_id)
            return text(record)

        found = line(messages("Hello!"), extra_body={"best_of": 3})
        assert " agent=bo " in found
        assert found.endswith(": failed with 400, best_of: 3 is not supported; leave it out")
        found = line(messages("Hello!"), extra_body={"model": "gpt-9"})
        assert "agent=bo " in found and ": failed with 404, model 'gpt-9'" in found
        for stream in (False, True):
            found = line(messages(handbook(7, 600)), stream=stream)
            assert re.search(r" agent=bo .*: failed with 400, ", found)
        assert re.search(r" agent=bo .*: \w+, reused \d+ of ", line(messages("Hello!")))


def test_a_stream_that_cannot_start_is_a_plain_error(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(served.client(), messages(handbook(7, 600)), stream=True)
    assert caught.value.code == "context_length_exceeded"


def test_stop_strings_and_limits(served: Served) -> None:
    whole = ask(served.client(), messages(FACT), max_tokens=20)
    text = whole.choices[0].message.content
    assert whole.usage.completion_tokens <= 20
    stop = text.split()[1]
    cut = ask(served.client(), messages(FACT), max_tokens=20, stop=[stop])
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_health_and_the_demo_client(served: Served) -> None:
    assert raw(served, "GET", "/health/live")[0] == raw(served, "GET", "/health/ready")[0] == 200
    reply = Client(served.port).chat(messages(FACT), agent="demo", max_tokens=8)
    assert reply.prompt_ids
    assert len(reply.completion_ids) <= 8
    assert reply.report["prompt_tokens"] == len(reply.prompt_ids)
