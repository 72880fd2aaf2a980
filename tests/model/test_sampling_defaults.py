"""What requests are sampled with where they do not say: the model's file, and what is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rekindle.compute.load import load_model
from rekindle.config import Settings
from rekindle.errors import BadRequest, ModelRefused
from rekindle.model.params import SamplingParams
from rekindle.model.sampling_defaults import SamplingDefaults
from tests.tiny_models import tiny_model_dir

MAKERS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05}


def read(directory: Path, found: Any, source: Any = "model") -> SamplingDefaults:
    text = found if isinstance(found, str) else json.dumps(found)
    (directory / "generation_config.json").write_text(text, "utf-8")
    return SamplingDefaults.read(directory, source)


def test_the_makers_values_are_read_and_named(tmp_path: Path) -> None:
    found = read(tmp_path, {**MAKERS, "eos_token_id": 2, "do_sample": True, "max_new_tokens": 9})
    assert found.params("openai", {}) == found.params("ollama", {}) == SamplingParams(**MAKERS)
    (said,) = found.notes
    assert "temperature 0.6, top_k 20, top_p 0.95, min_p 0.01, repetition_penalty 1.05" in said


def test_what_the_makers_leave_open_is_as_the_neighbour_does(tmp_path: Path) -> None:
    found = read(tmp_path, {"temperature": 0.6, "top_k": None})
    assert found.params("openai", {}) == SamplingParams(temperature=0.6)
    assert found.params("ollama", {}) == SamplingParams(temperature=0.6, top_k=40, top_p=0.9)
    assert found.params("llama-server", {}) == SamplingParams(temperature=0.6, top_k=40, top_p=0.95, min_p=0.05)
    empty = SamplingDefaults.read(tmp_path / "nothing", "model")
    assert empty.params("openai", {}) == SamplingParams() and not empty.notes
    assert empty.params("llama-server", {}).temperature == 0.8


def test_a_request_has_its_own_way(tmp_path: Path) -> None:
    found = read(tmp_path, MAKERS)
    given = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 3}
    assert found.params("ollama", given) == SamplingParams(temperature=1.5, max_tokens=3)
    with pytest.raises(BadRequest, match="top_p"):
        found.params("openai", {"top_p": 2})


def test_openais_habits_leave_the_makers_out(tmp_path: Path) -> None:
    found = read(tmp_path, MAKERS, "openai")
    assert found.params("openai", {}) == found.params("llama-server", {}) == SamplingParams()
    assert found.params("ollama", {}) == SamplingParams(temperature=0.8, top_k=40, top_p=0.9)
    assert not found.notes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", [0.6]),
        ("top_p", 0),
        ("top_p", float("nan")),
        ("min_p", 1.5),
        ("top_k", 2.5),
        ("top_k", True),
        ("repetition_penalty", 0),
        ("repetition_penalty", {}),
    ],
)
def test_a_value_that_cannot_be_used_is_left_out_and_named(name: str, value: Any, tmp_path: Path) -> None:
    found = read(tmp_path, {**MAKERS, name: value})
    assert found.params("openai", {}) == SamplingParams(**{key: MAKERS[key] for key in MAKERS if key != name})
    assert "generation_config.json" in found.notes[1] and name in found.notes[1]


@pytest.mark.parametrize(("written", "meant"), [(-1, 0), (50.0, 50), (0, 0)])
def test_limits_are_read_as_others_write_them(written: float, meant: int, tmp_path: Path) -> None:
    assert read(tmp_path, {"top_k": written}).params("openai", {}).top_k == meant


def test_greedy_for_transformers_alone_is_not_greedy_here(tmp_path: Path) -> None:
    assert read(tmp_path, {"do_sample": False}).params("openai", {}).temperature == 1


@pytest.mark.parametrize("text", ["", "[]", "{", "\ud83d".encode("utf-16", "surrogatepass").decode("latin-1")])
def test_a_file_that_is_none_is_refused_by_name(text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"generation_config\.json"):
        read(tmp_path, text)


@pytest.mark.parametrize("text", ["[]", "{"])
def test_a_model_with_such_a_file_is_refused_by_its_name(text: str, tmp_path: Path) -> None:
    directory = tiny_model_dir("llama", "fp32", tmp_path)
    (directory / "generation_config.json").write_text(text, "utf-8")
    with pytest.raises(ModelRefused, match=r"generation_config\.json"):
        load_model(Settings.load({"model": directory}).model, block_tokens=16, max_context=None, format_map_dir=None)
