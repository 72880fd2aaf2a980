"""Quantised checkpoints are served: their turns are those of no reuse, also after a restart, and so are their bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import Start
from tests.engine.turns import turn, with_template
from tests.quantised_models import FORMS, quantised_dir

TEXTS = ("What is on the table? " * 4, "A book.", "Where does the river end?", "In the sea.", "And then? " * 6)


@pytest.mark.parametrize("form", FORMS)
def test_turns_are_those_of_no_reuse(form: str, start: Start, tmp_path: Path) -> None:
    directory = with_template(quantised_dir(form, tmp_path))
    for count in (1, 3, 5):
        engine = start(directory)  # a restart, but for the first
        asked = {"temperature": 0.0, "max_tokens": 8}
        result = engine.chat("ada", turn(*TEXTS[:count]), **asked)
        plain = engine.chat("plain", turn(*TEXTS[:count]), **asked, reuse="off")
        assert result.token_ids == plain.token_ids
        assert (result.report.reused_tokens > 60) == (count > 1)
        engine.flush()
