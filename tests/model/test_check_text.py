"""The text that a model is checked on at load, as its prompts would have it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rekindle.model.check_text import CHECK_TEXT, OWN_TEXT, text_ids
from rekindle.text.prompt import PromptEncoder
from tests.text.factories import KINDS, write_model_dir


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_are_those_of_a_prompt(kind: str, tmp_path: Path) -> None:
    """Also where the file has the library cut texts off, fill them up, and end them with a token."""
    file = write_model_dir(tmp_path, kind) / "tokenizer.json"
    encoder = PromptEncoder.from_dir(tmp_path)
    prompt = encoder.encode(encoder.render_text(CHECK_TEXT)).tolist()
    assert text_ids(tmp_path).tolist() == prompt
    data = json.loads(file.read_text("utf-8"))
    data["truncation"] = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {"strategy": {"Fixed": 4000}, "direction": "Left", "pad_id": 0, "pad_token": "a"} | {
        "pad_to_multiple_of": None,
        "pad_type_id": 0,
    }
    (last,) = (each["id"] for each in data["added_tokens"] if each["content"] == "<|end|>")
    text, end = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|end|>", "type_id": 0}}
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [text, end],
        "pair": [text, end],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [last], "tokens": ["<|end|>"]}},
    }
    (tmp_path / OWN_TEXT).write_text(CHECK_TEXT * 2, "utf-8")
    file.write_text(json.dumps(data), "utf-8")
    encoder = PromptEncoder.from_dir(tmp_path)
    prompt = encoder.encode(encoder.render_text(CHECK_TEXT * 2, add_leading=False)).tolist()
    assert text_ids(tmp_path).tolist() == prompt
