"""A sub-agent's first request goes on from its parent's memory as from its own; later ones from their own."""

from __future__ import annotations

from rekindle.engine.api import Engine
from rekindle.engine.types import ChatResult, GenerationRequest
from rekindle.model.params import SamplingParams
from rekindle.text.messages import Message
from tests.engine.conftest import Start
from tests.tiny_models import tiny_tokenizer

SYSTEM = "You are a careful assistant. Answer in one short sentence, and remember what you are told. " * 2
Said = tuple[Message, ...]
FIRST = (Message("system", SYSTEM), Message("user", "Remember: the red box holds 4711 screws."))


def ask(
    engine: Engine, agent: str, messages: Said, parent: str | None = None, *, namespace: str = "default"
) -> ChatResult:
    """What an agent is answered: one letter again and again, which no tokenizer would cut so."""
    letter = next(number for word, number in tiny_tokenizer().get_vocab().items() if word == "e")
    params = SamplingParams(temperature=0.0, max_tokens=12, logit_bias=((letter, 100.0),))
    asked = GenerationRequest(messages=messages, agent=agent, parent=parent, namespace=namespace, params=params)
    return engine.submit(asked).result()


def grown(messages: Said, reply: ChatResult, *more: str) -> Said:
    return (*messages, Message("assistant", reply.text), *(Message("user", text) for text in more))


def test_a_fork_goes_on_from_its_parent_and_then_from_itself(start: Start) -> None:
    engine = start()
    first = ask(engine, "main", FIRST)
    history = grown(FIRST, first, "Go on.")
    forked = ask(engine, "sub", history, "main")
    assert (forked.report.outcome, forked.report.source) == ("extend", "parent")
    assert forked.report.reuse == "continuation"
    assert forked.report.reused_tokens >= len(first.prompt_ids)
    later = ask(engine, "sub", grown(history, forked, "And?"), "main")
    assert later.report.source == "own"
    assert {info.agent for info in engine.agents()} == {"main", "sub"}


def test_its_parents_text_is_quoted_to_it_and_to_nobody_else(start: Start) -> None:
    engine = start()
    ask(engine, "main", FIRST)
    other = (FIRST[0], Message("user", "Remember: the blue box holds 12 nuts."))
    forked = ask(engine, "sub", other, "main").report
    assert (forked.outcome, forked.source) == ("diverge", "parent")
    assert forked.explanation is not None and forked.explanation.stored is not None
    assert "red box" in forked.explanation.stored
    stranger = ask(engine, "else", (FIRST[0], Message("user", "Remember the weather."))).report
    assert stranger.source == "shared"
    assert stranger.explanation is not None and stranger.explanation.stored is None


def test_others_serve_where_the_parent_shares_nothing(start: Start) -> None:
    engine = start()
    ask(engine, "main", (Message("user", "1 2 3"),))
    ask(engine, "bob", FIRST)
    report = ask(engine, "sub", FIRST, "main").report
    assert (report.outcome, report.source) == ("exact", "shared")
    assert ask(engine, "new", (Message("user", "A question of its own"),), "nobody").report.outcome == "miss"


def test_an_agent_with_a_memory_has_no_parent_any_more(start: Start) -> None:
    engine = start()
    ask(engine, "sub", (Message("user", "1 2 3"),))
    ask(engine, "main", FIRST)
    report = ask(engine, "sub", FIRST, "main").report
    assert (report.outcome, report.source) == ("miss", "shared")


def test_a_parent_is_found_after_a_restart_and_in_its_namespace_only(start: Start) -> None:
    engine = start()
    first = ask(engine, "main", FIRST)
    engine = start(text_index_bytes=1)
    assert ask(engine, "sub", FIRST, "main", namespace="other").report.outcome == "miss"
    report = ask(engine, "sub", grown(FIRST, first, "Go on."), "main").report
    assert (report.outcome, report.source, report.warm_tokens > 0) == ("extend", "parent", True)
