"""Long texts are composed piece by piece, as the whole would be."""

from __future__ import annotations

import sys
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from rekindle.errors import BadRequest
from rekindle.text.tokenizer import MOST_COMBINING, composed, stands_apart

NFC = normalizers.NFC()
# Letters with marks of several classes and orders, syllables in parts, vowels of two signs, singletons, an emoji
CHARS = "ae\u0301\u0323\u0308\u0345éẹ\u1112\u1161\u11ab한\u09c7\u09be\u0dd9\u0dcf\u0dca\u212b\u0958か\u3099🏽\u200d \n"


@settings(max_examples=500, deadline=None)
@given(text=st.text(st.sampled_from(CHARS), max_size=40) | st.text(max_size=20), size=st.integers(1, 5))
def test_pieces_are_composed_as_the_whole(text: str, size: int) -> None:
    sent = text.encode("utf-8", "replace").decode()
    assert composed(NFC, sent, size=size) == NFC.normalize_str(sent)


def test_no_character_that_composes_with_one_before_it_stands_apart() -> None:
    for char in map(chr, range(sys.maxunicode + 1)):
        parts = unicodedata.normalize("NFD", char)
        if unicodedata.combining(parts[0]):
            assert not stands_apart(char), hex(ord(char))
        if len(parts) > 1 and unicodedata.normalize("NFC", parts) == char:
            assert not any(map(stands_apart, parts[1:])), hex(ord(char))
    assert all(map(stands_apart, "aé日か한🙂\n \u1100אبдฉक"))


def test_marks_without_an_end_are_refused() -> None:
    assert composed(NFC, "e" + "\u0301" * MOST_COMBINING) == "é" + "\u0301" * (MOST_COMBINING - 1)
    with pytest.raises(BadRequest, match="combining characters in a row"):
        composed(NFC, "\u0301" * (4 * MOST_COMBINING))
