"""POST /api/chat and /api/generate, and what Ollama's clients ask about models."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from rekindle.engine.api import Engine
from rekindle.engine.generation import Generation
from rekindle.errors import BadRequest
from rekindle.server.answers.answer import Answer, RouteContext, accepted, read
from rekindle.server.answers.validation import validated
from rekindle.server.border import UNMANAGED, Router
from rekindle.server.gate.caller import Caller, access_of
from rekindle.server.models import ServedModel, rfc3339
from rekindle.server.ollama.bodies import OllamaShowBody
from rekindle.server.ollama.calls import ModelSide, OllamaCall, Parse, parse_chat, parse_generate
from rekindle.server.ollama.heading import Heading, Piece, chat_piece, text_piece
from rekindle.server.ollama.models import FOREVER, VERSION, OllamaModelCard, OllamaRunning, OllamaTags, OllamaVersion
from rekindle.server.ollama.reply import OllamaReply
from rekindle.text.omissions import Omissions

CHAT_PATH = "/api/chat"
GENERATE_PATH = "/api/generate"
SHOW_PATH = "/api/show"
_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))
_FORMATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}  # as Ollama names dtypes
_NAMES = {"repetition_penalty": "repeat_penalty"}  # as Ollama calls them
_HARMLESS = frozenset(("verbose", "system", "template", "options"))  # of a request to show a model; some are old


class OllamaRoute:
    """Answers messages or a prompt, as `parse` reads them and `piece` encodes the reply."""

    def __init__(self, context: RouteContext, path: str, parse: Parse, piece: Piece) -> None:
        engine = context.engine
        self._context = context
        self._path = path
        self._parse = parse
        self._piece = piece
        self._side = ModelSide(
            context.model.name, engine.reply_format, engine.max_context, engine.sampling, engine.sees
        )

    async def __call__(self, request: Request) -> Response:
        """As lines, or whole."""
        began = time.perf_counter()
        (call, generations), watch = await accepted(request, self._context.observer, self._path, self._submit)
        heading = Heading(call.model or self._context.model.tagged, self._context.clock, began)
        if not generations:
            return JSONResponse(heading.nothing(self._piece, stays=call.stays))
        reply = OllamaReply(heading, call, generations[0], piece=self._piece)
        answer = Answer(reply, generations, watch, params={}, ping_s=self._context.ping_s)
        return await (answer.stream(request) if call.stream else answer.whole(request))

    def _submit(self, body: Any, caller: Caller) -> tuple[OllamaCall, list[Generation]]:
        call = self._parse(body, caller, self._side, strict=self._context.strict)
        self._context.model.require(call.model, dialect="ollama")
        requests = [call.request] if call.request is not None else []
        return call, self._context.submit(caller, requests)


def generating_routes(context: RouteContext) -> dict[str, OllamaRoute]:
    """Return the routes by their paths."""
    return {
        CHAT_PATH: OllamaRoute(context, CHAT_PATH, parse_chat, chat_piece),
        GENERATE_PATH: OllamaRoute(context, GENERATE_PATH, parse_generate, text_piece),
    }


# What Ollama's clients ask about models: which there are, what one can do, which is loaded; and the version.
#
# Owns these descriptions of the one served model. Most clients choose by them: a model is offered for agents if it
# lists `tools`, and history is shortened to `context_length`.


class Catalogue:
    """Describes the served model."""

    def __init__(self, engine: Engine, model: ServedModel) -> None:
        self._engine = engine
        self._model = model

    def listed(self) -> dict[str, Any]:
        """Return the entry of /api/tags."""
        return {
            **self._named(),
            "modified_at": rfc3339(self._model.created),
            "size": self._engine.spec.facts.file_bytes,
            "capabilities": self._capabilities(),
        }

    def loaded(self, *, sees_all: bool) -> dict[str, Any]:
        """Return the entry of /api/ps: bytes of weights and of hot KV; waits for the engine.

        Hot memory counts as a whole where it is next to the weights, of a front as far as it is in use: by all tenants
        together, so of one that does not see them all it counts as nothing.
        """
        is_front, stats = self._engine.settings.backend.address is not None, self._engine.stats()
        used_bytes = stats.used_hot_bytes if sees_all else 0
        size = self._engine.spec.facts.file_bytes + (used_bytes if is_front else stats.hot_bytes)
        return {
            **self._named(),
            "size": size,
            "size_vram": 0 if self._engine.settings.model.device == "cpu" else size,
            "expires_at": FOREVER,
            "context_length": self._engine.max_context,
        }

    def card(self) -> dict[str, Any]:
        """Return the answer of /api/show."""
        facts, layout = self._engine.spec.facts, self._engine.spec.layout
        sampling = self._engine.sampling.named("ollama")
        indices = [layer.index for layer in layout.layers] + [state.index for state in layout.states]
        return {
            "modified_at": rfc3339(self._model.created),
            "details": self._details(),
            "capabilities": self._capabilities(),
            "template": self._engine.encoder.template.sources.get("default", ""),
            "parameters": "\n".join(f"{_NAMES.get(name, name)} {value}" for name, value in sampling.items()),
            "model_info": {
                "general.architecture": facts.family,
                "general.basename": self._model.name,
                "general.parameter_count": facts.num_parameters,
                f"{facts.family}.context_length": self._engine.max_context,
                f"{facts.family}.block_count": 1 + max(indices),
                f"{facts.family}.vocab_size": self._engine.spec.vocab_size,
            },
        }

    def _named(self) -> dict[str, Any]:
        name, digest = self._model.tagged, self._engine.spec.fingerprint.hex()
        return {"name": name, "model": name, "digest": digest, "details": self._details()}

    def _details(self) -> dict[str, Any]:
        facts = self._engine.spec.facts
        return {
            "parent_model": "",
            "format": facts.file_format,
            "family": facts.family,
            "families": [facts.family],
            "parameter_size": rounded(facts.num_parameters),
            "quantization_level": _FORMATS.get(facts.weight_format, facts.weight_format.upper()),
            "context_length": self._engine.max_context,
        }

    def _capabilities(self) -> list[str]:
        form = self._engine.reply_format
        found = {"completion": True, "tools": form.tools is not None, "thinking": form.thinking is not None}
        found["vision"] = self._engine.sees
        return [name for name, has in found.items() if has]


def rounded(count: int) -> str:
    """Return a number of parameters as Ollama writes it: 8.2B, 7.1M."""
    for unit, sign in _UNITS:
        if count >= unit:
            return f"{count / unit:.1f}{sign}"
    return str(count)


def catalogue_router(engine: Engine, model: ServedModel, *, strict: bool) -> APIRouter:
    """The routes that describe the served model as Ollama does."""
    router, catalogue = Router(tags=["ollama"]), Catalogue(engine, model)

    @router.get("/api/tags", response_model=OllamaTags)
    def tags() -> dict[str, Any]:
        """The served model, under its name with a tag."""
        return {"models": [catalogue.listed()]}

    @router.get("/api/ps", response_model=OllamaRunning)
    def running(request: Request) -> dict[str, Any]:
        """The served model, with what it takes in memory; it stays loaded."""
        return {"models": [catalogue.loaded(sees_all=access_of(request).is_admin)]}

    @router.get("/api/version", response_model=OllamaVersion)
    def version() -> dict[str, str]:
        """The version of Ollama whose interface this is; ours is under `/version`."""
        return {"version": VERSION}

    @router.post(SHOW_PATH, response_model=OllamaModelCard)
    async def show(request: Request) -> dict[str, Any]:
        """What the served model is and can do."""

        def card(body: Any) -> dict[str, Any]:
            omissions = Omissions(strict=strict)
            asked = validated(OllamaShowBody, body, omissions=omissions, harmless=_HARMLESS, neutral={})
            model.require(asked.model or asked.name, dialect="ollama")
            return catalogue.card()

        return await read(request, card, param="model")

    return router


def unmanaged_router(model: ServedModel) -> APIRouter:
    """Routes of Ollama that manage models, which say what to do instead."""
    router = Router(include_in_schema=False)

    def refuse(request: Request) -> None:
        what = request.scope["path"].split("/")[2]
        message = f"{what} is not served here, where {model.tagged} is the one model: {UNMANAGED[what]}"
        raise BadRequest(message, param="model")

    for name in UNMANAGED:
        path = "/api/blobs/{digest}" if name == "blobs" else f"/api/{name}"
        router.add_api_route(path, refuse, methods=["POST", "GET", "DELETE"], response_model=None)
    return router
