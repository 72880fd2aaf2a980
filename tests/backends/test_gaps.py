"""Ids that a stream leaves out are found by their text: those that were there, or it is said that others fit, too."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle import pocket
from rekindle.model.described import DescribedModel
from rekindle.text.prompt import PromptEncoder
from rekindle_backends.llama.gaps import Filling, Gaps

BYTES = [bytes([byte]) for byte in range(256)]
MERGED = [b"  ", b" \xf0\x9f", b"\xf0\x9f", b"\x9f\x99", b"\xe6\x95", b"\xd0\xbf\xd1", "数".encode(), b" \xe6"]
BYTE_LEVEL = [*BYTES, *MERGED, b"", b""]
# Sentencepiece has whole characters, bytes for others, and the bytes of ASCII twice.
FALLBACK = [b"", b"", b"", *BYTES, *(char.encode() for char in "abc п数é"), "при".encode(), b" a", b"ab"]
ENDS = {len(BYTE_LEVEL) - 1}
CHARS = "ab п数é🙂🚀\u0301"
SCRIPTS = "🙂🚀🦊数字汉语你好世界龍鬱привет мирЖщёab eไทยहिन्दी한국어éßø"


def incomplete(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.end == len(data) and error.reason == "unexpected end of data"
    return False


def streamed(pieces: list[bytes], ids: list[int]) -> list[tuple[list[int], int, str]]:
    """What llama-server sends of ids: those left out before each, it, and the text of all."""
    found, held, text = [], list[int](), b""
    for token_id in ids:
        text += pieces[token_id]
        if incomplete(text):
            held.append(token_id)
        else:
            found.append((held, token_id, text.decode("utf-8", "replace")))
            held, text = [], b""
    return found


def all_fillings(pieces: list[bytes], ends: set[int], num_missing: int, came: int, text: str) -> list[list[int]]:
    """Every choice of ids that would be left out before this one and have this text, one by one."""
    usable = [each for each, piece in enumerate(pieces) if each not in ends and piece in text.encode()]
    choices = itertools.product(usable, repeat=num_missing)
    return [[*ids] for ids in choices if streamed(pieces, [*ids, came]) == [([*ids], came, text)]]


def tokenised(pieces: list[bytes], data: bytes) -> st.SearchStrategy[list[int]]:
    """Ids with these bytes, in any of the ways there are."""

    @st.composite
    def draw(draw: st.DrawFn) -> list[int]:
        ids, at = [], 0
        while at < len(data):
            fitting = [n for n, piece in enumerate(pieces) if piece and data.startswith(piece, at)]
            ids.append(draw(st.sampled_from(fitting)))
            at += len(pieces[ids[-1]])
        return ids

    return draw()


@pytest.mark.parametrize("pieces", [BYTE_LEVEL, FALLBACK], ids=["byte_level", "fallback"])
@given(data=st.data(), text=st.text(CHARS, max_size=6))
def test_a_gap_is_filled_with_what_was_there(pieces: list[bytes], data: st.DataObject, text: str) -> None:
    gaps, ids = Gaps(pieces, ENDS), data.draw(tokenised(pieces, text.encode()))
    for missing, came, said in streamed(pieces, ids):
        if not missing:
            continue
        found = gaps.fill(len(missing), came, said)
        assert b"".join(pieces[each] for each in (*found.ids, came)).decode() == said
        assert len(found.ids) == len(missing)
        if found.is_only:
            assert [*found.ids] == missing


@pytest.mark.parametrize("pieces", [BYTE_LEVEL, FALLBACK], ids=["byte_level", "fallback"])
@given(data=st.data(), text=st.text("a п数🙂", min_size=1, max_size=2))
def test_it_is_the_only_answer_where_it_says_so(pieces: list[bytes], data: st.DataObject, text: str) -> None:
    gaps, ids = Gaps(pieces, ENDS), data.draw(tokenised(pieces, text.encode()))
    for missing, came, said in streamed(pieces, ids):
        if missing:
            every = all_fillings(pieces, ENDS, len(missing), came, said)
            assert gaps.fill(len(missing), came, said).is_only == (len(every) == 1)


def test_what_a_tokenizer_has_cut_has_one_answer() -> None:
    """So a reply is remembered whole unless it is drawn in other tokens."""
    encoder, chosen, num_gaps = PromptEncoder.from_dir(pocket.model_dir()), random.Random(1), 0
    shown = [encoder.vocabulary.shown(each) or b"" for each in range(encoder.vocabulary.size)]
    gaps = Gaps(shown, DescribedModel.read(pocket.model_dir()).eos_ids)
    for _ in range(100):
        text = "".join(chosen.choices(SCRIPTS, k=30))
        ids = encoder.encode(encoder.render_text(text, add_leading=False)).tolist()
        for missing, came, said in streamed(shown, ids):
            if missing:
                assert gaps.fill(len(missing), came, said) == Filling(tuple(missing), is_only=True)
                num_gaps += 1
    assert num_gaps > 1000


def test_a_grammar_has_no_control_tokens() -> None:
    assert Gaps(BYTE_LEVEL, ENDS).in_grammar().fill(3, 0x82, "🙂") == Filling((0xF0, 0x9F, 0x99), is_only=True)


@pytest.mark.parametrize(
    ("num_missing", "came", "text", "expected"),
    [
        (2, 0x82, "🙂", Filling((258, 0x99), is_only=False)),  # F0 9F and 99, or F0 and 9F 99
        (3, 0x82, "🙂", Filling((0xF0, 0x9F, 0x99), is_only=False)),  # or F0 9F, 99 and a control token
        (1, 0x82, "🙂", Filling((258, 0x99), is_only=False)),  # nothing fits: as many as the text takes
        (1, 0x41, "\ufffdA", Filling((0xEF, 0xBF, 0xBD), is_only=False)),  # bytes that are no UTF-8
        (65, 0x82, "🙂", Filling((258, 0x99), is_only=False)),
        (1, 1 << 20, "x", Filling((0x78,), is_only=False)),
        (1, 0x42, "A", Filling((), is_only=False)),
    ],
)
def test_what_is_not_certain(num_missing: int, came: int, text: str, expected: Filling) -> None:
    assert Gaps(BYTE_LEVEL, ENDS).fill(num_missing, came, text) == expected
