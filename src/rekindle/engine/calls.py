"""Calls of the Python interface as requests: which keyword arguments there are, and what is asked of the engine.

The keywords of `SamplingParams` stand beside those of the call, as they do in a body over HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from rekindle.cache.blocks.token_ids import Ids, token_ids
from rekindle.engine.generation import Generation
from rekindle.engine.types import ChatResult, Delta, GenerationRequest, Reuse
from rekindle.errors import BadRequest
from rekindle.keywords import check_keywords
from rekindle.model.params import SamplingKeywords, SamplingParams
from rekindle.text.messages import normalise_messages

Messages = Sequence[Mapping[str, Any]]


class GenerateKeywords(SamplingKeywords, total=False):
    """Of `generate`: sampling, and whether stored KV is used (`Reuse`)."""

    reuse: Reuse | None


class ChatKeywords(GenerateKeywords, total=False):
    """Of `chat` and `stream`: sampling, `reuse`, and tools as OpenAI describes them."""

    tools: Sequence[Mapping[str, Any]] | None


class PrefillKeywords(TypedDict, total=False):
    """Of `warm`. With `open_end` more words may follow in the last message."""

    tools: Sequence[Mapping[str, Any]] | None
    template_kwargs: Mapping[str, Any] | None
    open_end: bool


def chat_request(
    messages: Messages,
    agent: str | None,
    namespace: str,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    reuse: Reuse | None = None,
    **sampling: Unpack[SamplingKeywords],
) -> GenerationRequest:
    """What `chat` asks. TypeError for an unknown keyword; BadRequest."""
    check_keywords("chat", sampling, ChatKeywords.__annotations__)
    return GenerationRequest(
        messages=normalise_messages(messages),
        agent=agent,
        namespace=namespace,
        tools=tools,
        params=SamplingParams(**sampling),
        reuse=reuse,
    )


def text_request(
    prompt: str | Ids,
    agent: str | None,
    namespace: str,
    *,
    reuse: Reuse | None = None,
    **sampling: Unpack[SamplingKeywords],
) -> GenerationRequest:
    """What `generate` asks: the text as it is, without a template, or its token ids. Raises as `chat_request`."""
    check_keywords("generate", sampling, GenerateKeywords.__annotations__)
    text = prompt if isinstance(prompt, str) else None
    try:
        ids = None if isinstance(prompt, str) else tuple(token_ids(prompt).tolist())
    except ValueError as error:
        raise BadRequest(f"prompt: {error}", param="prompt") from None
    params = SamplingParams(**sampling)
    return GenerationRequest(text=text, token_ids=ids, agent=agent, namespace=namespace, params=params, reuse=reuse)


def prefill_request(
    messages: Messages, agent: str, namespace: str, **options: Unpack[PrefillKeywords]
) -> GenerationRequest:
    """What `warm` asks. TypeError for an unknown keyword; BadRequest."""
    check_keywords("warm", options, PrefillKeywords.__annotations__)
    return GenerationRequest(
        messages=normalise_messages(messages),
        agent=agent,
        namespace=namespace,
        tools=options.get("tools"),
        template_kwargs=options.get("template_kwargs") or {},
        task="prefill",
        open_end=options.get("open_end", False),
    )


async def whole(generation: Generation) -> ChatResult:
    """Wait for the reply without blocking the event loop; where that is cancelled, so is the work."""
    try:
        return await generation.aresult()
    finally:
        generation.cancel()


async def pieces(begin: Callable[[], Generation]) -> AsyncIterator[Delta]:
    """Begin at the first step and give the deltas; whoever leaves early cancels the work."""
    generation = begin()
    try:
        async for delta in generation:
            yield delta
    finally:
        generation.cancel()
