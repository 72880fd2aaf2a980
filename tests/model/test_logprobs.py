"""What is told of a token's likelihood: log-softmax of the row, the likeliest first, ties by id."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rekindle.model.logprobs import TokenLogprob
from rekindle.model.row_scores import score_rows


def raw(token: int) -> bytes:
    return bytes([token % 256])


def score(row: torch.Tensor, token: int, num_top: int) -> TokenLogprob:
    return score_rows(row[None], np.array([token], dtype=np.uint32), num_top).token(0, token, raw)


def test_the_alternatives_are_the_likeliest_in_order_and_add_up_to_one() -> None:
    row = torch.randn(20, generator=torch.Generator().manual_seed(0))
    told = score(row, 7, 20)
    expected = torch.log_softmax(row, 0)
    assert told.token_id == 7 and told.text == b"\x07"
    assert told.logprob == pytest.approx(float(expected[7]), abs=1e-6)
    assert [each.token_id for each in told.top] == expected.argsort(descending=True).tolist()
    assert sum(math.exp(each.logprob) for each in told.top) == pytest.approx(1.0, abs=1e-5)
    assert all(each.top == () and each.text == bytes([each.token_id]) for each in told.top)
    assert [each.token_id for each in score(row, 7, 3).top] == [each.token_id for each in told.top[:3]]


def test_ties_go_to_the_lowest_id_and_none_may_be_asked() -> None:
    row = torch.tensor([0.0, 1.0, 1.0, 1.0])
    assert [each.token_id for each in score(row, 0, 2).top] == [1, 2]
    assert score(row, 0, 0).top == ()
    assert len(score(row, 0, 20).top) == 4


def test_low_precision_rows_are_scored_in_single() -> None:
    row = torch.randn(3000, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    told = score(row, 5, 1)
    assert told.logprob == pytest.approx(float(torch.log_softmax(row.double(), 0)[5]), abs=1e-5)


def test_a_token_has_its_rank_and_those_after_a_tie_theirs() -> None:
    row = torch.tensor([-0.0, 2.0, 0.0, -1.0, -3.0, 2.0])
    assert [score(row, token, 0).rank for token in range(6)] == [3, 1, 3, 5, 6, 1]
    assert [(each.token_id, each.rank) for each in score(row, 0, 6).top] == [
        (1, 1),
        (5, 2),
        (0, 3),
        (2, 4),
        (3, 5),
        (4, 6),
    ]
