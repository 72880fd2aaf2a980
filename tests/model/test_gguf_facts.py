"""What llama.cpp makes of GGUF files, as tools/gguf_facts.py wrote it down: the same ids, the same probabilities."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rekindle.compute.load import load_model
from rekindle.config import ModelSettings
from rekindle.errors import ModelRefused
from rekindle.model.gguf_header import GgufHeader
from rekindle.model.gguf_splits import SPLITS
from rekindle.model.gguf_tokenizer import tokenizer_files
from rekindle.text.splitters import O200K, TEKKEN
from rekindle.text.tokenizer import TextTokenizer, TokenizerFile
from rekindle.text.vocabulary import find_control_tokens
from rekindle_lab.bench.engine.gguf_file import write_file
from tests.model.gguf_files import ASKED, ROPES, prompt_of, scaled_model, vocabulary_file
from tests.model.helpers import Bench

FACTS: dict[str, Any] = json.loads((Path(__file__).parent / "gguf_facts.json").read_text("utf-8"))


def tokenizer_of(tmp_path: Path, name: str, **more: Any) -> TextTokenizer:
    """The tokenizer of a file with the vocabulary of the facts."""
    kind = "llama" if name in "+-" else "gpt2"
    write_file(tmp_path / "m.gguf", vocabulary_file(FACTS["vocabularies"][kind], kind, name, **more), [])
    content = tokenizer_files(GgufHeader.read(tmp_path / "m.gguf"))["tokenizer.json"]
    file = TokenizerFile(json.dumps(content).encode())
    return TextTokenizer(file, find_control_tokens(file.added, ()))


# Where the original does otherwise, and so do we: marks are parts of words, blanks outside ASCII are not.
ORIGINALS = {O200K: re.compile(r"[\u0300-\u036f\u0900-\u097f]"), TEKKEN: re.compile(r"[\u0300-\u036f\u0900-\u097f]")}
ORIGINALS[SPLITS["deepseek-coder"].patterns[0]] = re.compile("\u3000")


@pytest.mark.parametrize("name", [*SPLITS, "+", "-"])
def test_a_text_has_the_ids_that_llama_cpp_gives_it(tmp_path: Path, name: str) -> None:
    tokenizer = tokenizer_of(tmp_path, name)
    texts = [tokenizer.normalise(text, at_start=True) for text in ASKED]
    theirs = FACTS["ids"][FACTS["names"][name]]
    unlike = ORIGINALS.get(SPLITS[name].patterns[0]) if name in SPLITS else None
    for text, ours, expected in zip(ASKED, tokenizer.encode(texts), theirs, strict=True):
        assert (ours.tolist() == expected) == (unlike is None or not unlike.search(text)), text
    assert not tokenizer.opaque


def test_the_texts_tell_ways_of_splitting_apart() -> None:
    """Where two names have the same ids though they split otherwise, no fact would show a mistake."""
    ways = {name: (splits.patterns, splits.whole_words) for name, splits in SPLITS.items()}
    groups = {FACTS["names"][name]: way for name, way in ways.items()}
    mixed = sorted(name for name, way in ways.items() if way != groups[FACTS["names"][name]])
    assert not mixed


def test_an_unknown_way_of_splitting_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        ModelRefused, match=r"splits text as 'deep\\x1bseek' \(tokenizer.ggml.pre\), which is not known"
    ):
        tokenizer_of(tmp_path, "deep\x1bseek")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", ROPES)
def test_a_scaled_rotary_embedding_gives_llama_cpps_probabilities(tmp_path: Path, name: str) -> None:
    scaled_model(name, tmp_path / "m.gguf")
    settings = ModelSettings(model=str(tmp_path / "m.gguf"), dtype="fp32", kv="fp32", kernels="torch")
    loaded = load_model(settings, block_tokens=16, max_context=None, format_map_dir=None)
    assert any("long factors" in note for note in loaded.notes) == (name == "longrope")
    prompt = prompt_of()
    rows = torch.log_softmax(Bench(loaded).forward(("a", prompt))[0].double(), -1)
    ours = rows[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])].numpy()
    theirs = np.array(FACTS["scores"][name])
    assert np.abs(ours[-len(theirs) :] - theirs).max() < 0.01
    others = [np.array(scores) for other, scores in FACTS["scores"].items() if other != name]
    assert all(np.abs(theirs - each).max() > 0.3 for each in others), "each has its own"
