"""Long texts are encoded piece by piece: the ids are those of the whole, and counting stops when there are too many."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.errors import BadRequest, PromptTooLong
from rekindle.text.messages import Message
from rekindle.text.splitters import LONGEST_WORD, PIECE_BYTES
from tests.text.factories import KINDS, SNIPPETS, encoder_of

KNOWN = ("gpt2", "cl100k", "o200k", "deepseek", "nfc", "words", "prefixed")


def said(rng: random.Random, size: int) -> str:
    """Some text of so many snippets, with runs of one of them."""
    return "".join(rng.choice(SNIPPETS) * rng.choice((1, 1, 1, 2, 5)) for _ in range(size))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.sampled_from([1, 7, 32, 200]))
def test_pieces_have_the_ids_of_the_whole(kind: str, seed: int, size: int) -> None:
    tokenizer, rng = encoder_of(kind).tokenizer, random.Random(seed)
    text = tokenizer.normalise(said(rng, 150), at_start=False)
    pieces = list(tokenizer.cuts.pieces(text.encode(), size=size))
    assert b"".join(pieces).decode() == text
    (whole,) = tokenizer.encode([text])
    assert np.concatenate(tokenizer.encode([piece.decode() for piece in pieces])).tolist() == whole.tolist()
    if kind in KNOWN and size == 200:
        assert len(pieces) > 1, "long texts are cut"


@pytest.mark.parametrize("kind", ["cl100k", "prefixed"])
@pytest.mark.parametrize("unit", ["word ", "ab\n"])
def test_long_texts_too(kind: str, unit: str) -> None:
    encoder = encoder_of(kind)
    prompt = encoder.render_chat([Message("user", unit * (5 * PIECE_BYTES // 4 // len(unit.encode())))])
    ids = encoder.encode(prompt)
    assert encoder.key_of(ids) == prompt.key
    assert encoder.count(prompt) == len(ids)
    tokenizer = encoder.tokenizer
    text = tokenizer.normalise(unit * (5 * PIECE_BYTES // 4 // len(unit.encode())), at_start=False)
    (whole,), pieces = tokenizer.encode([text]), tokenizer.cuts.pieces(text.encode())
    assert np.concatenate(tokenizer.encode([piece.decode() for piece in pieces])).tolist() == whole.tolist()


def test_counting_stops_when_there_are_too_many() -> None:
    encoder = encoder_of("cl100k")
    prompt = encoder.render_chat([Message("user", "12 " * PIECE_BYTES)])
    num_ids = encoder.count(prompt)
    assert len(encoder.encode(prompt, most=num_ids)) == num_ids
    with pytest.raises(PromptTooLong, match="tokens > 100 maximum"):
        encoder.encode(prompt, most=100)


def test_a_word_of_a_million_characters_is_refused_before_a_tokenizer_panics() -> None:
    encoder = encoder_of("cl100k")
    with pytest.raises(BadRequest, match="one word"):
        encoder.encode(encoder.render_chat([Message("user", " " * (2 * LONGEST_WORD))]))
