"""Whose KV, and of which ids: nothing of another model, format or spelling is ever taken for what was asked.

Through the public engine, because these mistakes are made where text becomes ids and where the store is opened.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rekindle.engine.api import Engine
from rekindle.engine.types import ChatResult, GenerationRequest
from rekindle.model.params import SamplingParams
from rekindle.text.prompt import PromptEncoder
from tests.engine.conftest import Start
from tests.tiny_models import TOOL_ID, tiny_model_dir

TEXT = "The lighthouse keeper wrote the number down and went to sleep. Remember: the red box holds 4711 screws."
MORE = " What did she say about the weather in Trondheim?"


def ask(engine: Engine, **prompt: Any) -> ChatResult:
    """A greedy request of agent ada, unless `prompt` says otherwise."""
    params = SamplingParams(max_tokens=6, temperature=0.0)
    return engine.submit(GenerationRequest(**{"agent": "ada", "params": params, **prompt})).result()


def off(engine: Engine, ids: tuple[int, ...]) -> tuple[int, ...]:
    """The answer to these ids with nothing reused."""
    return ask(engine, agent=None, token_ids=ids, reuse="off").token_ids


@pytest.mark.parametrize(
    ("first", "second", "kv"),
    [({}, {"seed": 1}, ("fp32", "fp32")), ({}, {"rope_theta": 5e5}, ("fp32", "fp32")), ({}, {}, ("q4h", "fp32"))],
    ids=["weights", "config", "formats"],
)
def test_kv_of_another_model_is_not_used(
    start: Start, tmp_path: Path, first: dict[str, Any], second: dict[str, Any], kv: tuple[str, str]
) -> None:
    models = [tiny_model_dir("llama", "fp32", tmp_path / name, **made) for name, made in (("a", first), ("b", second))]
    engine = start(models[0], kv=kv[0])
    ask(engine, text=TEXT)
    assert ask(engine, text=TEXT).report.outcome == "exact"

    engine = start(models[1], kv=kv[1])
    result = ask(engine, text=TEXT)
    assert (result.report.outcome, result.report.reused_tokens) == ("miss", 0)
    assert result.token_ids == off(engine, result.prompt_ids)

    assert ask(start(models[0], kv=kv[0]), text=TEXT).report.outcome == "exact", "and the first one's is still there"


def test_sampled_ids_are_kept(start: Start, tmp_path: Path) -> None:
    model = tiny_model_dir("llama", "fp32", tmp_path)
    engine, encoder = start(model), PromptEncoder.from_dir(model)
    fresh = encoder.encode(encoder.render_text(TEXT)).tolist()
    # As a sampler may spell it: letter by letter in the middle, which no encoding does.
    letters = [encoder.encode(encoder.render_text(char))[0] for char in encoder.decode(fresh[10:-10])]
    ids = tuple(int(token) for token in (*fresh[:10], *letters, *fresh[-10:]))
    assert encoder.decode(ids) == TEXT and list(ids) != fresh
    ask(engine, token_ids=ids, reuse="continuation")

    result = ask(engine, text=TEXT + MORE)
    kept = len(ids) - 10  # behind it the last word is encoded again: what follows might have lengthened it
    assert result.prompt_ids[:kept] == ids[:kept], "the stored spelling was encoded again"
    assert encoder.decode(result.prompt_ids) == TEXT + MORE
    assert result.report.reused_tokens >= kept
    assert result.token_ids == off(engine, result.prompt_ids)

    canonical = ask(engine, text=TEXT + MORE, reuse="canonical")
    assert list(canonical.prompt_ids) == encoder.encode(encoder.render_text(TEXT + MORE)).tolist()
    assert canonical.token_ids == off(engine, canonical.prompt_ids)


def test_a_resumed_prompt_has_one_bos(start: Start, tmp_path: Path) -> None:
    model = tiny_model_dir("llama", "fp32", tmp_path)
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bos_token": "<|tool|>", "add_bos_token": True}))
    engine, encoder = start(model), PromptEncoder.from_dir(model)
    first = ask(engine, text=TEXT)
    assert first.prompt_ids[0] == TOOL_ID and first.prompt_ids.count(TOOL_ID) == 1
    second = ask(engine, text=TEXT + MORE)
    assert second.report.source == "own" and second.report.reused_tokens > 16
    assert second.prompt_ids.count(TOOL_ID) == 1
    assert list(second.prompt_ids) == encoder.encode(encoder.render_text(TEXT + MORE)).tolist()
