"""What comes from a backend: events out of bytes, however these are cut, and chunks that are none."""

from __future__ import annotations

import json

import pytest

from rekindle.errors import BackendFailed
from rekindle_backends.wire import EventLines, Piece, ScoredToken, read_piece


def test_events_do_not_depend_on_where_the_bytes_are_cut() -> None:
    said = [json.dumps({"text": "one\u2028line \u0085 é"}, ensure_ascii=False), "[DONE]"]
    data = "".join(f": ping\r\n\r\ndata: {each}\r\n\r\n" for each in said).encode()
    for at in range(len(data) + 1):
        lines = EventLines()
        assert [*lines.push(data[:at]), *lines.push(data[at:])] == said


def test_a_chunk_with_log_probabilities() -> None:
    logprobs = {"token_logprobs": [-0.5], "top_logprobs": [{"token_id:7": -0.5, "token_id:9": -2}]}
    choice = {"token_ids": [7], "logprobs": logprobs, "finish_reason": None}
    assert read_piece(json.dumps({"choices": [choice]})) == Piece((7,), (ScoredToken(-0.5, {7: -0.5, 9: -2.0}),))


@pytest.mark.parametrize(
    ("logprobs", "says"),
    [
        ({"token_logprobs": [-0.5], "top_logprobs": [{}]}, "1 log probabilities for 2 tokens"),
        ({"token_logprobs": [-0.5, -1.0], "top_logprobs": [{" attic": -0.5}, {}]}, "by text, not by id"),
        ({"token_logprobs": [None, -1.0]}, "no chunk"),
    ],
)
def test_log_probabilities_that_do_not_fit_the_tokens(logprobs: dict[str, object], says: str) -> None:
    chunk = {"choices": [{"token_ids": [7, 9], "logprobs": logprobs}]}
    with pytest.raises(BackendFailed, match=says):
        read_piece(json.dumps(chunk))


def usage(cached: object) -> str:
    return json.dumps({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": cached}}})


@pytest.mark.parametrize(
    "data",
    [
        "[]",
        "null",
        '{"choices": [{}, {}]}',
        *(json.dumps({"choices": [{"token_ids": [odd]}]}) for odd in ("a", "8", 3.7, True, None, [1])),
        *(json.dumps({"choices": [{"token_ids": [1], "finish_reason": odd}]}) for odd in (["stop"], 1, True)),
        *map(usage, ("many", 1.5, True, -1, [1])),
        "[" * 100_000,
        '{"choices": ' + "[" * 100_000,
    ],
    ids=lambda data: data[:60],
)
def test_what_is_no_chunk(data: str) -> None:
    with pytest.raises(BackendFailed, match="no chunk of a completion"):
        read_piece(data)


def test_a_line_without_an_end_is_given_up() -> None:
    lines, piece = EventLines(), b"data: " + b"x" * (1 << 20)
    with pytest.raises(BackendFailed, match=r"a line of more than \d+ MiB"):
        for _ in range(64):
            assert not [*lines.push(piece)]
