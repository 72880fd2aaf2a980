"""The bench of real weights: its sums are those of `rekindle eval`, and other models are refused."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from benchmarks.commands import app
from benchmarks.fidelity import TEXTS, Served, scored
from rekindle.compute.load import load_model
from rekindle.config import ModelSettings
from rekindle.text.prompt import PromptEncoder
from rekindle_lab.bench.eval.bench import windows_of
from rekindle_lab.bench.eval.kv import layouts_of, score_formats
from rekindle_pocket import MODEL_DIR


def test_arms_have_the_scores_that_eval_gives_them() -> None:
    settings = ModelSettings(model=str(MODEL_DIR), threads=1)
    model = load_model(settings, block_tokens=64, max_context=512, format_map_dir=None)
    layouts = layouts_of(model)
    windows = windows_of(PromptEncoder.from_dir(MODEL_DIR), (), context=320, num_tokens=640, seed=1)
    arms = {name: Served(model, layout) for name, layout in layouts.items()}
    scores = scored(arms["native"], arms, windows)
    assert (scores["native"].kl, scores["native"].agreement) == (0.0, 1.0) and scores["q4h"].kl > scores["q8h"].kl > 0
    for each in score_formats(model, layouts, windows, advance=int):
        assert each.whole.num_tokens == scores[each.name].num_tokens == 2 * 319
        for name in ("perplexity", "mean_kl", "agreement"):
            assert getattr(scores[each.name], name) == pytest.approx(getattr(each.whole, name), rel=1e-9), each.name


def test_the_texts_are_there_and_other_models_are_refused() -> None:
    assert all(path.is_file() for paths in TEXTS.values() for path in paths) and len(TEXTS["code"]) > 3
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["fidelity", "--model", "llama"])
    assert result.exit_code == 2 and "no such model: llama; there are smollm2, gemma" in result.output
