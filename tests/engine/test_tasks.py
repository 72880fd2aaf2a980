"""Work without a reply: a prompt computed ahead, and what is stored brought into memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.engine.types import GenerationRequest
from rekindle.errors import BadRequest, NotFound, PromptTooLong
from tests.engine.conftest import Start
from tests.exactness.rig import BLOCK_TOKENS, Rig, load
from tests.exactness.test_paths import some_ids

SYSTEM = "You are a careful assistant. Answer in one short sentence, and remember what you are told. " * 2
ASKED = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What did she say about the weather?"}]


def test_a_prompt_computed_ahead_is_a_memory_without_a_reply(start: Start) -> None:
    engine = start()
    result = engine.submit(GenerationRequest(token_ids=tuple(range(20, 90)), agent="bob", task="prefill")).result()
    assert (result.text, result.token_ids, result.finish_reason) == ("", (), "stop")
    report = engine.prefill("ada", ASKED)
    assert (report.outcome, report.completion_tokens, report.reused_tokens) == ("miss", 0, 0)
    assert engine.agent("ada").info().num_tokens == report.prompt_tokens == report.computed_tokens
    asked = engine.chat("ada", ASKED, temperature=0.0, max_tokens=4).report
    assert (asked.outcome, asked.source, asked.computed_tokens) == ("exact", "own", 1)
    assert engine.agent("ada").info().branches == 1 and engine.agent("ada").rewind(1) == 0, (
        "the prompt is no turn of its own"
    )
    engine.check()


def test_what_is_there_is_not_computed_again(start: Start) -> None:
    engine = start()
    first = engine.prefill("ada", ASKED)
    again = engine.prefill("ada", ASKED)
    assert (again.outcome, again.reused_tokens, again.computed_tokens) == ("exact", first.prompt_tokens, 0)
    assert engine.stats().prompt_tokens == 2 * first.prompt_tokens


def test_of_a_system_prompt_what_all_continuations_share_is_computed(start: Start) -> None:
    engine = start()
    report = engine.prefill("ada", ASKED[:1])
    asked = engine.chat("bob", ASKED, temperature=0.0, max_tokens=4)
    assert asked.report.reused_tokens == report.prompt_tokens
    assert tuple(asked.prompt_ids[: report.prompt_tokens]) == tuple(engine.submit(
        GenerationRequest(messages=None, text=None, token_ids=asked.prompt_ids[: report.prompt_tokens], task="load")
    ).result().prompt_ids)  # fmt: skip
    rest = asked.prompt_ids[report.prompt_tokens :]
    assert SYSTEM.strip()[-10:] not in engine.encoder.decode(rest)


@pytest.mark.parametrize("after", ["restart", "offload"])
def test_what_is_stored_comes_back_into_memory(start: Start, after: str) -> None:
    engine = start()
    said = engine.chat("ada", ASKED, temperature=0.0, max_tokens=9)
    engine.flush()
    if after == "restart":
        engine = start()
    else:
        engine.agent("ada").offload()
    before, known = engine.stats(), engine.agent("ada").info()
    assert known.hot_tokens == 0
    report = engine.agent("ada").load()
    assert (report.reused_tokens, report.warm_tokens) == (known.num_tokens, known.num_tokens)
    assert (report.computed_tokens, report.completion_tokens) == (0, 0)
    stats, info = engine.stats(), engine.agent("ada").info()
    assert (stats.num_steps, stats.prompt_tokens) == (before.num_steps, before.prompt_tokens), "nothing was computed"
    assert (info.hot_tokens, info.branches, info.last_use) == (known.num_tokens, 1, known.last_use)
    again = engine.agent("ada").load()
    assert (again.hot_tokens, again.warm_tokens) == (known.num_tokens, 0)
    report = engine.chat("ada", [*ASKED, {"role": "assistant", "content": said.text}, {"role": "user", "content": "?"}],
                         temperature=0.0, max_tokens=2).report  # fmt: skip
    assert report.hot_tokens >= said.report.prompt_tokens
    engine.check()


def test_as_much_comes_as_memory_has_room_for(start: Start) -> None:
    engine = start()
    engine.prefill("ada", [{"role": "user", "content": "The red box holds 4711 screws. " * 12}])
    engine.flush()
    num_tokens, block_bytes = engine.agent("ada").info().num_tokens, engine.stats().block_bytes
    engine = start(hot_bytes=6 * block_bytes)
    report = engine.agent("ada").load()
    num_blocks = engine.stats().num_blocks
    assert num_tokens > num_blocks * 16 and report.warm_tokens == num_blocks * 16
    assert report.computed_tokens == num_tokens - report.warm_tokens
    assert engine.stats().num_held_blocks == 0


def test_beside_others_it_takes_half_of_what_they_leave(tiny_llama: Path, tmp_path: Path) -> None:
    loaded, ids = load(tiny_llama, "fp32", "q4h"), some_ids(10 * BLOCK_TOKENS)
    first = Rig(loaded, store_dir=tmp_path)
    first.generate(ids, 1)
    first.save()
    first.close()
    rig = Rig(loaded, num_blocks=13, store_dir=tmp_path)
    running = rig.request(some_ids(20, seed=2), 40)
    rig.step()
    assert rig.pool.num_free == 11
    task = rig.task(ids, "load")
    rig.step()
    rig.wait_for_load()
    (result,) = rig.finish(task)
    assert running.sequence.num_generated < 40, "it did not wait for the other's end"
    assert (result.report.hot_tokens, result.report.warm_tokens) == (0, 5 * BLOCK_TOKENS)
    rig.finish(running)
    assert rig.core.num_preemptions == 0
    rig.close()


def test_what_cannot_be_is_refused(start: Start) -> None:
    engine = start(max_context=100)
    with pytest.raises(NotFound):
        engine.agent("nobody").load()
    with pytest.raises(PromptTooLong):
        engine.prefill("ada", [{"role": "user", "content": "screws " * 200}])
    with pytest.raises(BadRequest):
        engine.submit(GenerationRequest(token_ids=(), agent="ada", task="prefill")).result()
    assert engine.agents() == []
