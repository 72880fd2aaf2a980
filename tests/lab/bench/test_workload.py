"""Benchmark texts: as long as wanted, the same for every process, and sharing what they say they share."""

from __future__ import annotations

import numpy as np
import pytest

from rekindle.text.prompt import PromptEncoder
from rekindle_lab.bench.workload import Workload
from tests.tiny_models import write_tokenizer

CONTEXT = 600


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return PromptEncoder.from_dir(directory)


@pytest.fixture
def workload(encoder: PromptEncoder) -> Workload:
    return Workload(encoder, context=CONTEXT, seed=3)


def test_texts_have_the_wanted_length_and_are_reproducible(encoder: PromptEncoder, workload: Workload) -> None:
    for number in range(3):
        text = workload.base(number)
        assert CONTEXT - 12 <= len(workload.ids(text)) <= CONTEXT
        assert text == Workload(encoder, context=CONTEXT, seed=3).base(number)
        assert text != Workload(encoder, context=CONTEXT, seed=4).base(number)


def test_base_texts_have_no_beginning_in_common(workload: Workload) -> None:
    starts = {workload.base(number)[:24] for number in range(8)}
    assert len(starts) == 8


def test_an_extended_text_has_the_short_one_in_front(workload: Workload) -> None:
    base = workload.base(0)
    ids = workload.ids(base)
    longer = [workload.ids(workload.extended(base, 64, number)) for number in range(2)]
    for each in longer:
        assert 52 <= len(each) - len(ids) <= 64
        np.testing.assert_array_equal(each[: len(ids)], ids)
    assert longer[0].tolist() != longer[1].tolist()


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_diverged_text_keeps_its_share(workload: Workload, share: float) -> None:
    base, other = workload.base(0), workload.diverged(workload.base(0), share, 0)
    a, b = workload.ids(base), workload.ids(other)
    common = int(np.flatnonzero(a[: len(b)] != b[: len(a)])[0])
    assert abs(common / len(a) - share) < 0.05
    assert CONTEXT - 12 <= len(b) <= CONTEXT
