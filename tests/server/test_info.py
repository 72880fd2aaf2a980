"""What the server says of itself, and text as tokens."""

from __future__ import annotations

import os
from pathlib import Path

import anthropic
import pytest

import rekindle
from rekindle.config import ServerSettings
from tests.server.conftest import Served, serving

SAID = [{"role": "user", "content": "Where is the copper key?"}]


def test_version_and_health(served: Served) -> None:
    assert served.send("GET", "/version").json == {"version": rekindle.__version__}
    assert served.send("GET", "/health/live").json == {"status": "ok"}
    ready = served.send("GET", "/health/ready").json
    assert (ready["status"], ready["problems"]) == ("ok", [])


def test_a_recording_that_fails_is_told_to_those_with_a_key(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "there" / "day.jsonl"
    with serving(served.engine, ServerSettings(record=path, api_key="k")) as running:
        path.unlink()
        path.parent.rmdir()
        path.parent.write_text("in the way")
        assert running.chat("Hello!", key="k").status == 200
        assert running.app.recorder is not None
        while running.app.recorder.num_pending:
            pass
        ready = running.send("GET", "/health/ready", key="k")
        assert (ready.status, ready.json["status"]) == (200, "degraded")
        assert "recording" in ready.json["problems"][0]
        without = running.send("GET", "/health/ready").json
        assert without == {"status": "degraded", "problems": []}
        assert running.chat("Hello again!", key="k").status == 200


def test_how_many_requests_there_are_is_for_those_with_a_key(served: Served) -> None:
    with serving(served.engine, ServerSettings(api_keys={"left": "k"})) as running:
        assert running.send("GET", "/health/ready").json == {"status": "ok", "problems": []}
        assert running.send("GET", "/health/ready", key="wrong").json == {"status": "ok", "problems": []}
        ready = running.send("GET", "/health/ready", key="k").json
        assert set(ready) == {"status", "running", "waiting", "process", "problems"} and ready["process"] == os.getpid()
    assert set(served.send("GET", "/health/ready").json) == {"status", "running", "waiting", "process", "problems"}


def test_tokens_of_messages_are_those_the_model_sees(served: Served) -> None:
    reply = served.send(
        "POST",
        "/v1/chat/completions",
        {"messages": SAID, "max_tokens": 1, "rekindle": {"return_ids": True, "reuse": "off"}},
    ).json
    tokens = served.send("POST", "/v1/tokenize", {"messages": SAID}).json
    assert tokens["ids"] == reply["rekindle"]["prompt_ids"]
    assert tokens["count"] == len(tokens["ids"]) == reply["usage"]["prompt_tokens"]
    assert tokens["max_model_len"] == served.engine.max_context
    text = served.send("POST", "/v1/tokenize", {"text": "copper key"}).json
    assert 0 < text["count"] < tokens["count"]
    assert served.send("POST", "/v1/tokenize", {"text": ""}).status == 200


def test_what_would_not_be_computed_is_not_counted(served: Served) -> None:
    """The line that a client changes on every call is left out of prompts, and so of their tokens."""
    line = "x-anthropic-billing-header: cc_version=2.1.0; cch=00000;"
    counts = []
    for head in ("", f"{line}\n", f"{line.replace('00000', '1f2e3')}\n"):
        messages = [{"role": "system", "content": f"{head}You keep the keys."}, *SAID]
        ids = served.send("POST", "/v1/tokenize", {"messages": messages}).json["ids"]
        body = {"messages": messages, "max_tokens": 1, "rekindle": {"return_ids": True, "reuse": "off"}}
        assert ids == served.send("POST", "/v1/chat/completions", body).json["rekindle"]["prompt_ids"]
        counts.append(len(ids))
    assert len(set(counts)) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"messages": SAID, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"text": "a", "messages": SAID}, "text"),
        ({"text": 3}, "text"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "oracle", "content": "x"}]}, None),
        ({"text": "a", "model": "gpt-9"}, "model"),
        ([], None),
        (b"{", None),
        (b"", None),
        (b'{"text": "\xff"}', None),
    ],
)
def test_what_cannot_be_tokenised_is_a_clear_400(served: Served, body: object, param: str | None) -> None:
    answer = served.send("POST", "/v1/tokenize", body)
    assert answer.status in (400, 404), answer.body
    assert answer.error["message"]
    assert param is None or answer.error["param"] == param


def test_models_have_anthropics_shape_for_its_clients(served: Served) -> None:
    client = anthropic.Anthropic(base_url=served.url, api_key="unused", max_retries=0)
    (entry,) = client.models.list()
    assert (entry.type, entry.id, entry.max_input_tokens) == ("model", "pocket", served.engine.max_context)
    assert entry.created_at.year >= 2025
    for name in ("default", "pocket", "claude-sonnet-4-5"):
        assert client.models.retrieve(name).id == "pocket"
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("gpt-9")
    assert served.send("GET", "/v1/models/claude-sonnet-4-5").status == 404, "OpenAI's clients name it by its name"
    assert served.client().models.list().data[0].id == "pocket"
