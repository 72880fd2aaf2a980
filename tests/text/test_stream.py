"""Streams give whole characters, hold back what may become a stop string, and lose nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.text.messages import GUARD, Message
from rekindle.text.stream import TextStream
from tests.text import factories
from tests.text.factories import encoder_of, odd_ids, texts


def run(stream: TextStream, ids: np.ndarray) -> tuple[str, list[str]]:
    pieces = [stream.push(int(token_id)) for token_id in ids]
    return "".join([*pieces, stream.finish()]), pieces


@pytest.mark.parametrize("kind", ["gpt2", "prepend"])
@settings(max_examples=100, deadline=None)
@given(text=texts, seed=st.integers(0, 9))
def test_pieces_join_to_the_text(kind: str, text: str, seed: int) -> None:
    encoder = encoder_of(kind)
    inside = int(odd_ids(kind, "a", 0)[0])
    whole, pieces = run(TextStream(encoder, after=inside), odd_ids(kind, text, seed))
    assert whole == text
    assert "\ufffd" not in whole
    assert all(text.startswith("".join(pieces[: n + 1])) for n in range(len(pieces)))


@settings(max_examples=200, deadline=None)
@given(
    text=texts, stop=st.lists(st.sampled_from(["the", "he q", "\n\n", "🙂", "123", "ing the", "<|end|>"]), max_size=3)
)
def test_stop_strings_end_the_text(text: str, stop: list[str]) -> None:
    stream = TextStream(encoder_of("gpt2"), stop)
    whole, pieces = run(stream, odd_ids("gpt2", text, 1))
    cut = min((text.find(end) for end in stop if end in text), default=len(text))
    assert whole == text[:cut]
    assert stream.stopped == any(end in text for end in stop)
    assert "".join(pieces) == whole or not stream.stopped


def test_only_what_may_stop_is_held_back() -> None:
    encoder = encoder_of("gpt2")
    by_text = {encoder.vocabulary.shown(i).decode("utf-8", "replace"): i for i in range(encoder.vocab_size)}
    stream = TextStream(encoder, ["abc", ""])
    assert [stream.push(by_text[char]) for char in "xabab"] == ["x", "", "", "ab", ""]
    assert (stream.finish(), stream.stopped) == ("ab", False)


def test_unfinished_characters() -> None:
    encoder = encoder_of("gpt2")
    ids = odd_ids("gpt2", "🙂", 0)
    byte_ids = [
        i for byte in "🙂".encode() for i in range(encoder.vocab_size) if encoder.vocabulary.shown(i) == bytes([byte])
    ]
    assert len(ids) >= 1
    stream = TextStream(encoder)
    assert [stream.push(i) for i in byte_ids[:3]] == ["", "", ""]
    assert stream.finish() == "\ufffd"
    stream = TextStream(encoder)
    assert "".join(stream.push(i) for i in byte_ids) == "🙂"
    assert stream.push(10**6) == ""


def test_special_tokens_are_silent_and_others_are_spelled() -> None:
    encoder = encoder_of("cl100k")
    full = factories.full_tokenizer("cl100k")
    ids = full.encode("<|start|>a<tool_call>b<|custom|><|end|>", add_special_tokens=False).ids
    assert run(TextStream(encoder), np.array(ids))[0] == "a<tool_call>b<|custom|>"
    assert encoder.decode(ids) == "a<tool_call>b<|custom|>"


@pytest.mark.parametrize("kind", ["cl100k", "prepend"])
def test_visible_tokens_are_spelled_behind_a_guard(kind: str) -> None:
    """In one piece, also while a stop string or a character is held back; the stop string does not reach over it."""
    encoder = encoder_of(kind)
    full = factories.full_tokenizer(kind)
    start, end = full.token_to_id("<|start|>"), full.token_to_id("<|end|>")
    ids = [start, *odd_ids(kind, "a<|start|>b", 0), start, *odd_ids(kind, "c", 0), end]
    text = f"{GUARD}<|start|>a<|start|>b{GUARD}<|start|>c"
    for stop in ([], ["bc", "b<|start|>c", f"{GUARD}<"]):
        whole, pieces = run(TextStream(encoder, stop, visible=frozenset((start,))), np.array(ids))
        assert whole == text
        assert f"b{GUARD}<|start|>" in pieces or f"{GUARD}<|start|>" in pieces
    stream = TextStream(encoder, ["ab"], visible=frozenset((start,)))
    assert (
        run(stream, np.array([*odd_ids(kind, "xa", 0), start, *odd_ids(kind, "ab", 0), start]))[0]
        == f"xa{GUARD}<|start|>"
    )
    assert (stream.stopped, stream.stop_text) == (True, "ab")
    half = next(i for i in range(encoder.vocab_size) if encoder.vocabulary.shown(i) == "é".encode()[:1])
    assert (
        run(TextStream(encoder, visible=frozenset((start,))), np.array([half, start]))[0] == f"\ufffd{GUARD}<|start|>"
    )


def test_the_guard_never_reaches_a_client() -> None:
    assert run(TextStream(encoder_of("gpt2")), odd_ids("gpt2", f"a{GUARD}b", 0))[0] == "a\ufffdb"


@pytest.mark.parametrize("kind", ["prepend", "always", "words", "prefixed", "gpt2"])
def test_replies_come_back_as_they_were_generated(kind: str) -> None:
    """The space that the tokenizer adds is not shown, so that it is not sent back and added twice."""
    encoder = encoder_of(kind, factories.UNFLAGGED_ROLES)
    asked = [Message("user", "Hello")]
    prompt = encoder.encode(encoder.render_chat(asked))
    later = encoder.render_chat([*asked, Message("assistant", "It works.<|user|>Really"), Message("user", "x")])
    reply = encoder.encode(later)[len(prompt) :]
    reply = reply[: list(reply).index(factories.full_tokenizer(kind).token_to_id("<|end|>"))]
    assert run(TextStream(encoder, after=int(prompt[-1])), reply)[0] == "It works.<|user|>Really"
    assert run(TextStream(encoder), reply)[0] == "It works.<|user|>Really"
