"""What llama-server sends: tokens, what it leaves out, progress, ends, and what is none of these."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from itertools import takewhile

import pytest

from rekindle.errors import BackendFailed, BadRequest
from rekindle.text.constraints.types import Constraint
from rekindle_backends.llama.calls import written
from rekindle_backends.llama.gaps import Gaps
from rekindle_backends.llama.wire import EventReader
from rekindle_backends.wire import Piece, ScoredToken
from tests.backends.foreign import event, last_event

GAPS = Gaps([bytes([byte]) for byte in range(256)])


def data_of(*events: bytes) -> Iterator[str]:
    for each in events:
        yield each.decode().removeprefix("data: ").strip()


def pieces_of(*events: bytes) -> list[Piece]:
    reader = EventReader(GAPS, 9)
    return [reader.read(data) for data in data_of(*events)]


def scored(token_id: int) -> dict[str, object]:
    top = [{"id": token_id, "logprob": -0.5}, {"id": 9, "logprob": -2}]
    return {"completion_probabilities": [{"id": token_id, "logprob": -0.5, "top_logprobs": top}]}


def test_tokens_and_those_that_are_left_out() -> None:
    found = pieces_of(event(1, 65, "A"), event(3, 0xA9, "é"), event(4, 66, "B"), last_event(6, "limit", cached=7))
    assert found == [Piece((65,)), Piece((0xC3, 0xA9)), Piece((66,)), Piece(reason="length", cached_tokens=7)]
    # Two were left out, and the text has one byte for them.
    assert pieces_of(event(3, 0xA9, "é")) == [Piece((0xC3, 0xA9), is_certain=False)]


def test_tokens_of_a_draft_that_have_one_number() -> None:
    """Builds before b11434 count all tokens of a draft before they send them."""
    one = [event(1, 65, "A"), event(4, 66, "B"), event(4, 67, "C"), event(4, 68, "D"), event(5, 69, "E")]
    assert pieces_of(*one) == [Piece((65,)), Piece(), Piece(), Piece((66, 67, 68)), Piece((69,))]
    inside = [event(4, 65, "A"), event(4, 0xA9, "é"), event(4, 66, "B")]
    assert pieces_of(*inside) == [Piece(), Piece((65, 0xC3, 0xA9), is_certain=False), Piece((66,))]
    at_its_end = [event(3, 65, "A"), event(3, 66, "B"), event(4, 0xA9, "é")]
    assert pieces_of(*at_its_end) == [Piece(), Piece(), Piece((65, 66, 0xC3, 0xA9))]
    # The reply ended in the middle of one, or tokens of one never came.
    assert pieces_of(event(3, 65, "A"), last_event(3))[-1] == Piece((65,), (), "length", 0, is_certain=False)
    assert pieces_of(event(3, 65, "A"), event(4, 66, "B"))[-1] == Piece((65, 66), is_certain=False)


def test_how_many_are_left_out_in_a_draft_is_not_certain() -> None:
    """Two ids fit, where it was one, and another one is to come."""
    pieces = [bytes([each]) for each in range(256)] + [b"\xf0\x9f\x99", b"\x9f\x99"]
    events = [*data_of(event(3, 0x82, "🙂"), event(3, 66, "B"))]
    reader = EventReader(Gaps(pieces), 9, may_draft=True)
    assert [reader.read(data).is_certain for data in events] == [False, True]
    reader = EventReader(Gaps(pieces), 9)
    assert reader.read(events[0]) == Piece((0xF0, 257, 0x82))


@pytest.mark.parametrize("seed", range(20))
def test_drafts_of_every_length_are_read(seed: int) -> None:
    """What is certain is what was drawn, and the text is right."""
    draw, parts = random.Random(seed), (b"\xf0\x9f", b"\x9f\x99", b"\xf0\x9f\x99", b"\x99\x82")
    pieces = [*(bytes([each]) for each in range(256)), *(text.encode() for text in ("é", "🙂", "ab", "b ")), *parts]
    drawn, rest = list[int](), "".join(draw.choices("ab cé🙂", k=60)).encode()
    while rest:
        drawn.append(draw.choice([number for number, piece in enumerate(pieces) if rest.startswith(piece)]))
        rest = rest.removeprefix(pieces[drawn[-1]])
    events, num, unsent = list[bytes](), 0, b""
    while num < len(drawn):
        first, num = num, min(len(drawn), num + draw.choice([1, 1, 2, 3, 5]))
        for token in drawn[first:num]:
            unsent += pieces[token]
            with contextlib.suppress(UnicodeDecodeError):
                events.append(event(num, token, unsent.decode()))
                unsent = b""
    reader = EventReader(Gaps(pieces), 9, may_draft=True)
    found = [reader.read(data) for data in data_of(*events, last_event(num))]
    certain = [token for piece in takewhile(lambda each: each.is_certain, found) for token in piece.token_ids]
    assert certain == drawn[: len(certain)]
    read = b"".join(pieces[token] for piece in found for token in piece.token_ids)
    assert read == b"".join(pieces[token] for token in drawn)


def test_log_probabilities_of_those_that_came() -> None:
    score = ScoredToken(-0.5, {0xA9: -0.5, 9: -2.0})
    assert pieces_of(event(2, 0xA9, "é", **scored(0xA9))) == [Piece((0xC3, 0xA9), (None, score))]


def test_the_token_that_ends_a_reply_is_none_of_it() -> None:
    events = (
        event(1, 65, "A", **scored(65)),
        event(2, 1, "", **scored(1)),
        event(3, 2, "", **scored(2)),
        last_event(3, "eos"),
    )
    score = ScoredToken(-0.5, {1: -0.5, 9: -2.0})
    assert pieces_of(*events)[1:] == [Piece(), Piece(), Piece((1,), (score,), "stop", 0)]
    assert pieces_of(event(1, 2, ""), last_event(1, "eos"))[-1] == Piece(reason="stop", cached_tokens=0)
    # One that ends nothing is part of it.
    assert pieces_of(event(1, 1, ""), event(2, 65, "A"), last_event(2))[:2] == [Piece(), Piece((1, 65))]
    assert pieces_of(event(1, 1, ""), last_event(1))[-1] == Piece((1,), reason="length", cached_tokens=0)


def test_progress_has_no_tokens() -> None:
    progress = {"prompt_progress": {"total": 9, "cache": 3, "processed": 5, "time_ms": 1}}
    found = pieces_of(event(0, 0, **progress), event(1, 65, "A"))
    assert found == [Piece(cached_tokens=3, done_tokens=5), Piece((65,))]
    with pytest.raises(BackendFailed, match="another prompt"):  # than one of nine tokens
        pieces_of(event(0, 0, prompt_progress={"total": 8, "cache": 3, "processed": 5}))


@pytest.mark.parametrize(("kind", "reason"), [("eos", "stop"), ("word", "stop"), ("limit", "length"), ("none", "none")])
def test_ends(kind: str, reason: str) -> None:
    assert [piece.reason for piece in pieces_of(last_event(0, kind))] == [reason]


@pytest.mark.parametrize(
    "events",
    [
        [b"data: []\n\n"],
        [b"data: {}\n\n"],
        [event(0, 65)],
        [event(2, 0xA9, "é"), event(2, 66, "B")],
        [event(1, 65, "A", tokens=[])],
        [event(1, 65, "A", tokens=["65"])],
        [event(1, 65, "A", tokens_predicted="1")],
        [event(1, 65, "A", completion_probabilities=[{}])],
        [event(0, 0, prompt_progress={"cache": -1, "processed": 0})],
        [event(1, 65, "A", completion_probabilities=[{"id": 65, "logprob": float("nan")}])],
        [event(2, 65, "A" * 600)],
        [event(1 << 40, 65, "A" * 1_000_000)],
        [b"data: " + b"[" * 100_000 + b"\n\n"],
    ],
    ids=lambda events: str(events[-1])[:80],
)
def test_what_is_no_event(events: list[bytes]) -> None:
    with pytest.raises(BackendFailed, match="no chunk of a completion"):
        pieces_of(*events)


def test_an_error_in_a_stream() -> None:
    said = json.dumps({"error": {"code": 500, "message": "Context size has been exceeded."}})
    with pytest.raises(BackendFailed, match="the backend failed: Context size"):
        pieces_of(f"data: {said}\n\n".encode())


@pytest.mark.parametrize(
    ("constraint", "fields"),
    [
        (Constraint("json", {"type": "string"}), {"json_schema": {"type": "string"}}),
        (Constraint("json", True), {"json_schema": {}}),
        (
            Constraint("choice", ('say "a"', "b\\c\n", "数")),
            {"grammar": r'root ::= "say \x22a\x22" | "b\x5cc\x0a" | "数"'},
        ),
        (Constraint("grammar", 'root ::= "a"'), {"grammar": 'root ::= "a"'}),
    ],
)
def test_constraints(constraint: Constraint, fields: dict[str, object]) -> None:
    assert written(constraint) == fields


def test_a_grammar_in_another_notation() -> None:
    with pytest.raises(BadRequest, match="not in Lark's"):
        written(Constraint("grammar", 'start: "a"'))
