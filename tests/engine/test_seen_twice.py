"""Unnamed conversations are written to disk once a second request continues or reuses them, agents always."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.engine.api import Engine
from rekindle.engine.types import Breakpoint, GenerationRequest
from rekindle.model.params import SamplingParams
from rekindle.text.messages import normalise_messages
from tests.engine.conftest import Start
from tests.engine.test_engine import SYSTEM, talk, user

SIZE = 16
STORY = "has a story to tell, of the mill and of its bell and of the sacks that were counted twice. " * 3


def on_disk(engine: Engine) -> tuple[int, int]:
    """How many blocks and branches the store has."""
    engine.flush()
    engine.check()
    stats = engine.stats().store
    assert stats is not None and stats["turns_unsaved"] == stats["blocks_orphaned"] == 0, stats
    return stats["num_blocks"], stats["num_sequences"]


def one_shot(engine: Engine, text: str, **options: Any) -> Any:
    return engine.chat(None, [user(text)], temperature=0.0, max_tokens=4, **options)


def test_a_prompt_seen_once_is_not_written(start: Start) -> None:
    engine = start()
    for number in range(4):
        one_shot(engine, f"{number} {STORY}")
    stats = engine.stats().store
    assert on_disk(engine) == (0, 0) and stats is not None
    assert (stats["bytes_written"], stats["index_bytes_written"]) == (0, 0)
    engine.close()
    engine = start()
    assert one_shot(engine, f"0 {STORY}").report.reused_tokens == 0


def test_an_agents_prompt_is_written_at_once(start: Start) -> None:
    engine = start()
    engine.chat("ada", [user(STORY)], temperature=0.0, max_tokens=4)
    assert on_disk(engine)[0] * SIZE >= engine.agent("ada").info().num_tokens - SIZE > 0


def test_a_conversation_with_a_second_turn_survives_a_restart(start: Start) -> None:
    engine, history = start(), [SYSTEM]
    talk(engine, None, history, "Hello!")
    assert on_disk(engine) == (0, 0)
    second = talk(engine, None, history, "And then?")
    num_blocks, num_branches = on_disk(engine)
    assert num_branches == 1
    assert abs(num_blocks * SIZE - second.report.prompt_tokens - 7) <= SIZE
    engine.close()
    engine = start()
    third = talk(engine, None, history, "Still there?")
    assert third.report.warm_tokens >= second.report.prompt_tokens - SIZE


def test_prompts_with_the_same_examples_are_seen_once_each(start: Start) -> None:
    engine = start()
    shown = [SYSTEM, user("Two?"), {"role": "assistant", "content": "Three."}, user("Three?")]
    shown += [{"role": "assistant", "content": "Four."}]
    for number in range(3):
        result = engine.chat(None, [*shown, user(f"{number}? {STORY[:30]}")], temperature=0.0, max_tokens=4)
    num_blocks, _ = on_disk(engine)
    assert 0 < num_blocks == result.report.reused_tokens // SIZE


def test_what_two_prompts_share_is_written_and_the_rest_is_not(start: Start) -> None:
    engine = start()
    for number in range(3):
        result = engine.chat(None, [SYSTEM, user(f"{number} {STORY}")], temperature=0.0, max_tokens=4)
        shared = result.report.reused_tokens // SIZE if number else 0
        num_blocks, num_branches = on_disk(engine)
        assert (num_blocks, num_branches) == (shared, min(number, 1)), number
    assert shared > 2
    engine.close()
    engine = start()
    late = engine.chat(None, [SYSTEM, user(f"late {STORY}")], temperature=0.0, max_tokens=4)
    assert late.report.warm_tokens == shared * SIZE


def test_a_beginning_that_is_reused_is_used_by_the_one_who_keeps_it(start: Start) -> None:
    engine = start()
    book, intake = engine.components.memory.book, engine.components.intake

    def kept() -> dict[str, float]:
        on_disk(engine)
        branches = intake.call(book.branches).result()
        return {branch.agent: branch.last_use for branch in branches if branch.saved_tokens}

    for number in range(2):
        engine.chat(None, [SYSTEM, user(f"{number} {STORY}")], temperature=0.0, max_tokens=4)
    before, stats = kept(), engine.stats().store
    engine.chat(None, [SYSTEM, user(f"2 {STORY}")], temperature=0.0, max_tokens=4)
    after, again = kept(), engine.stats().store
    assert stats is not None and again is not None
    assert [again[name] - stats[name] for name in ("bytes_written", "turns_saved")] == [0, 0]
    ((owner, used),) = before.items()
    assert after.keys() == {owner} and after[owner] > used, "it is forgotten while others still begin with it"


def test_an_agent_that_reuses_a_prompt_seen_once_writes_all_it_depends_on(start: Start) -> None:
    engine, history = start(), [SYSTEM]
    talk(engine, None, [SYSTEM], "Hello!")
    talk(engine, "ada", history, "Hello!")
    engine.flush()
    info = engine.agent("ada").info()
    assert info.saved_tokens == info.num_tokens
    engine.close()
    assert talk(start(), "ada", history, "Still there?").report.warm_tokens >= info.num_tokens - 2 * SIZE


@pytest.mark.parametrize("n", [2, 4])
def test_replies_to_one_prompt_do_not_see_it_twice(start: Start, n: int) -> None:
    engine = start()
    messages = normalise_messages([user(STORY)])
    request = GenerationRequest(messages=messages, params=SamplingParams(max_tokens=6, seed=3, ignore_eos=True))
    texts = [generation.result().text for generation in engine.submit_many(request, n)]
    assert on_disk(engine) == (0, 0)
    history = [user(STORY), {"role": "assistant", "content": texts[1]}]
    talk(engine, None, history, "Go on.")
    num_blocks, num_branches = on_disk(engine)
    assert num_branches == 1 and num_blocks > 4, "the one that is continued is written"


def test_the_same_prompt_again_is_written(start: Start) -> None:
    engine = start()
    first = one_shot(engine, STORY)
    assert on_disk(engine) == (0, 0)
    assert one_shot(engine, STORY).text == first.text
    num_blocks, num_branches = on_disk(engine)
    assert num_branches == 1 and num_blocks * SIZE >= first.report.prompt_tokens - SIZE


def test_marked_prompts_are_written_at_once(start: Start) -> None:
    engine = start()
    messages = normalise_messages([user(STORY), user("Hm?")])
    asked = GenerationRequest(
        messages=messages,
        breakpoints=(Breakpoint(0, None, 300.0),),
        params=SamplingParams(temperature=0.0, max_tokens=4),
    )
    engine.submit(asked).result()
    assert on_disk(engine)[0] > 4


def test_preempted_requests_do_not_see_themselves(start: Start) -> None:
    engine = start(hot_bytes=60_000)
    asked = [[user(f"{number} {STORY[:60]}")] for number in range(6)]
    streams = [engine.stream(None, each, temperature=0.0, max_tokens=60, ignore_eos=True) for each in asked]
    for stream in streams:
        stream.result()
    assert engine.stats().num_preemptions > 0
    assert on_disk(engine) == (0, 0)


def test_always_writes_the_first_sight(start: Start) -> None:
    engine = start(save_unnamed="always")
    one_shot(engine, STORY)
    num_blocks, num_branches = on_disk(engine)
    assert num_blocks > 4 and num_branches == 1
