"""Safe cuts are starts of settled pre-tokens of the whole text, also in texts too long to split from their start."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from rekindle.text.splitters import is_known
from rekindle.text.vocabulary import WHITE_SPACE, control_code
from tests.text.factories import KEPT, SNIPPETS, UNFLAGGED, encoder_of, full_tokenizer, tokenizer_json

KNOWN = ("gpt2", "cl100k", "o200k", "deepseek", "nfc", "words", "prefixed")
# Of tokenizers that put a space before a text, the same without: cuts are made in texts that have it.
SPLITTERS = {
    "prefixed": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "words": pre_tokenizers.Metaspace("▁", prepend_scheme="never", split=True),
}
ADDED = re.compile("|".join(map(re.escape, (*KEPT, *UNFLAGGED[:3]))))


def pre_tokens(kind: str, text: str) -> list[tuple[int, str]]:
    """(byte offset, text) of the pre-tokens of a whole text: the oracle."""
    splitter = SPLITTERS.get(kind, full_tokenizer(kind).pre_tokenizer)
    found, at = [], 0
    for part in re.split(f"({ADDED.pattern})", text):
        if ADDED.fullmatch(part):
            found.append((at, part))
        elif part:
            starts = [first for _, (first, _) in splitter.pre_tokenize_str(part)]
            for start, end in zip(starts, [*starts[1:], len(part)], strict=True):
                found.append((at + len(part[:start].encode()), part[start:end]))
        at += len(part.encode())
    return found


@pytest.mark.parametrize("kind", KNOWN)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.sampled_from([20, 1500]))
def test_cuts_are_starts_of_pre_tokens(kind: str, seed: int, size: int) -> None:
    encoder, rng = encoder_of(kind), random.Random(seed)
    text = "Begin" + "".join(rng.choice(SNIPPETS) for _ in range(size))
    text = encoder.tokenizer.normalise(text.replace("▁", "_").replace("<tool_call>", ""), at_start=False)
    key = control_code(3) + text.encode()
    divergence = rng.randint(max(5, len(key) // 2), len(key))
    limit = max(5, divergence - rng.choice([0, 0, 1, 40]))
    cuts = list(encoder.safe_cuts(key, limit, divergence))
    whole = {at + 5: word for at, word in pre_tokens(kind, text)}
    assert cuts == sorted(set(cuts), reverse=True)
    assert cuts[0] <= limit
    assert cuts[-1] == 5, "the segment's start comes last"
    for cut in cuts[:-1]:
        assert cut in whole, f"{key[cut - 9 : cut]!r} | {key[cut : cut + 9]!r}"
        assert whole[cut].strip(WHITE_SPACE), "blanks are cut by what follows them"
        assert cut + 1 < divergence, "what touches the difference is not settled"
    if size > 1000 and kind != "words":
        assert limit - cuts[0] < 200


def test_next_to_control_tokens() -> None:
    encoder = encoder_of("unknown")
    key = b"abc def" + control_code(3) + b"ghi jkl" + control_code(4)
    assert list(encoder.safe_cuts(key, len(key), len(key))) == [len(key)]
    assert list(encoder.safe_cuts(key, len(key) - 2, len(key))) == [19]
    assert list(encoder.safe_cuts(key, 19, 19)) == [12]
    assert list(encoder.safe_cuts(key, 12, 14)) == [12]
    assert list(encoder.safe_cuts(key, 6, 6)) == [0]
    assert list(encoder.safe_cuts(b"", 0, 0)) == [0]


def test_a_control_token_settles_the_word_before_it() -> None:
    key = b"it'" + control_code(3) + b"s all"
    assert list(encoder_of("o200k").safe_cuts(key, 2, len(key))) == [2, 0]


def test_half_a_character_settles_nothing() -> None:
    encoder = encoder_of("gpt2")
    key = "a see日".encode()
    assert 1 not in list(encoder.safe_cuts(key, 5, 6))
    assert 1 in list(encoder.safe_cuts(key + b" x", len(key), len(key) + 1))


def test_texts_without_blanks_are_split_once() -> None:
    encoder = encoder_of("cl100k")
    key = ("日本語、" * 3000).encode()
    cuts = encoder.safe_cuts(key, len(key), len(key))
    assert len(key) - next(cuts) < 100


@pytest.mark.parametrize(
    "kind", ["gpt2", "cl100k", "o200k", "deepseek", "words", "prefixed", "unknown", "prepend", "first"]
)
def test_known_splitters(kind: str) -> None:
    known = is_known(json.loads(tokenizer_json(kind))["pre_tokenizer"])
    assert known == (kind in KNOWN)


def test_variants_of_known_patterns_are_unknown() -> None:
    data = json.loads(full_tokenizer("cl100k").to_str())["pre_tokenizer"]
    assert is_known(data)
    assert not is_known(data["pretokenizers"][1]), "bytes alone cut nothing"
    assert not is_known({"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}]})
    split = data["pretokenizers"][0]
    for change in (
        {"behavior": "Removed"},
        {"invert": True},
        {"pattern": {"Regex": r"\s+(?=x)|\S+"}},
        {"pattern": {"String": " "}},
    ):
        assert not is_known({**data, "pretokenizers": [{**split, **change}, data["pretokenizers"][1]]})
    assert not is_known(None)
