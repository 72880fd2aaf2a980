"""GET /openapi.json: the OpenAPI description, built from the models that validate bodies.

Owns what routes do not declare: bodies that are parsed by hand, headers that name the agent, the shape of errors, ids
in paths. There is no documentation page, which would load scripts from elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from rekindle import __version__
from rekindle.agent_ids import MAX_ID_BYTES
from rekindle.server.agents import prefill
from rekindle.server.answers.hints import HintFields
from rekindle.server.anthropic import route as messages
from rekindle.server.anthropic.bodies import CountBody, MessagesBody
from rekindle.server.anthropic.models import AnthropicErrorReply, MessageAnswer, MessageEvent
from rekindle.server.border import Dialect, Router, dialect_of
from rekindle.server.ollama import routes as ollama
from rekindle.server.ollama.bodies import OllamaChatBody, OllamaGenerateBody, OllamaShowBody
from rekindle.server.ollama.models import OllamaChatAnswer, OllamaErrorReply, OllamaGenerateAnswer
from rekindle.server.openai.bodies import MAX_CHOICES, ChatBody, CompletionBody
from rekindle.server.openai.models import ChatChunk, ChatCompletion, ErrorReply, TextCompletion
from rekindle.server.openai.routes import CHAT_PATH, TEXT_PATH
from rekindle.server.responses import routes
from rekindle.server.responses.bodies import ResponseBody
from rekindle.server.responses.models import ResponseAnswer, ResponseEvent
from rekindle.server.tokens import BODIES as TOKEN_BODIES

PATH = "/openapi.json"
SCHEMAS = "#/components/schemas/"
EVENT_STREAM, LINES = "text/event-stream", "application/x-ndjson"
ERRORS: Mapping[Dialect, type[BaseModel]] = {
    "openai": ErrorReply,
    "anthropic": AnthropicErrorReply,
    "ollama": OllamaErrorReply,
}
ABOUT = (
    "Inference for agents whose KV memory lasts. Speaks OpenAI, Anthropic and Ollama. Responses report reuse in "
    "`rekindle` and in headers."
)
# Path, body, answer, event of a stream, summary.
GENERATING: tuple[tuple[str, type[BaseModel], type[BaseModel], type[BaseModel], str], ...] = (
    (CHAT_PATH, ChatBody, ChatCompletion, ChatChunk, "Reply to a conversation"),
    (TEXT_PATH, CompletionBody, TextCompletion, TextCompletion, "Continue prompts"),
    (routes.PATH, ResponseBody, ResponseAnswer, ResponseEvent, "Reply to items, and store the response"),
    (messages.PATH, MessagesBody, MessageAnswer, MessageEvent, "Reply to a conversation, as Anthropic does"),
    (ollama.CHAT_PATH, OllamaChatBody, OllamaChatAnswer, OllamaChatAnswer, "Reply to a conversation, as Ollama does"),
    (
        ollama.GENERATE_PATH,
        OllamaGenerateBody,
        OllamaGenerateAnswer,
        OllamaGenerateAnswer,
        "Reply to a prompt, as Ollama does",
    ),
)
# Other bodies that routes parse by hand.
BODIES: tuple[tuple[str, type[BaseModel]], ...] = (
    (prefill.PATH, prefill.PrefillBody),
    (messages.COUNT_PATH, CountBody),
    *TOKEN_BODIES.items(),
    (routes.COUNT_PATH, ResponseBody),
    (ollama.SHOW_PATH, OllamaShowBody),
)
AGENT_ID = {"type": "string", "minLength": 1, "maxLength": MAX_ID_BYTES}
AGENT_HEADER = {
    "name": "X-Agent-ID",
    "in": "header",
    "required": False,
    "schema": {**AGENT_ID, "pattern": r"^[A-Za-z0-9_.-]+$"},
    "description": "the agent whose memory to continue; percent-encoded UTF-8",
}
_METHODS = ("get", "put", "post", "delete", "patch")


def schema_router(app: FastAPI, *, events: Sequence[type[BaseModel]], max_choices: int) -> APIRouter:
    """Create the route of the description, which is built on the first request, when all routes exist.

    `events`: models of streams that routes describe themselves; `max_choices`: how many replies to one prompt the
    engine allows.
    """
    router = Router()
    described: dict[str, Any] = {}

    @router.get(PATH, include_in_schema=False)
    def openapi() -> dict[str, Any]:
        if not described:
            described.update(describe(app, events=events, max_choices=max_choices))
        return described

    return router


def describe(app: FastAPI, *, events: Sequence[type[BaseModel]], max_choices: int) -> dict[str, Any]:
    """Build the OpenAPI description of all routes of `app`."""
    schema = get_openapi(title="Rekindle", version=__version__, description=ABOUT, routes=app.routes)
    _add_models(schema, events)
    for several in (ChatBody, CompletionBody):
        n = schema["components"]["schemas"][several.__name__]["properties"]["n"]
        n["anyOf"][0]["maximum"] = min(max_choices, MAX_CHOICES)
        n["description"] = "replies to one prompt, at most as many as branches are kept per agent (--max-branches)"
    hints = schema["components"]["schemas"].pop(HintFields.__name__)["properties"]
    for _, body, *_ in GENERATING:
        schema["components"]["schemas"][body.__name__]["properties"] |= hints
    for path, body, answer, event, summary in GENERATING:
        if path in schema["paths"]:
            kind = LINES if dialect_of({"path": path}) == "ollama" else EVENT_STREAM
            schema["paths"][path]["post"] |= _generating(body, answer, {kind: event}, summary)
    for path, body in BODIES:
        schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": _json(body)}
    for path, method, operation in _operations(schema):
        operation.setdefault("summary", f"{method} {path}")
        _add_path_parameters(path, operation)
        responses = operation["responses"]
        responses.pop("422", None)  # invalid requests are a 400 here
        error = ERRORS[dialect_of({"path": path})]
        responses["default"] = {"description": "Refused or failed", "content": _json(error)}
    return schema


def _add_models(schema: dict[str, Any], events: Sequence[type[BaseModel]]) -> None:
    models: dict[type[BaseModel], None] = dict.fromkeys(
        (
            ErrorReply,
            AnthropicErrorReply,
            OllamaErrorReply,
            HintFields,
            *(model for row in GENERATING for model in row[1:4]),
            *(body for _, body in BODIES),
            *events,
        )
    )
    _, found = models_json_schema([(model, "validation") for model in models], ref_template=SCHEMAS + "{model}")
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    schemas |= found["$defs"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    security = {"Key": {"type": "http", "scheme": "bearer", "description": "only where the server has keys"}}
    schema["components"]["securitySchemes"] = security
    schema["security"] = [{}, {"Key": []}]


def _generating(
    body: type[BaseModel], answer: type[BaseModel], events: Mapping[str, type[BaseModel]], summary: str
) -> Mapping[str, Any]:
    content = _json(answer) | {kind: {"schema": {"$ref": SCHEMAS + each.__name__}} for kind, each in events.items()}
    return {
        "summary": summary,
        "operationId": body.__name__,
        "parameters": [AGENT_HEADER],
        "requestBody": {"required": True, "content": _json(body)},
        "responses": {"200": {"description": "The answer, or its events", "content": content}},
    }


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": SCHEMAS + model.__name__}}}


def _operations(schema: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            if method in _METHODS:
                yield path, method.upper(), operation


def _add_path_parameters(path: str, operation: dict[str, Any]) -> None:
    """Add ids in the path, which routes do not declare: they read the raw path, so that an id may hold a slash."""
    parameters = operation.setdefault("parameters", [])
    known = {parameter["name"] for parameter in parameters}
    for name in re.findall(r"{(\w+)}", path):
        if name not in known:
            parameters.append({"name": name, "in": "path", "required": True, "schema": AGENT_ID})
    if not parameters:
        del operation["parameters"]
