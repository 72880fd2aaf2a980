"""A reply ends where any of the model's files says so, and where its template ends a turn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rekindle import Engine, pocket
from rekindle_lab.bench.engine.gguf_file import write_file
from rekindle_lab.bench.engine.gguf_model import contents

TALK = [{"role": "user", "content": "Remember that the copper key is in the attic."}]


def ids_of(directory: Path) -> dict[str, int]:
    added = json.loads((directory / "tokenizer.json").read_text("utf-8"))["added_tokens"]
    return {entry["content"]: entry["id"] for entry in added}


def changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **values}), "utf-8")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The bundled model, whose files name <|endoftext|> as the end, though it was trained to end with <|im_end|>."""
    directory = tmp_path / "model"
    shutil.copytree(pocket.model_dir(), directory)
    end = ids_of(directory)["<|endoftext|>"]
    for name in ("config.json", "generation_config.json"):
        changed(directory / name, eos_token_id=end)
    changed(directory / "tokenizer_config.json", eos_token="<|endoftext|>")
    return directory


def ends_of(model: Path) -> frozenset[int]:
    with Engine.from_pretrained(str(model), store="off") as engine:
        return engine.spec.eos_ids


def finished(model: Path) -> tuple[frozenset[int], str, str]:
    with Engine.from_pretrained(str(model), store="off") as engine:
        reply = engine.chat(None, TALK, temperature=0.0, max_tokens=120)
        return engine.spec.eos_ids, reply.finish_reason, reply.text


def test_what_the_template_writes_after_a_reply_ends_one(model: Path) -> None:
    ids = ids_of(model)
    ends, reason, text = finished(model)
    assert ends == {ids["<|endoftext|>"], ids["<|im_end|>"]}
    assert reason == "stop" and text


def test_the_tokenizers_end_counts_beside_that_of_the_generation_config(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    changed(model / "tokenizer_config.json", eos_token="<|im_end|>", chat_template=None)
    ids = ids_of(model)
    assert ends_of(model) == {ids["<|endoftext|>"], ids["<|im_end|>"]}


def test_all_ends_of_the_configs_count(model: Path) -> None:
    ids = ids_of(model)
    changed(model / "config.json", eos_token_id=ids["<|im_start|>"])
    (model / "chat_template.jinja").unlink()
    changed(model / "tokenizer_config.json", eos_token=None, chat_template=None)
    assert ends_of(model) == {ids["<|endoftext|>"], ids["<|im_start|>"]}


def test_a_gguf_file_whose_end_is_that_of_a_text_ends_turns(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent / "cache"))
    metadata, tensors = contents(model, "pocket", "bf16")
    metadata["tokenizer.ggml.eos_token_id"] = ids_of(model)["<|endoftext|>"]
    write_file(model.parent / "pocket.gguf", metadata, tensors)
    ends, reason, text = finished(model.parent / "pocket.gguf")
    assert ends == set(ids_of(model).values()) - {ids_of(model)["<|im_start|>"]}
    assert reason == "stop" and text
