"""The library as its users see it: agents that remember, share, fork, rewind, survive a restart, and fail alone."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rekindle.engine.api import Engine
from rekindle.engine.generation import Generation
from rekindle.engine.types import ChatResult, GenerationRequest
from rekindle.errors import BadRequest, NotFound, PromptTooLong, RekindleError
from rekindle.model.params import SamplingParams
from rekindle.text.messages import normalise_messages
from tests.engine.conftest import Start
from tests.engine.holding import held

SYSTEM = {"role": "system", "content": "You are a careful assistant. Answer in one short sentence, and remember. " * 2}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def talk(engine: Engine, agent: str | None, history: list[dict[str, str]], text: str, **options: Any) -> ChatResult:
    """One greedy turn; the history grows by question and answer."""
    history.append(user(text))
    result = engine.chat(agent, history, temperature=0.0, max_tokens=options.pop("max_tokens", 7), **options)
    history.append({"role": "assistant", "content": result.text})
    return result


def test_turns_extend_and_the_answer_is_that_of_a_cold_run(start: Start) -> None:
    engine, history = start(), [SYSTEM]
    first = talk(engine, "ada", history, "What did she say?")
    second = talk(engine, "ada", history, "And then?")
    assert first.report.outcome == "miss" and first.report.source is None
    assert second.report.outcome in ("extend", "diverge") and second.report.source == "own"
    assert second.report.reused_tokens >= first.report.prompt_tokens - 16
    cold = engine.submit(
        GenerationRequest(
            token_ids=second.prompt_ids,
            reuse="off",
            params=SamplingParams(temperature=0.0, max_tokens=7),
        )
    ).result()
    assert cold.report.reused_tokens == 0
    assert cold.token_ids == second.token_ids
    engine.check()


def test_the_same_prompt_again_is_exact(start: Start) -> None:
    engine = start()
    history = [SYSTEM, user("Hello!")]
    first = engine.chat("ada", history, temperature=0.0, max_tokens=5)
    again = engine.chat("ada", history, temperature=0.0, max_tokens=5)
    assert again.report.outcome == "exact"
    assert again.report.computed_tokens == 1
    assert again.token_ids == first.token_ids


def test_agents_share_blocks_of_a_common_opening(start: Start) -> None:
    engine = start()
    talk(engine, "ada", [SYSTEM], "Hello!")
    shared = talk(engine, "bob", [SYSTEM], "The red box?")
    assert shared.report.source == "shared" and shared.report.outcome == "diverge"
    assert shared.report.reused_tokens >= 48
    assert {info.agent for info in engine.agents()} == {"ada", "bob"}


def test_a_restart_finds_every_agent_warm(start: Start) -> None:
    engine, history = start(), [SYSTEM]
    talk(engine, "ada", history, "The lighthouse keeper?")
    assert engine.flush()
    saved = engine.agent("ada").info()
    assert saved.saved_tokens == saved.num_tokens > 0
    engine.close()
    again = start()
    assert again.num_warm_agents == 1
    result = talk(again, "ada", history, "And the number?")
    assert result.report.warm_tokens == result.report.reused_tokens >= saved.num_tokens - 16
    assert result.report.hot_tokens == 0
    again.check()


def test_offloaded_to_disk_and_back(start: Start) -> None:
    engine, history = start(), [SYSTEM]
    talk(engine, "ada", history, "Hello!")
    assert engine.agent("ada").offload() > 0
    assert engine.agent("ada").info().hot_tokens == 0
    assert talk(engine, "ada", history, "Still there?").report.warm_tokens > 0
    with pytest.raises(NotFound, match="nobody"):
        engine.agent("nobody").offload()


def test_fork_shares_and_rewind_takes_back(start: Start) -> None:
    engine, history = start(), [SYSTEM]
    talk(engine, "ada", history, "One?")
    before = list(history)
    length = engine.agent("ada").info().num_tokens
    talk(engine, "ada", history, "Two?")
    engine.agent("ada").fork("eve")
    assert talk(engine, "eve", list(history), "Three?").report.source == "own"
    with pytest.raises(BadRequest, match="memory already"):
        engine.agent("ada").fork("eve")
    left = engine.agent("ada").rewind(1)
    assert length - 16 <= left <= length  # the reply may be spelled otherwise when it comes back
    after = talk(engine, "ada", before, "Another?")
    assert after.report.reused_tokens >= left - 16
    with pytest.raises(BadRequest, match="cannot be taken back"):
        engine.agent("ada").rewind(9)
    engine.check()


def test_a_rewound_agent_is_warm_at_its_shorter_length_after_a_restart(start: Start) -> None:
    engine, history = start(), [SYSTEM]
    talk(engine, "ada", history, "One?")
    length = engine.agent("ada").info().num_tokens
    talk(engine, "ada", history, "Two?")
    engine.agent("ada").rewind(1)
    engine.close()
    assert start().agent("ada").info().num_tokens == length


def test_deleted_agents_are_gone_on_every_tier(start: Start) -> None:
    engine = start()
    talk(engine, "ada", [SYSTEM], "Hello!")
    engine.flush()
    engine.agent("ada").delete()
    assert engine.agents() == []
    assert talk(engine, "bob", [SYSTEM], "Hello!").report.outcome == "miss"
    engine.check()
    engine.close()
    assert {info.agent for info in start().agents()} == {"bob"}


def test_unnamed_conversations_go_on_by_their_text_and_are_not_listed(start: Start) -> None:
    engine, history = start(), [SYSTEM]
    talk(engine, None, history, "Hello!")
    assert talk(engine, None, history, "And?").report.reused_tokens >= 48
    assert engine.agents() == []


def test_parallel_agents_in_different_states_answer_as_alone(start: Start) -> None:
    engine = start()
    histories = {f"agent{i}": [SYSTEM, user("What " * (i * 9 + 1) + "?")] for i in range(6)}
    alone = {
        name: engine.chat(None, history, temperature=0.0, max_tokens=9, reuse="off").token_ids
        for name, history in histories.items()
    }
    generations = {
        name: engine.stream(name, history, temperature=0.0, max_tokens=9) for name, history in histories.items()
    }
    together = {name: generation.result().token_ids for name, generation in generations.items()}
    assert together == alone
    engine.check()


def test_sync_async_and_streamed_answers_agree(start: Start) -> None:
    engine, history = start(), [SYSTEM, user("Größe?")]
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}
    whole = engine.chat("a", history, **options)
    streamed = list(engine.stream("b", history, **options))

    async def both() -> tuple[ChatResult, list[str]]:
        result = await engine.achat("c", history, **options)
        return result, [delta.text async for delta in engine.astream("d", history, **options)]

    awaited, texts = asyncio.run(both())
    assert "".join(delta.text for delta in streamed) == whole.text == awaited.text == "".join(texts)
    assert streamed[-1].finish_reason in ("stop", "length") and streamed[-1].report is not None
    assert streamed[0].report is not None, "headers need the report with the first delta"


def test_sampling_with_a_seed_does_not_depend_on_neighbours(start: Start) -> None:
    engine, history = start(), [SYSTEM, user("Say something.")]
    options: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 12}
    alone = engine.chat("a", history, **options).token_ids
    others = [engine.stream(f"o{i}", [SYSTEM, user("Hm " * i)], temperature=1.0, max_tokens=12) for i in range(4)]
    assert engine.chat("b", history, **options).token_ids == alone
    for other in others:
        other.result()


def test_cancelling_frees_everything(start: Start) -> None:
    engine = start()
    with held(engine, lambda request: request.sequence.num_generated > 1):  # else it may be over before it is cancelled
        generation = engine.stream("ada", [SYSTEM, user("Go on for long.")], ignore_eos=True)
        next(iter(generation))
        generation.cancel()
    assert generation.result().finish_reason == "cancelled"
    assert engine.stats().num_held_blocks == 0
    engine.check()


def test_bad_requests_fail_alone_and_say_what_to_do(start: Start) -> None:
    engine = start()
    running = engine.stream("ada", [SYSTEM, user("Hello!")], temperature=0.0, max_tokens=20)
    with pytest.raises(PromptTooLong, match="max_context"):
        engine.chat("bob", [user("word " * 5000)])
    with pytest.raises(BadRequest):
        engine.chat("bob", [{"role": "wizard", "content": 3}])
    with pytest.raises(BadRequest, match="token ids"):
        engine.submit(GenerationRequest(token_ids=(10**6,))).result()
    for nothing in (GenerationRequest(text=""), GenerationRequest(token_ids=())):
        with pytest.raises(BadRequest, match="empty"):
            engine.submit(nothing).result()
    assert running.result().finish_reason in ("stop", "length")
    assert engine.stats().num_held_blocks == 0


def test_more_sequences_than_memory_take_turns(start: Start) -> None:
    engine = start(hot_bytes=400_000)
    threads, results = [], {}

    def run(name: str) -> None:
        results[name] = engine.chat(name, [SYSTEM, user(f"I am {name}. " * 8)], temperature=0.0, max_tokens=20)

    for index in range(8):
        threads.append(threading.Thread(target=run, args=(f"agent{index}",)))
        threads[-1].start()
    for thread in threads:
        thread.join(120)
    assert len(results) == 8
    engine.check()
    assert engine.stats().num_held_blocks == 0


def test_reuse_off_for_all_keeps_nothing(start: Start) -> None:
    engine, history = start(reuse="off"), [SYSTEM]
    talk(engine, "ada", history, "Hello!")
    result = talk(engine, "ada", history, "Again?")
    assert (result.report.reuse, result.report.reused_tokens) == ("off", 0)
    assert engine.stats().num_cached_blocks == 0 and engine.agents() == []


def test_a_closed_engine_says_so(start: Start) -> None:
    engine = start()
    engine.close()
    engine.close()
    with pytest.raises(RekindleError, match="not running"):
        engine.agents()


def test_misses_say_why(start: Start, tmp_path: Path) -> None:
    engine, history = start(), [SYSTEM]
    first = talk(engine, "ada", history, "Hello!")
    assert first.report.explanation is not None and first.report.explanation.cause == "not_stored"
    edited = [SYSTEM, user("Good evening!"), *history[2:], user("And?")]
    changed = engine.chat("ada", edited, temperature=0.0, max_tokens=2).report
    assert changed.outcome == "diverge" and changed.explanation is not None
    assert (changed.explanation.cause, changed.explanation.message_index) == ("text_differs", 1)


def test_a_memory_of_another_fingerprint_says_what_differs(start: Start, tiny_llama: Path, tmp_path: Path) -> None:
    def told(agent: str, model: Path | None = None, **settings: object) -> str:
        """Why an agent that spoke under the settings of before starts anew under these."""
        talk(start(), agent, [SYSTEM], "Hello!")
        report = talk(start(model, **settings), agent, [SYSTEM], "Hello!").report
        assert report.outcome == "miss" and report.explanation is not None
        assert report.explanation.cause == "other_fingerprint"
        return report.explanation.detail.split("(", 1)[1].removesuffix(")")

    assert told("ada", kv="fp32") == "KV was q4h/q4h on 3 layers, now fp32/fp32 on 3 layers"
    assert told("bob", block_tokens=32) == "blocks had 16 tokens, now 32"
    assert told("cyd", dtype="bf16") == "dtype was torch.float32, now torch.bfloat16"
    trained = shutil.copytree(tiny_llama, tmp_path / "trained")
    values = load_file(trained / "model.safetensors")
    save_file({name: value * 1.5 for name, value in values.items()}, trained / "model.safetensors", {"format": "pt"})
    assert told("dan", trained, kv="fp32").endswith("now 'trained'; the weights are others")
    tokenizer = shutil.copytree(tiny_llama, tmp_path / "tokenizer") / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text("utf-8") + "\n", "utf-8")
    assert told("eve", tokenizer.parent) == "the tokenizer is another"
    talk(start(), "fay", [SYSTEM], "What is new?")
    for described in (tmp_path / "store").glob("*/layout.json"):  # as versions before wrote them
        known = json.loads(described.read_text("utf-8"))
        assert set(known.pop("made_from")) >= {"weights", "config", "dtype", "rope", "tokenizer", "weight_format"}
        described.write_text(json.dumps(known), "utf-8")
    report = talk(start(dtype="bf16"), "fay", [SYSTEM], "What is new?").report
    assert report.explanation is not None and "does not say what differs" in report.explanation.detail


def test_an_id_that_is_new_no_more_can_be_read_forked_and_deleted(start: Start) -> None:
    engine, old = start(), "\u202eada"
    with pytest.raises(BadRequest, match=r"U\+202E"):
        talk(engine, old, [SYSTEM], "Hello!")
    said = tuple(normalise_messages([SYSTEM, user("Hello!")]))
    request = GenerationRequest(agent=old, messages=said, params=SamplingParams(max_tokens=4))
    generation = Generation()
    engine.components.intake.submit(request, [generation])  # what an older version did
    generation.result()
    engine.close()
    engine = start()
    assert [info.agent for info in engine.agents()] == [old]
    engine.agent(old).fork("ada")
    assert talk(engine, "ada", [SYSTEM], "Hello!").report.outcome == "exact"
    engine.agent(old).delete()
    assert [info.agent for info in engine.agents()] == ["ada"]


def test_blocks_that_are_gone_everywhere_are_named_as_the_cause(start: Start) -> None:
    engine, history = start(store="off"), [SYSTEM]
    talk(engine, "ada", history, "Hello!")
    assert engine.agent("ada").offload() > 0  # without a store, out of memory is gone
    report = talk(engine, "ada", history, "Still there?").report
    assert report.outcome == "miss" and report.explanation is not None
    assert report.explanation.cause == "evicted"
