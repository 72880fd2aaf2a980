"""Prompts that cannot fit, however long: refused in each dialect's words before anything is made of them."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.engine.intake.fairness import FairWorkers
from rekindle.engine.intake.long_prompts import LONG_CHARS, LongPrompts
from rekindle.engine.types import GenerationRequest
from rekindle.errors import PromptTooLong
from rekindle.text.messages import Message, ToolCall
from tests.server.conftest import Served
from tests.text.families import encoder_for

SPACES = " " * 10_500_000  # more than a tokenizer's regular expressions take
ONE = {"role": "user", "content": "Hi."}


def bodies(text: str) -> dict[str, Any]:
    """A body for every route that takes prompts."""
    said = [{"role": "user", "content": text}]
    return {
        "/v1/chat/completions": {"messages": said, "max_tokens": 1},
        "/v1/completions": {"prompt": text, "max_tokens": 1},
        "/v1/messages": {"messages": said, "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": said},
        "/v1/responses": {"input": text, "max_output_tokens": 1},
        "/v1/tokenize": {"text": text},
        "/v1/agents/long/prefill": {"messages": said},
        "/api/chat": {"messages": said},
        "/api/generate": {"prompt": text},
    }


@pytest.mark.parametrize("path", bodies(""))
def test_what_cannot_fit_is_a_400_and_everybody_else_is_answered(served: Served, path: str) -> None:
    answer = served.send("POST", path, bodies(SPACES)[path])
    assert answer.status == 400, answer.body[:300]
    if path.startswith(("/v1/messages", "/api/")):
        error = answer.json["error"]
        assert (error if isinstance(error, str) else error["message"]).startswith("prompt is too long")
    else:
        assert answer.error["code"] == "context_length_exceeded"
        assert answer.error["param"] in ("messages", "prompt", "input", "text")
    assert served.chat("Hello?").status == 200


LONG = "x" * (LONG_CHARS + 1)


@pytest.mark.parametrize(
    "message",
    [
        Message("user", LONG),
        Message("user", "Hi.", name=LONG),
        Message("tool", "Hi.", tool_call_id=LONG),
        Message("assistant", "Hi.", reasoning=LONG),
        Message("assistant", "Hi.", tool_calls=(ToolCall(LONG, "f", "{}"),)),
    ],
    ids=["content", "name", "id of a result", "reasoning", "id of a call"],
)
def test_a_long_text_makes_a_prompt_long_wherever_it_is(message: Message) -> None:
    assert LongPrompts(FairWorkers("none")).takes(GenerationRequest(messages=(message,)))
    with pytest.raises(PromptTooLong):
        encoder_for("hermes").bounded(1).render_chat([Message("user", "Hi."), *[message] * 8])


def test_variables_of_the_template_count_as_well() -> None:
    said, prompts = (Message("user", "Hi."),), LongPrompts(FairWorkers("none"))
    assert not prompts.takes(GenerationRequest(messages=said, template_kwargs={"a": ["x"]}))
    assert prompts.takes(GenerationRequest(messages=said, template_kwargs={"a": ["x" * LONG_CHARS]}))
    with pytest.raises(PromptTooLong):
        encoder_for("hermes").bounded(1).render_chat(said, a=["x" * LONG_CHARS] * 8)


def test_completions_look_at_each_of_their_prompts(served: Served) -> None:
    prompts = ["Hello", SPACES, "Bye"]
    answer = served.send("POST", "/v1/completions", {"prompt": prompts, "max_tokens": 1})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    ids = {"prompt": [5] * 900_000, "max_tokens": 1}
    answer = served.send("POST", "/v1/completions", ids)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


def test_a_body_may_be_much_larger_than_the_prompt_in_it(served: Served) -> None:
    """A picture of megabytes is a line of the prompt."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (8 << 20)}}
    answer = served.send(
        "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": [picture]}], "max_tokens": 1}
    )
    assert (answer.status, answer.json["rekindle"]["left_out"][0]["kind"]) == (200, "image")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_more_messages_than_tokens_are_refused_before_each_is_looked_at(served: Served, path: str) -> None:
    most = served.engine.max_context
    for messages in ([ONE] * 30_000, [{"role": 7}] * (most + 1)):
        answer = served.send("POST", path, {"messages": messages, "max_tokens": 1})
        assert answer.status == 400 and f"{len(messages):,} messages" in answer.json["error"]["message"]
    answer = served.send("POST", path, {"messages": [{"role": 7}] * most, "max_tokens": 1})
    assert answer.status == 400 and "messages[0]" in answer.json["error"]["message"]
