"""What formats cost: sums against a direct computation, bits after a restore, and models that 4 bits would break."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from rekindle.compute.load import load_model
from rekindle.config import ModelSettings, Settings
from rekindle.errors import ConfigError
from rekindle.model.loaded import LoadedModel
from rekindle.text.prompt import PromptEncoder
from rekindle_lab.bench.eval.bench import EvalBench, run_eval, windows_of
from rekindle_lab.bench.eval.kv import FormatScores, Score, layouts_of, score_formats
from rekindle_lab.bench.recall import contains_fact
from rekindle_pocket import MODEL_DIR
from tests.tiny_models import tiny_model_dir
from tools.injected import biased, hidden

SETTINGS = ModelSettings(model=str(MODEL_DIR), threads=1)


def loaded(directory: Path, threads: int = 1) -> LoadedModel:
    settings = replace(SETTINGS, model=str(directory), threads=threads)
    return load_model(settings, block_tokens=64, max_context=None, format_map_dir=None)


@cache
def pocket_windows(context: int = 512, num: int = 2) -> tuple[np.ndarray, ...]:
    encoder = PromptEncoder.from_dir(MODEL_DIR)
    return tuple(windows_of(encoder, (), context=context, num_tokens=context * num, seed=1))


def scored(model: LoadedModel, num: int = 2) -> dict[str, FormatScores]:
    found = score_formats(model, layouts_of(model), pocket_windows(num=num), advance=int)
    return {score.name: score for score in found}


def test_sums_are_those_of_the_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    native, logits = torch.randn((2, 30, 50), generator=generator).float()
    targets = torch.randint(50, (30,), generator=generator)
    score = Score()
    for rows in (slice(0, 7), slice(7, 30)):
        score.add(native[rows], logits[rows], targets[rows])
    p, q = native.double().softmax(-1), logits.double().softmax(-1)
    nll = -sum(float(q[row, target].log()) for row, target in enumerate(targets)) / 30
    kl = float((p * (p / q).log()).sum()) / 30
    assert score.perplexity == pytest.approx(np.exp(nll)) and score.mean_kl == pytest.approx(kl)
    assert score.agreement == float((p.argmax(-1) == q.argmax(-1)).double().mean())


def test_native_is_the_zero_and_four_bits_cost_little_and_come_back_bit_for_bit() -> None:
    scores = scored(loaded(MODEL_DIR))
    assert list(scores) == ["native", "auto", "q4h", "q8h/q4h", "q8h"]
    native, q4h = scores["native"], scores["q4h"]
    num_windows, context = len(pocket_windows()), len(pocket_windows()[0])
    assert native.whole.num_tokens == num_windows * (context - 1)
    assert native.second.num_tokens == native.restored.num_tokens == num_windows * (context // 2 - 1)
    assert (native.whole.kl, native.whole.agreement) == (0.0, 1.0) and 5 < native.whole.perplexity < 20
    assert 1e-4 < q4h.whole.mean_kl < 2e-2 and q4h.whole.perplexity < 1.02 * native.whole.perplexity
    assert native.bytes_per_token == 4096 and q4h.bytes_per_token == 1120
    kl = [scores[name].whole.mean_kl for name in ("q4h", "q8h/q4h", "q8h")]
    assert kl[0] > kl[1] > 2 * kl[2] > 0 and scores["q8h"].bytes_per_token == 2112
    for score in scores.values():
        assert score.restored.num_equal == score.restored.num_tokens
        assert (score.restored.nll, score.restored.kl) == (score.second.nll, score.second.kl)


@pytest.mark.parametrize("make", [biased, hidden])
def test_auto_protects_keys_that_four_bits_would_break(make: type, tmp_path: Path) -> None:
    make(100.0).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((MODEL_DIR / name).read_bytes())
    scores = scored(loaded(tmp_path), num=1)
    broken, safe = scores["q4h"].whole, scores["auto"].whole
    assert broken.perplexity > 1.05 * scores["native"].whole.perplexity
    assert safe.mean_kl < broken.mean_kl / 10 and safe.agreement > broken.agreement
    assert scores["auto"].bytes_per_token < scores["native"].bytes_per_token


def test_an_fp32_model_is_compared_with_bf16_kv_too(tmp_path: Path) -> None:
    directory = tiny_model_dir("llama", "fp32", tmp_path)
    model = loaded(directory)
    assert list(layouts_of(model)) == ["native", "auto", "bf16", "q4h", "q8h/q4h", "q8h"]
    ids = np.arange(300, dtype=np.uint32) % model.spec.vocab_size
    scores = score_formats(model, layouts_of(model), [ids], advance=int)
    assert all(score.restored.num_equal == score.restored.num_tokens == 300 - 128 - 1 for score in scores)
    by_name = {score.name: score.whole.mean_kl for score in scores}
    assert 0 < by_name["bf16"] < by_name["q4h"]


def test_windows_of_a_file_are_its_tokens_in_order(tmp_path: Path) -> None:
    encoder = PromptEncoder.from_dir(MODEL_DIR)
    text = "".join(f"The copper key number {number} is in the attic.\n" for number in range(200))
    path = tmp_path / "text.txt"
    path.write_text(text, "utf-8")
    windows = windows_of(encoder, [path], context=256, num_tokens=1000, seed=0)
    assert [len(window) for window in windows] == [256] * 3
    assert text.startswith(encoder.decode(np.concatenate(windows)))
    with pytest.raises(ConfigError, match="less than one window of 65536"):
        windows_of(encoder, [path], context=65_536, num_tokens=65_536, seed=0)
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    for name in ("bad.txt", "missing.txt"):
        with pytest.raises(ConfigError, match=name):
            windows_of(encoder, [tmp_path / name], context=256, num_tokens=256, seed=0)


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("The copper key is in the attic.", True),
        ("It is in the attic, I think", True),
        ("The copper key is in the cellar.", False),
        ("The copper key.", False),
    ],
)
def test_an_answer_tells_what_its_question_lacks(reply: str, right: bool) -> None:
    chat = {
        "messages": [{"role": "user", "content": "Where is the copper key?"}],
        "answer": "The copper key is in the attic.",
    }
    assert contains_fact(reply, chat) is right


def test_the_command_writes_lines_and_a_plot(tmp_path: Path) -> None:
    out, plot = tmp_path / "lines.jsonl", tmp_path / "plot.png"
    bench = EvalBench(num_tokens=256, context=256, cases=1, out=out, plot=plot)
    assert run_eval(Settings.load({"threads": 1}), bench, Console(quiet=True)) == 0
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert {line["arm"] for line in lines} >= {"native", "auto, restored", "q4h", "auto, restarted"}
    assert plot.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="at least 256 tokens"):
        run_eval(Settings(), replace(bench, context=128), Console(quiet=True))
    with pytest.raises(ConfigError, match="the model holds 4096"):
        run_eval(Settings(), replace(bench, context=8192), Console(quiet=True))
