"""Routes between text and token ids: ours, and those of vLLM and llama.cpp, which measuring programs use.

/v1/tokenize     {"text" | "messages"}              -> {"ids", "count", "max_model_len"}
/tokenize        {"prompt" | "messages"}            -> {"tokens", "count", "max_model_len", "token_strs"}    vLLM
                 {"content"}                        -> {"tokens"}                                       llama.cpp
/detokenize      {"tokens"}                         -> {"prompt", "content"}
/tokenizer_info                                     -> tokenizer_config.json, with the chat template
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from rekindle.engine.api import Engine
from rekindle.engine.types import GenerationRequest
from rekindle.errors import BadRequest
from rekindle.server.answers.answer import read
from rekindle.server.answers.documents import LargeDocument
from rekindle.server.answers.options import template_kwargs
from rekindle.server.answers.validation import Items, StrictModel, validated
from rekindle.server.border import Router
from rekindle.server.models import ServedModel
from rekindle.text.messages import normalise_messages
from rekindle.text.omissions import Omissions
from rekindle.text.prompt import RenderedPrompt

MAX_IDS = 1 << 20  # token ids in an answer
Messages = Annotated[list[dict[str, Any]], Field(min_length=1)]
Body = TypeVar("Body", bound="_ModelBody")


class _ModelBody(StrictModel):
    model: str | None = None


class TokenizeBody(_ModelBody):
    """Either `text`, read as the prompt of a completion, or `messages` with the parameters that a chat renders."""

    text: str | None = None
    messages: Messages | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class VllmTokenizeBody(_ModelBody):
    """One of `prompt`, `messages` and `content`; `add_special_tokens`: those that begin every prompt."""

    prompt: str | None = None
    content: str | None = Field(default=None, description="llama.cpp's")
    messages: Messages | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = Field(default=None, description="not given: true, of `content` false")
    add_special: bool | None = Field(default=None, description="llama.cpp's name of it")
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(_ModelBody):
    """Ids of any length."""

    tokens: Items[int]


class Tokens(BaseModel):
    """Token ids as the model would see them, and the model's maximum length."""

    ids: list[int]
    count: int
    max_model_len: int


TOKENIZE, VLLM_TOKENIZE, DETOKENIZE = "/v1/tokenize", "/tokenize", "/detokenize"
BODIES: Mapping[str, type[BaseModel]] = {
    TOKENIZE: TokenizeBody,
    VLLM_TOKENIZE: VllmTokenizeBody,
    DETOKENIZE: DetokenizeBody,
}


class _Tokenizer:
    """What the routes do, on any thread."""

    def __init__(self, engine: Engine, model: ServedModel, *, strict: bool) -> None:
        self._engine = engine
        self._model = model
        self._strict = strict

    def _read(self, kind: type[Body], sent: Any) -> tuple[Body, Omissions]:
        omissions = Omissions(strict=self._strict, sees=self._engine.sees)
        body = validated(kind, sent, omissions=omissions, harmless=frozenset(), neutral={})
        self._model.require(body.model)
        return body, omissions

    def own(self, sent: Any) -> dict[str, Any]:
        """Tokenize as /v1/tokenize does."""
        body, omissions = self._read(TokenizeBody, sent)
        if (body.text is None) == (body.messages is None):
            raise BadRequest("give exactly one of text and messages", param="text")
        ids = self._ids(self._rendered(body.text, body, omissions), omissions)
        return {"ids": ids, "count": len(ids), "max_model_len": self._engine.max_context}

    def vllm(self, sent: Any) -> dict[str, Any]:
        """Tokenize as vLLM does, or llama.cpp."""
        body, omissions = self._read(VllmTokenizeBody, sent)
        if sum(each is not None for each in (body.prompt, body.content, body.messages)) != 1:
            raise BadRequest("give exactly one of prompt, messages and content", param="prompt")
        encoder, text = self._engine.encoder, body.prompt if body.content is None else body.content
        adds = body.add_special if body.add_special_tokens is None else body.add_special_tokens
        adds = body.content is None if adds is None else adds
        if text is not None:
            rendered = encoder.render_text(text, add_leading=adds)
        elif body.add_generation_prompt:
            rendered = self._rendered(None, body, omissions)
        else:
            kwargs = template_kwargs(body.chat_template_kwargs, None)
            messages = normalise_messages(body.messages, omissions)
            rendered = encoder.render_chat(messages, body.tools or None, add_generation_prompt=False, **kwargs)
        ids = self._ids(rendered, omissions)
        if body.content is not None:
            return {"tokens": ids}
        words = [encoder.vocabulary.token_bytes(token_id).decode("utf-8", "replace") for token_id in ids]
        counts = {"count": len(ids), "max_model_len": self._engine.max_context}
        return {**counts, "tokens": ids, "token_strs": words if body.return_token_strs else None}

    def detokenize(self, sent: Any) -> dict[str, Any]:
        """Return the text of ids."""
        body, _ = self._read(DetokenizeBody, sent)
        size = self._engine.spec.vocab_size
        if not all(0 <= token_id < size for token_id in body.tokens):
            raise BadRequest(f"tokens: ids must lie in 0 to {size - 1}", param="tokens")
        vocabulary = self._engine.encoder.vocabulary
        text = b"".join(map(vocabulary.token_bytes, body.tokens)).decode("utf-8", "replace")
        return {"prompt": text, "content": text}

    def _rendered(
        self, text: str | None, body: TokenizeBody | VllmTokenizeBody, omissions: Omissions
    ) -> RenderedPrompt:
        if text is not None:
            return self._engine.render(GenerationRequest(text=text))
        kwargs = template_kwargs(body.chat_template_kwargs, None)
        messages = normalise_messages(body.messages, omissions)
        return self._engine.render(
            GenerationRequest(messages=messages, tools=body.tools or None, template_kwargs=kwargs)
        )

    def _ids(self, rendered: RenderedPrompt, omissions: Omissions) -> list[int]:
        encoder = self._engine.encoder
        ids = encoder.encode(rendered, most=MAX_IDS)
        pictures = encoder.placed(ids, omissions.pictures)
        return [int(token_id) for token_id in (ids if pictures is None else pictures.ids)]


def tokens_router(engine: Engine, model: ServedModel, *, strict: bool) -> APIRouter:
    """The routes; nothing is computed or stored."""
    router = Router(tags=["models"])
    tokenizer = _Tokenizer(engine, model, strict=strict)

    @router.post(TOKENIZE, response_model=Tokens)
    async def tokenize(request: Request) -> Response:
        """Tokenize a text or a rendered conversation, encoded afresh as a whole."""
        return await read(request, lambda sent: LargeDocument(tokenizer.own(sent)), param="messages")

    @router.post(VLLM_TOKENIZE, response_model=dict[str, Any])
    async def tokenize_as_vllm(request: Request) -> Response:
        """The same under the names of vLLM or llama.cpp."""
        return await read(request, lambda sent: LargeDocument(tokenizer.vllm(sent)), param="messages")

    @router.post(DETOKENIZE, response_model=dict[str, Any])
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        return await read(request, lambda sent: LargeDocument(tokenizer.detokenize(sent)), param="messages")

    @router.get("/tokenizer_info")
    def tokenizer_info() -> dict[str, Any]:
        """The tokenizer's configuration as in the model's directory, with its chat template."""
        return _tokenizer_config(engine)

    return router


def _tokenizer_config(engine: Engine) -> dict[str, Any]:
    """Return the configuration with names of special tokens as texts, which older files have as objects."""
    encoder = engine.encoder
    texts = {
        name: value.get("content")
        for name, value in encoder.config.items()
        if name.endswith("_token") and isinstance(value, Mapping)
    }
    return {**encoder.config, **texts, "chat_template": encoder.template.sources.get("default")}
