"""What the server says of itself, and text as tokens."""

from __future__ import annotations

from pathlib import Path

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
        assert (without["status"], without["problems"]) == ("degraded", [])
        assert running.chat("Hello again!", key="k").status == 200


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


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "messages": SAID}, "text"),
        ({"text": 3}, "text"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "oracle", "content": "x"}]}, None),
        ({"text": "a", "best_of": 2}, "best_of"),
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
