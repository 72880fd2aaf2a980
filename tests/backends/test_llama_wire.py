"""What llama-server sends: tokens, what it leaves out, progress, ends, and what is none of these."""

from __future__ import annotations

import json
from collections.abc import Iterator

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
