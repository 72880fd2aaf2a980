"""Histories whose replies encode to other tokens: a front continues what is stored, a fresh encoding does not."""

from __future__ import annotations

import pytest

from benchmarks.front.bench import FrontBench, History, measure
from rekindle.errors import ConfigError


@pytest.mark.parametrize("kind", ["cl100k", "always"])
def test_a_front_keeps_the_tokens_of_replies(kind: str) -> None:
    found, block_tokens = measure(FrontBench(histories=3, tokens=80), kind)
    assert len(found) == 3 and all(each.holds(block_tokens) for each in found), found
    assert all(each.front > each.alone and each.common < each.stored for each in found), found


def test_what_falls_short_is_seen() -> None:
    assert History(stored=200, common=10, front=136, alone=0, is_same_text=True).holds(64)
    assert not History(stored=200, common=10, front=135, alone=0, is_same_text=True).holds(64)
    assert not History(stored=200, common=10, front=200, alone=0, is_same_text=False).holds(64)
    with pytest.raises(ConfigError, match="tokenizer: x is none of gpt2"):
        FrontBench(kinds=("x",))
