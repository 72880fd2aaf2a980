"""A request becomes what the engine runs: its ids, its places in tokens, and what is told of its reply."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.cache.blocks.pool import BlockPool
from rekindle.cache.blocks.table import BlockTable
from rekindle.engine.generation import Generation
from rekindle.engine.intake.prompt_lookup import PromptLookup
from rekindle.engine.intake.rendering import Renderer
from rekindle.engine.intake.request_builder import PromptLimits, RequestBuilder
from rekindle.engine.memory.branches import Branch, BranchBook, KnownBranch
from rekindle.engine.memory.memory import AgentMemory
from rekindle.engine.request import Request
from rekindle.engine.types import Breakpoint, GenerationRequest
from rekindle.errors import BadRequest, PromptTooLong
from rekindle.matching.matcher import Matcher
from rekindle.model.params import SamplingParams
from rekindle.text.constraints.matcher import ReplyConstraints
from rekindle.text.messages import Message
from rekindle.text.prompt import PromptEncoder
from rekindle.text.replies import find_reply_format
from tests.text.families import encoder_for

CHAT = (Message("system", "Be kind and brief."), Message("user", "Hello, who are you?"))
ROOT = BlockHash(b"r" * 32)


def prepared(
    encoder: PromptEncoder, asked: GenerationRequest, *, max_context: int = 4096, stored: Sequence[Branch] = ()
) -> Request:
    form, requests = find_reply_format(encoder), list[Request]()
    memory = AgentMemory(
        encoder=encoder,
        matcher=Matcher(encoder),
        book=BranchBook(max_branches=8),
        store=None,
        block_tokens=16,
        save=lambda command: None,
        demote=lambda branch, num_kept: None,
        now=lambda: 0.0,
        vocab_size=encoder.vocab_size,
    )
    for branch in stored:
        memory.book.put(branch)
    preparer = RequestBuilder(
        encoder=encoder,
        renderer=Renderer(encoder, form, frozenset(["attribution"])),
        lookup=PromptLookup(encoder, memory, reuse="on"),
        limits=PromptLimits(max_context, encoder.vocab_size, frozenset(), None),
        visible=form.visible,
        constraints=ReplyConstraints(encoder, form, ends=()),
        root=lambda namespace: ROOT,
        new_table=lambda: BlockTable(BlockPool(8, 16)),
        submit=requests.append,
        wake=lambda: None,
    )
    preparer.prepare(asked, [Generation()], 0.0)
    (request,) = requests
    return request


def test_structured_deltas_spell_the_marks_of_the_models_form() -> None:
    encoder = encoder_for("channels")
    special = next(token for token in encoder.controls.tokens if token.content == "<|channel|>")
    assert special.special
    plain = prepared(encoder, GenerationRequest(messages=CHAT))
    shown = prepared(encoder, GenerationRequest(messages=CHAT, structured=True))
    assert (plain.reply.stream.push(special.id), shown.reply.stream.push(special.id)) == ("", "\ufdd0<|channel|>")


def test_breakpoints_in_tokens_and_settled_messages() -> None:
    encoder = encoder_for("hermes")
    signed = Message("system", f"x-anthropic-billing-header: cch=1;\n{CHAT[0].content}")
    marks = (Breakpoint(1, None, 300.0), Breakpoint(0, None, 3600.0))
    request = prepared(encoder, GenerationRequest(messages=(signed, CHAT[1]), agent="ada", breakpoints=marks))
    assert request.original is not None and request.original.messages == CHAT
    assert [each.ttl_s for each in request.breakpoints] == [300.0, 3600.0]
    last, first = request.breakpoint_tokens
    for num_tokens, text in ((first, CHAT[0].content), (last, CHAT[1].content)):
        assert encoder.decode(request.sequence.prompt_ids[:num_tokens]).endswith(text)
        assert not encoder.decode(request.sequence.prompt_ids[: num_tokens - 1]).endswith(text)
    (line,) = request.taken_out
    assert (line.kind, line.num_before < first, line.is_new) == ("attribution", True, False)


def test_the_opening_reaches_the_caller_with_the_prompt() -> None:
    encoder = encoder_for("hermes")
    request = prepared(encoder, GenerationRequest(messages=CHAT, reply_prefix="I am"))
    assert request.reply.generation.opening.endswith("I am")
    assert request.reply.generation.prompt_ids == tuple(request.sequence.prompt_ids)
    assert encoder.decode(request.sequence.prompt_ids).endswith("I am")


def test_what_has_no_room_is_refused_with_its_size() -> None:
    encoder = encoder_for("hermes")
    request = prepared(encoder, GenerationRequest(messages=CHAT))
    size = len(request.sequence.prompt_ids)
    assert prepared(encoder, GenerationRequest(messages=CHAT), max_context=size + 3).sequence.max_new_tokens == 3
    with pytest.raises(PromptTooLong, match=f"{size} tokens"):
        prepared(encoder, GenerationRequest(messages=CHAT), max_context=size)
    with pytest.raises(BadRequest, match="token ids"):
        prepared(encoder, GenerationRequest(token_ids=(1 << 30,)))
    few = GenerationRequest(messages=CHAT, params=SamplingParams(max_tokens=2))
    assert prepared(encoder, few).sequence.max_new_tokens == 2
    assert prepared(encoder, GenerationRequest(messages=CHAT, task="prefill")).sequence.max_new_tokens == 0


def branch(number: int, ids: Sequence[int], *, agent: str = "ada", namespace: str = "default") -> KnownBranch:
    array = np.asarray(ids, dtype=np.uint32)
    return KnownBranch(namespace, agent, number, ROOT, ROOT, len(array), 0, 0, float(number), (), ids=array, hashes=())


def test_a_reply_may_quote_what_its_agent_has_stored_elsewhere() -> None:
    encoder = encoder_for("hermes")
    ids = [30, 31, 32, 33, 34, 35]
    stored = (
        branch(0, ids[:4]),
        branch(1, [*ids, 40, 41]),
        branch(2, [50, 51, 52]),
        branch(0, [70, 71], agent="bob"),
        branch(0, [80, 81], namespace="other"),
    )
    asked = GenerationRequest(token_ids=tuple(ids), agent="ada")
    request = prepared(encoder, asked, stored=stored)
    assert [text.tolist() for text in request.sequence.texts] == [[50, 51, 52], [*ids, 40, 41]]
    off = prepared(encoder, GenerationRequest(token_ids=tuple(ids), agent="ada", reuse="off"), stored=stored)
    assert off.sequence.texts == ()
    nobody = prepared(encoder, GenerationRequest(token_ids=tuple(ids), agent="eve"), stored=stored)
    assert nobody.sequence.texts == ()
