"""POST /v1/chat/completions, and /v1/completions for callers that write the template themselves."""

from __future__ import annotations

from typing import Any, TypedDict

from fastapi import Request
from starlette.responses import Response

from rekindle.engine.generation import Generation
from rekindle.engine.tool_choice import steered
from rekindle.model.sampling_defaults import SamplingDefaults
from rekindle.server.answers.answer import Answer, RouteContext, accepted
from rekindle.server.gate.caller import Caller
from rekindle.server.openai.calls import ChatCall, CompletionCall, parse_chat, parse_completion
from rekindle.server.openai.replies import ChatReply
from rekindle.server.openai.text import CompletionReply

CHAT_PATH = "/v1/chat/completions"
CHAT_PARAMS = {"token_ids": "rekindle.prompt_ids"}
TEXT_PATH = "/v1/completions"
TEXT_PARAMS = {"messages": "prompt", "token_ids": "prompt"}


class _Known(TypedDict):
    defaults: SamplingDefaults
    strict: bool
    knows_progress: bool


def _known(context: RouteContext) -> _Known:
    """Return what bodies are parsed with: what is known of the engine, and whether anything may be left out."""
    engine = context.engine
    knows_progress = engine.settings.backend.says_progress
    return {"defaults": engine.sampling, "strict": context.strict, "knows_progress": knows_progress}


class ChatRoute:
    """Answers chat completions; replies are parsed in the format of the model's template."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self._form = context.engine.reply_format

    async def __call__(self, request: Request) -> Response:
        """Answer whole or as a stream."""
        (call, generations), watch = await accepted(request, self._context.observer, CHAT_PATH, self._submit)
        reply = ChatReply(self._context.stamp("chatcmpl-"), call, generations, form=self._form)
        answer = Answer(
            reply,
            generations,
            watch,
            params=CHAT_PARAMS,
            ping_s=self._context.ping_s,
            progressed=reply.progressed if call.shows_progress else None,
        )
        return await (answer.stream(request) if call.stream else answer.whole(request))

    def _submit(self, body: Any, caller: Caller) -> tuple[ChatCall, list[Generation]]:
        call = parse_chat(body, caller, sees=self._context.engine.sees, **_known(self._context))
        self._context.model.require(call.model)
        (request,) = call.requests
        request = steered(
            request,
            self._form,
            call.tool_choice,
            tool_names=call.tool_names,
            strict=call.strict,
            parallel=call.parallel,
        )
        return call, self._context.submit(caller, [request], call.num_choices)


class CompletionRoute:
    """Answers completions; several prompts become several requests of one answer."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        """Answer whole or as a stream."""
        (call, generations), watch = await accepted(request, self._context.observer, TEXT_PATH, self._submit)
        encoder = self._context.engine.encoder
        reply = CompletionReply(
            self._context.stamp("cmpl-"),
            call,
            generations,
            decode=encoder.decode,
            token_bytes=encoder.vocabulary.token_bytes,
        )
        answer = Answer(
            reply,
            generations,
            watch,
            params=TEXT_PARAMS,
            ping_s=self._context.ping_s,
            progressed=reply.progressed if call.shows_progress else None,
        )
        return await (answer.stream(request) if call.stream else answer.whole(request))

    def _submit(self, body: Any, caller: Caller) -> tuple[CompletionCall, list[Generation]]:
        call = parse_completion(body, caller, **_known(self._context))
        self._context.model.require(call.model)
        return call, self._context.submit(caller, call.requests, call.num_choices)
