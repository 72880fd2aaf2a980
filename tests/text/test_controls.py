"""Many control tokens with beginnings in common are found as by looking at each."""

from __future__ import annotations

import re
import string

from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.text.messages import GUARD, PIECE_CHARS
from rekindle.text.vocabulary import AddedToken, ControlTokens

few_letters = st.text("<a_b>", min_size=1, max_size=5)


def tokens_of(contents: set[str], single_words: set[str] = frozenset()) -> list[AddedToken]:
    """A token for each content, whose id is its place among the sorted."""
    return [
        AddedToken(number, content, True, single_word=content in single_words)
        for number, content in enumerate(sorted(contents))
    ]


def is_word(text: str, at: int) -> bool:
    return 0 <= at < len(text) and (text[at] in string.ascii_letters or text[at] == "_")


def looked_for(tokens: list[AddedToken], text: str) -> list[str | int]:
    """The text split at its tokens, leftmost, then longest, by trying each token at each place."""
    pieces: list[str | int] = []
    at = begun = 0
    while at < len(text):
        here = [
            token
            for token in tokens
            if text.startswith(token.content, at)
            and not (token.single_word and (is_word(text, at - 1) or is_word(text, at + len(token.content))))
        ]
        if not here:
            at += 1
            continue
        longest = max(here, key=lambda token: len(token.content))
        pieces += [text[begun:at]] if begun < at else []
        pieces.append(longest.id)
        at = begun = at + len(longest.content)
    return pieces + ([text[begun:]] if begun < len(text) else [])


@settings(max_examples=300, deadline=None)
@given(
    contents=st.sets(few_letters, max_size=12),
    single_words=st.sets(few_letters, max_size=4),
    text=st.text("<a_b>", max_size=30),
)
def test_tokens_are_found_leftmost_then_longest(contents: set[str], single_words: set[str], text: str) -> None:
    tokens = tokens_of(contents | single_words, single_words)
    controls = ControlTokens(tokens)
    assert controls.split(text) == looked_for(tokens, text)


@settings(max_examples=300, deadline=None)
@given(contents=st.sets(few_letters, max_size=12), text=st.text("<a_b>", max_size=30))
def test_every_place_where_a_token_begins_is_guarded(contents: set[str], text: str) -> None:
    guarded = ControlTokens(tokens_of(contents)).guard(text)
    expected = "".join(
        char + GUARD * any(text.startswith(content, at) for content in contents) for at, char in enumerate(text)
    )
    assert guarded.rstrip(GUARD) == expected.rstrip(GUARD), "a guard more at the end keeps the next text apart"


@settings(max_examples=100, deadline=None)
@given(
    contents=st.sets(few_letters, max_size=12),
    single_words=st.sets(few_letters, max_size=4),
    texts=st.lists(st.tuples(st.integers(-6, 2), st.text("<a_b>", max_size=12)), max_size=3),
)
def test_tokens_are_found_where_pieces_of_a_long_text_meet(
    contents: set[str], single_words: set[str], texts: list[tuple[int, str]]
) -> None:
    tokens = tokens_of(contents | single_words, single_words)
    controls, apart = ControlTokens(tokens), ""
    for number, (before, text) in enumerate(texts, start=1):
        apart += "." * (number * PIECE_CHARS + before - len(apart)) + text
    expected: list[str | int] = []
    guarded = ""
    for part in re.split(r"(\.+)", apart):
        pieces = [part] if part.startswith(".") else looked_for(tokens, part)
        joins = pieces and expected and isinstance(pieces[0], str) and isinstance(expected[-1], str)
        expected = [*expected[:-1], f"{expected[-1]}{pieces[0]}", *pieces[1:]] if joins else [*expected, *pieces]
        guarded += part if part.startswith(".") else controls.guard(part + ".")[:-1]
    assert controls.split(apart) == [each for each in expected if each != ""]
    assert controls.guard(apart + ".") == guarded + "."


def test_thousands_of_tokens_and_long_runs_are_told_apart() -> None:
    contents = {f"<unused{number}>" for number in range(5000)} | {"=" * length for length in range(2, 300)}
    tokens = tokens_of(contents)
    text = "<unused12><unused5000>" + "=" * 450 + "<unused4999>"
    assert ControlTokens(tokens).split(text) == looked_for(tokens, text)
