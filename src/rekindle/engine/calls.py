"""Calls of the Python interface as requests: their keyword arguments, and the requests built from them.

The keywords of `SamplingParams` are next to those of the call, as in a body over HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from rekindle.cache.blocks.hashing import Ids, token_ids
from rekindle.engine.generation import Generation
from rekindle.engine.tool_choice import ToolChoice, steered, strict_functions
from rekindle.engine.types import ChatResult, Delta, GenerationRequest, Reuse
from rekindle.errors import BadRequest
from rekindle.keywords import check_keywords
from rekindle.model.params import SamplingKeywords
from rekindle.model.sampling_defaults import SamplingDefaults
from rekindle.text.constraints.types import Constraint
from rekindle.text.messages import normalise_messages
from rekindle.text.omissions import Omissions
from rekindle.text.replies import ReplyFormat

Messages = Sequence[Mapping[str, Any]]


class GenerateKeywords(SamplingKeywords, total=False):
    """Keywords of `generate`: sampling, whether stored KV is used (`Reuse`), and what the reply must be."""

    reuse: Reuse | None
    constraint: Constraint | None


class ChatKeywords(GenerateKeywords, total=False):
    """Keywords of `chat` and `stream`: sampling, `reuse`, and tools in OpenAI's format."""

    tools: Sequence[Mapping[str, Any]] | None


class PrefillKeywords(TypedDict, total=False):
    """Keywords of `prefill`. With `open_end` the last message may continue."""

    tools: Sequence[Mapping[str, Any]] | None
    template_kwargs: Mapping[str, Any] | None
    open_end: bool


def chat_request(
    messages: Messages,
    agent: str | None,
    namespace: str,
    *,
    defaults: SamplingDefaults,
    form: ReplyFormat,
    sees: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    reuse: Reuse | None = None,
    constraint: Constraint | None = None,
    **sampling: Unpack[SamplingKeywords],
) -> GenerationRequest:
    """Build the request of `chat`, whose calls are bound as those of the routes. Raises TypeError for an unknown
    keyword; BadRequest."""
    check_keywords("chat", sampling, ChatKeywords.__annotations__)
    omissions = Omissions(strict=True, sees=sees)
    request = GenerationRequest(
        messages=normalise_messages(messages, omissions),
        pictures=omissions.pictures,
        agent=agent,
        namespace=namespace,
        tools=tools,
        params=defaults.params("openai", sampling),
        reuse=reuse,
        constraint=constraint,
    )
    names, strict = strict_functions(tools or ())
    return steered(request, form, ToolChoice(), tool_names=names, strict=strict)


def text_request(
    prompt: str | Ids,
    agent: str | None,
    namespace: str,
    *,
    defaults: SamplingDefaults,
    reuse: Reuse | None = None,
    constraint: Constraint | None = None,
    **sampling: Unpack[SamplingKeywords],
) -> GenerationRequest:
    """Build the request of `generate`: the text without a template, or its token ids. Raises as `chat_request`.

    With `max_tokens` 0 the prompt is computed, and scored if `prompt_logprobs` is given, and nothing is generated.
    """
    check_keywords("generate", sampling, GenerateKeywords.__annotations__)
    text = prompt if isinstance(prompt, str) else None
    try:
        ids = None if isinstance(prompt, str) else tuple(token_ids(prompt).tolist())
    except ValueError as error:
        raise BadRequest(f"prompt: {error}", param="prompt") from None
    is_empty = sampling.get("max_tokens") == 0 and not isinstance(sampling["max_tokens"], bool)
    if is_empty:
        sampling["max_tokens"] = None
    return GenerationRequest(
        text=text,
        token_ids=ids,
        agent=agent,
        namespace=namespace,
        params=defaults.params("openai", sampling),
        reuse=reuse,
        task="prefill" if is_empty else "generate",
        constraint=constraint,
    )


def prefill_request(
    messages: Messages, agent: str, namespace: str, *, sees: bool = False, **options: Unpack[PrefillKeywords]
) -> GenerationRequest:
    """Build the request of `prefill`. Raises TypeError for an unknown keyword; BadRequest."""
    check_keywords("prefill", options, PrefillKeywords.__annotations__)
    omissions = Omissions(strict=True, sees=sees)
    return GenerationRequest(
        messages=normalise_messages(messages, omissions),
        pictures=omissions.pictures,
        agent=agent,
        namespace=namespace,
        tools=options.get("tools"),
        template_kwargs=options.get("template_kwargs") or {},
        task="prefill",
        open_end=options.get("open_end", False),
    )


async def whole(generation: Generation) -> ChatResult:
    """Wait for the reply without blocking the event loop; cancelling the wait cancels the work."""
    try:
        return await generation.aresult()
    finally:
        generation.cancel()


async def pieces(begin: Callable[[], Generation]) -> AsyncIterator[Delta]:
    """Begin at the first step and yield the deltas; closing the iterator early cancels the work."""
    generation = begin()
    try:
        async for delta in generation:
            yield delta
    finally:
        generation.cancel()
