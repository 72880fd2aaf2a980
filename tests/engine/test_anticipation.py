"""After a turn the next prompt is computed as far as it can be known; only new words are left for the next turn."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.api import Engine
from rekindle.engine.intake.anticipation import Anticipation
from rekindle.engine.request import FinishedTurn
from rekindle.engine.types import ChatResult, GenerationRequest, Report
from rekindle.model.params import SamplingParams
from rekindle.text.messages import Message
from rekindle.text.replies import ReplyFormat, ThinkingFormat
from rekindle.text.replies.envelope import EnvelopeForm
from tests.engine.conftest import Start
from tests.engine.idle import until_idle
from tests.engine.rewriting import REWRITING, SOME_THOUGHTS_DROPPED, with_template
from tests.tiny_models import END_ID, tiny_tokenizer

SYSTEM = "You are a careful assistant. Answer in one short sentence, and remember what you are told. " * 2
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Looks for a place.", "parameters": PLACE}}
    for name in ("look", "find")
]
WORDS = ("What did she say about the weather?", "It rained.", "The red box holds 4711 screws.", "And the blue one?")


def talk(
    engine: Engine, agent: str | None, *, wait: bool = True, **options: Any
) -> list[tuple[Report, tuple[int, ...]]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    said = []
    for words in WORDS:
        messages.append({"role": "user", "content": words})
        reply = engine.chat(agent, messages, tools=TOOLS, temperature=0.0, max_tokens=24, **options)
        messages.append({"role": "assistant", "content": reply.text})
        said.append((reply.report, reply.token_ids))
        if wait:
            until_idle(engine)
    return said


@pytest.mark.parametrize(("template", "agent"), zip(REWRITING, cycle(("ada", None))))
def test_the_next_turn_computes_new_words_only(
    start: Start, tiny_llama: Path, tmp_path: Path, template: str, agent: str | None
) -> None:
    model = with_template(tiny_llama, REWRITING[template], tmp_path / "model")
    engine = start(model, anticipate="on", min_reuse_tokens=1)
    said = talk(engine, agent)
    for words, (report, _) in list(zip(WORDS, said, strict=True))[1:]:
        new = len(
            engine.encoder.encode(engine.encoder.render_text(f"{words}<|im_end|>\n<|im_start|>assistant\n<think>\n"))
        )
        assert report.computed_tokens <= new + 8, f"{words}: {report}"
        assert report.outcome != "miss"
    cold = talk(engine, None, wait=False, reuse="off")
    assert [ids for _, ids in said] == [ids for _, ids in cold]


def spelled(engine: Engine, letter: str, messages: list[Message]) -> ChatResult:
    """A reply that says a letter 48 times, a token each, where its encoding takes two letters at a time."""
    token = tiny_tokenizer().get_vocab()[letter]
    bias = ((token, 50.0), (END_ID, 100.0))
    params = SamplingParams(temperature=0.0, min_tokens=48, max_tokens=64, logit_bias=bias)
    asked = GenerationRequest(messages=tuple(messages), agent="ada", params=params)
    reply = engine.submit(asked).result()
    assert reply.token_ids[:48] == (token,) * 48 and reply.text == letter * 48
    until_idle(engine)
    return reply


def test_what_is_foreseen_is_found_behind_a_reply_whose_ids_are_no_encoding(
    start: Start, tiny_llama: Path, tmp_path: Path
) -> None:
    """The first reply keeps its sampled ids, the second is rewritten: what is anticipated has to stand on these ids."""
    engine = start(with_template(tiny_llama, SOME_THOUGHTS_DROPPED, tmp_path / "model"), anticipate="on")
    messages = [Message("system", SYSTEM)]
    for letter, words in zip("ed", WORDS, strict=False):
        messages.append(Message("user", words))
        messages.append(Message("assistant", spelled(engine, letter, messages).text))
    messages.append(Message("user", WORDS[2]))
    last = spelled(engine, "e", messages)
    fresh = engine.encoder.encode(engine.encoder.render_chat(messages))
    assert len(last.prompt_ids) == len(fresh) + 24, "one of the replies is not encoded afresh"
    new = engine.encoder.render_text(f"{WORDS[2]}<|im_end|>\n<|im_start|>assistant\n")
    assert last.report.computed_tokens <= len(engine.encoder.encode(new)) + 8, last.report


SAID = (
    "<think>\nIs it up there?\n</think>\n\nI look."
    '\n<tool_call>\n{"name": "look", "arguments": {"place":"attic"}}\n</tool_call>'
)
THINKING = ThinkingFormat("<think>", "</think>", "\n", "\n", "\n\n")
HERMES = ReplyFormat(tools=EnvelopeForm(), thinking=THINKING)


@pytest.fixture
def anticipation(start: Start) -> Anticipation:
    parts = start().components
    return Anticipation(
        encoder=parts.encoder,
        memory=parts.memory,
        form=HERMES,
        new_table=parts.core.cache.new_table,
        root=parts.core.cache.root,
        submit=lambda request: None,
        max_context=1024,
    )


def asked(*earlier: Message, **options: Any) -> GenerationRequest:
    return GenerationRequest(messages=(*earlier, Message("user", "Where?")), agent="ada", **options)


def test_who_reads_text_sends_text_back(anticipation: Anticipation) -> None:
    assert anticipation.sent_back(asked(), SAID, "") == Message("assistant", SAID)
    assert anticipation.sent_back(asked(reply_prefix="So: "), "here.", "So: ") == Message("assistant", "So: here.")


def test_who_reads_parts_sends_parts_back(anticipation: Anticipation) -> None:
    reply = anticipation.sent_back(asked(structured=True, tools=TOOLS), SAID, "")
    assert (reply.content.strip(), reply.reasoning) == ("I look.", None)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("look", '{"place":"attic"}')]
    bare = anticipation.sent_back(asked(structured=True), SAID, "")
    assert "<tool_call>" in bare.content and not bare.tool_calls, "without tools nothing is a call"


def test_thoughts_go_back_where_the_caller_sends_them(anticipation: Anticipation) -> None:
    thinker = Message("assistant", "Hm.", reasoning="Why?")
    for told, earlier, expected in (
        (None, (), None),
        (True, (), "Is it up there?"),
        (None, (thinker,), "Is it up there?"),
        (False, (thinker,), None),
    ):
        reply = anticipation.sent_back(asked(*earlier, structured=True, tools=TOOLS, echoes_thoughts=told), SAID, "")
        assert (reply.reasoning or "").strip() == (expected or "")


def test_a_prefix_of_the_reply_goes_back_with_it_but_not_a_call_that_was_forced(anticipation: Anticipation) -> None:
    reply = anticipation.sent_back(asked(structured=True, reply_prefix="It is"), " here.", "It is")
    assert reply.content == "It is here."
    opening = HERMES.opening("look")
    assert opening is not None
    request = asked(structured=True, tools=TOOLS, reply_prefix=opening)
    reply = anticipation.sent_back(request, '{"place": "attic"}}\n</tool_call>', opening)
    assert reply.content == "" and [call.arguments for call in reply.tool_calls] == ['{"place": "attic"}']


def test_a_request_of_the_agent_makes_it_void(anticipation: Anticipation, start: Start) -> None:
    ids, root = np.arange(20, 30, dtype=np.uint32), BlockHash(bytes(32))
    turn = FinishedTurn("default", "ada", root, ids, (), root, 0, 0, 10, request=asked(), text="There.")
    for _ in range(2):
        anticipation.expect(turn)
        anticipation.ended(turn)
    anticipation.expect(other := replace(turn, agent="bob"))
    anticipation.ended(other)
    assert anticipation.num_pending == 2, "of an agent the last turn counts"
    anticipation.cancel("default", "ada")
    anticipation.cancel("default", "cleo")
    assert anticipation.num_pending == 1
    assert anticipation.work() and not anticipation.work()
    assert anticipation.num_pending == 0


@pytest.mark.timeout(45)  # an intake that does not look again does so after a minute
def test_nothing_is_foreseen_while_the_engine_is_busy(start: Start) -> None:
    """Made up for once it is idle. It is asked on the intake's thread, so that nothing is left to chance."""
    engine = start(anticipate="on", min_reuse_tokens=1, store="off")
    parts = engine.components
    endless = engine.stream("cleo", [{"role": "user", "content": "Hi"}], ignore_eos=True, reuse="off")
    next(iter(endless))
    engine.chat("ada", [{"role": "user", "content": SYSTEM}], temperature=0.0, max_tokens=8)
    assert not parts.intake.call(parts.anticipation.work).result()
    stats = engine.stats()
    assert (parts.anticipation.num_pending, stats.num_background, stats.num_anticipations) == (1, 1, 0)
    endless.cancel()
    assert until_idle(engine).num_anticipations == 1
    assert not parts.anticipation.has_turns


@pytest.mark.parametrize("forget", ["purge", "delete"])
def test_a_turn_of_an_agent_that_is_forgotten_is_forgotten_with_it(start: Start, forget: str) -> None:
    """It may wait for idle time for long, with all that was said in it."""
    parts = (engine := start(anticipate="on", min_reuse_tokens=1)).components
    ids, root = np.arange(20, 30, dtype=np.uint32), BlockHash(bytes(32))
    turns = [FinishedTurn("default", name, root, ids, (), root, 0, 0, 10, request=asked()) for name in ("ada", "bob")]
    for turn in turns:
        engine.chat(turn.agent, [{"role": "user", "content": SYSTEM}], temperature=0.0, max_tokens=8)
    until_idle(engine)

    def forgotten() -> int:
        """At once, before the intake has idle time."""
        for turn in turns:
            parts.anticipation.expect(turn)
            parts.anticipation.ended(turn)
        commands = parts.agent_commands
        commands.purge("default", "ada", frozenset()) if forget == "purge" else commands.delete("default", "ada")
        return parts.anticipation.num_pending

    assert parts.intake.call(forgotten).result() == 1


def test_nothing_is_foreseen_of_what_was_cancelled_forgotten_or_asked_as_text(start: Start) -> None:
    engine = start(anticipate="on", min_reuse_tokens=1)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    engine.submit(GenerationRequest(text="It rained", agent="ada", params=params)).result()
    engine.submit_many(GenerationRequest(messages=(Message("user", SYSTEM),), agent="bob", params=params), 2)[
        1
    ].result()
    endless = engine.stream("cleo", [{"role": "user", "content": "Hi"}], ignore_eos=True)
    next(iter(endless))
    endless.cancel()
    engine.prefill("dora", [{"role": "user", "content": SYSTEM}])
    assert until_idle(engine).num_anticipations == 0


def test_a_purged_agent_leaves_nothing_foreseen(start: Start, tiny_llama: Path, tmp_path: Path) -> None:
    model = with_template(tiny_llama, REWRITING["tools moved"], tmp_path / "model")
    engine = start(model, anticipate="on", min_reuse_tokens=1)
    talk(engine, "ada")
    assert engine.stats().num_anticipations > 0
    engine.agent("ada").purge()
    stats = until_idle(engine)
    assert (stats.num_cached_blocks, stats.num_held_blocks) == (0, 0)


def test_an_offloaded_agent_and_what_was_foreseen_leave_memory(start: Start, tiny_llama: Path, tmp_path: Path) -> None:
    model = with_template(tiny_llama, REWRITING["trimmed and dated"], tmp_path / "model")
    engine = start(model, anticipate="on", min_reuse_tokens=1)
    engine.chat("ada", [{"role": "user", "content": SYSTEM}], temperature=0.0, max_tokens=24)
    assert until_idle(engine).num_anticipations == 1
    engine.agent("ada").offload()
    assert engine.agent("ada").info().hot_tokens == 0
    assert engine.stats().num_cached_blocks == 0
