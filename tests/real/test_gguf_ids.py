"""Texts have the ids that llama.cpp gives them with the vocabularies of real files, and those of the originals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rekindle.model import gguf
from rekindle.model.gguf_header import GgufHeader
from rekindle.text.prompt import PromptEncoder
from tests.model.gguf_files import ASKED
from tools.real_models import REAL_MODELS

FACTS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "model" / "gguf_facts.json").read_text("utf-8"))["real"]


def ids_of(encoder: PromptEncoder, text: str) -> list[int]:
    return encoder.encode(encoder.render_text(text, add_leading=False)).tolist()


def test_texts_have_llama_cpps_ids(real_file: Path) -> None:
    (name,) = (name for name, model in REAL_MODELS.items() if model.file == real_file.name)
    encoder = PromptEncoder.from_dir(gguf.opened(real_file))
    assert encoder.compares_text
    for text, expected in zip(ASKED, FACTS[name], strict=True):
        assert ids_of(encoder, text) == expected, text


def test_newlines_before_a_number_are_one_token(smollm2: Path) -> None:
    """As in the original, whose digits are split first; they were two."""
    encoder = PromptEncoder.from_dir(gguf.opened(smollm2))
    tokens = GgufHeader.read(smollm2).texts("tokenizer.ggml.tokens") or []
    assert [tokens[each] for each in ids_of(encoder, "list:\n\n1. Set up")] == [
        "list",
        ":",
        "ĊĊ",
        "1",
        ".",
        "ĠSet",
        "Ġup",
    ]
