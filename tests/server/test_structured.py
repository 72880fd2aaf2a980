"""Structured output through the libraries that people use: replies are valid, whatever the model would say."""

from __future__ import annotations

import json
from typing import Any, Literal

import anthropic
import ollama
import openai
import pydantic_core
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from tests.server.conftest import Served

ASK: Any = [{"role": "user", "content": "Describe the lamp in the attic."}]


class Thing(BaseModel):
    """Something in the house."""

    name: str = Field(max_length=20)
    room: Literal["attic", "cellar"]
    weights: list[Literal[3, 7, 41]] = Field(max_length=3)


class Place(BaseModel):
    """Where it is: of choices alone, as Anthropic's library moves bounds into descriptions."""

    room: Literal["attic", "cellar"]
    shelf: Literal[1, 2, 3]


SCHEMA = Thing.model_json_schema()
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


def content(served: Served, **body: Any) -> str:
    answer = served.send("POST", "/v1/chat/completions", {"messages": ASK, "max_tokens": 200, "temperature": 0, **body})
    assert answer.status == 200, answer.body
    assert answer.json["choices"][0]["finish_reason"] == "stop"
    return str(answer.json["choices"][0]["message"]["content"])


def test_openais_library_parses_chat_and_responses(served: Served) -> None:
    client = served.client()
    chat = client.chat.completions.parse(model="default", messages=ASK, response_format=Thing, max_tokens=200)
    assert isinstance(chat.choices[0].message.parsed, Thing)
    response = client.responses.parse(
        model="default", input="Describe the lamp.", text_format=Thing, max_output_tokens=200
    )
    assert isinstance(response.output_parsed, Thing)
    assert response.text is not None and response.text.format is not None and response.text.format.type == "json_schema"
    with client.chat.completions.stream(model="default", messages=ASK, response_format=Thing) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Thing)


def test_anthropics_library_parses(served: Served) -> None:
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    message = client.messages.parse(model="claude-x", max_tokens=300, messages=ASK, output_format=Place)
    assert isinstance(message.parsed_output, Place)
    body = {"model": "claude-x", "max_tokens": 200, "messages": ASK}
    wanted = {"type": "json_schema", "schema": SCHEMA}
    for given in ({"output_format": wanted}, {"output_config": {"effort": "low", "format": wanted}}):
        answer = served.send("POST", "/v1/messages", {**body, **given})
        Thing.model_validate_json(answer.json["content"][0]["text"])


def test_ollamas_library_parses(served: Served) -> None:
    client, options = ollama.Client(host=served.url), {"num_predict": 200}
    reply = client.chat(model="default", messages=ASK, format=SCHEMA, options=options)
    Thing.model_validate_json(reply.message.content or "")
    made = client.generate(model="default", prompt="Describe the lamp.", format=SCHEMA, options=options)
    Thing.model_validate_json(made.response or "")
    anything = client.chat(model="default", messages=ASK, format="json", options={"num_predict": 40})
    assert isinstance(pydantic_core.from_json(anything.message.content or "", allow_partial=True), dict)


def test_langchain_by_its_default_method(served: Served) -> None:
    given: dict[str, Any] = {"base_url": f"{served.url}/v1", "api_key": "none", "max_tokens": 200}
    model = ChatOpenAI(model="default", **given)
    assert isinstance(model.with_structured_output(Thing).invoke("Describe the lamp."), Thing)


@pytest.mark.parametrize(
    "given",
    [
        {"response_format": FORMAT},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        {"json_schema": SCHEMA},
    ],
)
def test_a_schema_by_every_name(served: Served, given: dict[str, Any]) -> None:
    Thing.model_validate_json(content(served, **given))


def test_other_formats(served: Served) -> None:
    body = {"messages": ASK, "max_tokens": 40, "response_format": {"type": "json_object"}}
    text = served.send("POST", "/v1/chat/completions", body).json["choices"][0]["message"]["content"]
    assert isinstance(pydantic_core.from_json(text, allow_partial=True), dict), text
    for given in ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}):
        assert content(served, **given) in ("yes", "no")
    assert content(served, guided_regex=r"[0-9]{4}").isdigit()
    assert content(served, grammar='root ::= "a" ("b" | "c")') in ("ab", "ac")
    answer = served.send("POST", "/v1/completions", {"prompt": "Is it?", "guided_choice": ["yes", "no"]})
    assert answer.json["choices"][0]["text"] in ("yes", "no")


def test_several_replies_a_stream_and_logprobs(served: Served) -> None:
    body = {"messages": ASK, "max_tokens": 200, "response_format": FORMAT, "n": 3, "temperature": 1, "seed": 1}
    answer = served.send("POST", "/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 2}).json
    for choice in answer["choices"]:
        Thing.model_validate_json(choice["message"]["content"])
        assert "".join(token["token"] for token in choice["logprobs"]["content"]) == choice["message"]["content"]


def test_what_is_wrong_with_a_schema_is_a_400_with_its_path(served: Served) -> None:
    wrong = {"type": "object", "properties": {"x": {"type": "array", "items": {"uniqueItems": True}}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": wrong}}
    body: dict[str, Any] = {"model": "default", "messages": ASK, "response_format": form}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            served.client().chat.completions.create(**body, stream=stream)
        assert caught.value.param == "response_format.json_schema.schema.properties.x.items"
        assert "uniqueItems" in str(caught.value)
    answer = served.send(
        "POST", "/v1/messages",
        {"max_tokens": 9, "messages": ASK, "output_config": {"format": {"type": "json_schema", "schema": wrong}}},
    )  # fmt: skip
    assert answer.status == 400 and "properties.x.items" in answer.json["error"]["message"]


LOOK = {"type": "object", "properties": {"place": {"type": "string"}}}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": LOOK}
HOT = {"temperature": 1.5, "max_tokens": 400}


def test_next_to_a_tool_a_reply_is_of_its_schema_or_a_whole_call(served: Served) -> None:
    """Also where nobody is strict about the tool: a mark of a call with nothing after it is neither."""
    kinds = set()
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": Place.model_json_schema()}}
    body = {"messages": ASK, "tools": [{"type": "function", "function": FUNCTION}], "response_format": form, **HOT}
    answers = [served.send("POST", "/v1/chat/completions", {**body, "n": 8, "seed": seed}) for seed in (1, 100)]
    choices = [choice for answer in answers for choice in answer.json["choices"]]
    for choice in (each for each in choices if each["finish_reason"] != "length"):  # which is neither, yet
        kinds.add(choice["finish_reason"])
        if choice["finish_reason"] == "tool_calls":
            for call in choice["message"]["tool_calls"]:
                assert call["function"]["name"] == "look" and isinstance(
                    json.loads(call["function"]["arguments"]), dict
                )
        else:
            Place.model_validate_json(choice["message"]["content"])
    assert kinds == {"stop", "tool_calls"}
    wanted = {"type": "json_schema", "schema": Place.model_json_schema()}
    tool = {"name": "look", "input_schema": LOOK}
    body = {"messages": ASK, "tools": [tool], "output_config": {"format": wanted}, "max_tokens": 400, "temperature": 1}
    for _ in range(6):
        answer = served.send("POST", "/v1/messages", body).json
        assert answer["stop_reason"] in ("end_turn", "tool_use", "max_tokens"), answer  # a string may go on and on
        if answer["stop_reason"] == "end_turn":
            Place.model_validate_json(answer["content"][0]["text"])
    item = {"type": "function", **FUNCTION}
    body = {"input": "Say.", "tools": [item], "text": {"format": {"name": "place", **wanted}}, "max_output_tokens": 400}
    for _ in range(6):
        answer = served.send("POST", "/v1/responses", {**body, "temperature": 1}).json
        *_, last = answer["output"]
        if answer["status"] == "incomplete":
            assert answer["incomplete_details"]["reason"] == "max_output_tokens"
        elif last["type"] == "message":
            Place.model_validate_json(last["content"][0]["text"])
        else:
            assert last["type"] == "function_call" and isinstance(json.loads(last["arguments"]), dict)


ITSELF = {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}
TOO_MUCH = {"type": "integer", "multipleOf": 99_999_989}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("schema", "said"), [(ITSELF, "no reply can satisfy this"), (TOO_MUCH, "too complex")])
def test_what_cannot_be_satisfied_or_compiled_is_a_400_everywhere(
    served: Served, schema: dict[str, Any], said: str, stream: bool
) -> None:
    form = {"type": "json_schema", "schema": schema}
    chat = {"messages": ASK, "max_tokens": 9, "stream": stream}
    bodies: dict[str, Any] = {
        "/v1/chat/completions": {**chat, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        "/v1/completions": {"prompt": "Hi.", "max_tokens": 9, "stream": stream, "guided_json": schema},
        "/v1/messages": {**chat, "output_config": {"format": form}},
        "/v1/responses": {"input": "Hi.", "stream": stream, "text": {"format": {"name": "x", **form}}},
        "/api/chat": {**chat, "model": "default", "format": schema},
    }
    for path, body in bodies.items():
        answer = served.send("POST", path, body)
        assert answer.status == 400, (path, answer.status)
        text = answer.body.decode()
        assert said in text and ("$defs.n" in text) == (schema is ITSELF), (path, text)
        for state in ("lexer", "rows", "fuel", "NoExtension"):
            assert state not in text


def test_a_tool_that_nothing_can_satisfy_takes_any_object_unless_it_is_strict(served: Served) -> None:
    for strict in (False, True):
        function = {"name": "look", "parameters": ITSELF, "strict": strict}
        body = {"messages": ASK, "max_tokens": 100, "tools": [{"type": "function", "function": function}]}
        answer = served.send("POST", "/v1/chat/completions", {**body, "tool_choice": "required"})
        assert answer.status == (400 if strict else 200), answer.body
        if strict:
            assert answer.json["error"]["param"] == "tools[0].function.parameters.$defs.n"
