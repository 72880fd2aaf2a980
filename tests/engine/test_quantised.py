"""Quantised weights are served: turns are those of no reuse, to the token, also after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Start
from tests.engine.turns import turn, with_template
from tests.quantised_models import FORMS, quantised_dir
from tests.tiny_models import tiny_model_dir

TEXTS = ("What is on the table? " * 4, "A book.", "Where does the river end?", "In the sea.", "And then? " * 6)


def take_turns(start: Start, directory: Path, **settings: Any) -> None:
    """One turn, and two more after a restart each, which extend it."""
    asked = {"temperature": 0.0, "max_tokens": 8}
    for count in (1, 3, 5):
        engine = start(with_template(directory), **settings)
        result = engine.chat("ada", turn(*TEXTS[:count]), **asked)
        plain = engine.chat("plain", turn(*TEXTS[:count]), **asked, reuse="off")
        assert result.token_ids == plain.token_ids
        assert (result.report.reused_tokens > 60) == (count > 1)
        engine.flush()


@pytest.mark.parametrize("form", FORMS)
def test_turns_of_a_quantised_checkpoint(form: str, start: Start, tmp_path: Path) -> None:
    take_turns(start, quantised_dir(form, tmp_path))


@pytest.mark.parametrize("weights", ["bnb-4bit", "bnb-8bit"])
def test_turns_of_a_mixture_that_bitsandbytes_quantises(weights: str, start: Start, tmp_path: Path) -> None:
    take_turns(start, tiny_model_dir("mixtral", "bf16", tmp_path), weights=weights)
