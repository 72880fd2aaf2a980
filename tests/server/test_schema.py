"""The description of the server: whole, honest, and as guarded as the rest."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from rekindle.server.agents.prefill import PrefillBody
from rekindle.server.answers.hints import HintFields
from rekindle.server.ollama.bodies import OllamaChatBody, OllamaGenerateBody
from rekindle.server.openai.bodies import ChatBody, CompletionBody
from rekindle.server.responses.bodies import ResponseBody
from tests.server.conftest import Served
from tests.server.test_http import raw


@pytest.fixture(scope="module")
def described(served: Served) -> Any:
    status, schema = raw(served, "GET", "/openapi.json")
    assert status == 200
    return schema


def operations(schema: Any) -> list[tuple[str, str, Any]]:
    return [(path, method, each) for path, methods in schema["paths"].items() for method, each in methods.items()]


def test_generating_routes_are_described_by_what_validates_them(described: Any) -> None:
    bodies = {
        "/v1/chat/completions": ChatBody,
        "/v1/completions": CompletionBody,
        "/v1/responses": ResponseBody,
        "/api/chat": OllamaChatBody,
        "/api/generate": OllamaGenerateBody,
    }
    for path, body in bodies.items():
        events = "application/x-ndjson" if path.startswith("/api/") else "text/event-stream"
        operation = described["paths"][path]["post"]
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = described["components"]["schemas"][reference.rpartition("/")[2]]
        assert set(schema["properties"]) == {*body.model_fields, *HintFields.model_fields}
        assert schema["additionalProperties"] is False
        assert {"application/json", events} == set(operation["responses"]["200"]["content"])


def test_bodies_that_are_read_by_hand_are_described(described: Any) -> None:
    request = described["paths"]["/v1/agents/{id}/prefill"]["post"]["requestBody"]
    assert request["content"]["application/json"]["schema"]["$ref"].endswith("/PrefillBody")
    assert set(described["components"]["schemas"]["PrefillBody"]["properties"]) == set(PrefillBody.model_fields)


def test_metrics_are_described_as_the_text_they_are(described: Any, served: Served) -> None:
    (kind,) = described["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert kind == served.send("GET", "/metrics").headers["content-type"].partition(";")[0] == "text/plain"


def test_every_reference_is_there_and_every_path_parameter_declared(described: Any) -> None:
    for reference in set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described))):
        assert reference in described["components"]["schemas"]
    ids = [each["operationId"] for _, _, each in operations(described)]
    assert len(set(ids)) == len(ids)
    for path, method, operation in operations(described):
        declared = {each["name"] for each in operation.get("parameters", []) if each["in"] == "path"}
        assert declared == set(re.findall(r"{(\w+)}", path)), f"{method} {path}"
        assert operation["summary"]
        assert "422" not in operation["responses"]
        assert operation["responses"]["default"]["content"]["application/json"]["schema"]["$ref"].endswith("ErrorReply")


def test_choices_are_as_many_as_the_engine_gives(described: Any, served: Served) -> None:
    for name in ("ChatBody", "CompletionBody"):
        most = described["components"]["schemas"][name]["properties"]["n"]["anyOf"][0]["maximum"]
        assert most == served.engine.settings.cache.max_branches
    assert served.chat("Hello!", n=most, max_tokens=1).status == 200
    assert served.chat("Hello!", n=most + 1, max_tokens=1).status == 400


def test_messages_are_described(described: Any) -> None:
    messages = described["components"]["schemas"]["ChatBody"]["properties"]["messages"]
    assert "tool" in messages["items"]["properties"]["role"]["enum"]


def test_foreign_hosts_and_pages_do_not_see_it(served: Served) -> None:
    assert raw(served, "GET", "/openapi.json", Host="evil.example")[0] == 403
    assert raw(served, "GET", "/openapi.json", Origin="https://evil.example")[0] == 403


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_no_page_loads_scripts_from_elsewhere(served: Served, path: str) -> None:
    assert raw(served, "GET", path)[0] == 404
