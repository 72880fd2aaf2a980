"""docs/anthropic.md does what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from rekindle.model.params import MAX_STOPS
from rekindle.server.anthropic.bodies import HARMLESS, MessagesBody
from rekindle.server.anthropic.models import StopReason
from rekindle.server.border import ANTHROPIC_TYPES
from tests.server.conftest import Served

DOC = Path(__file__).parents[2].joinpath("docs", "anthropic.md").read_text("utf-8")


def test_the_examples_run(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", DOC, re.DOTALL | re.MULTILINE)
    program = "\n".join(blocks).replace("http://127.0.0.1:7354", served.url)
    exec(compile(program, "docs/anthropic.md", "exec"), {})
    attic, reused, summed, warmed = capsys.readouterr().out.splitlines()
    assert attic.strip()
    assert int(reused) > 16
    assert summed == "The sum is 42."
    assert warmed.split(maxsplit=1)[1] == "[] max_tokens"


def test_its_names_are_those_of_the_code() -> None:
    for name in (*get_args(StopReason), *ANTHROPIC_TYPES.values()):
        assert f"`{name}`" in DOC, name
    told = set(re.findall(r"`([a-z_]+)", DOC))
    assert set(MessagesBody.model_fields) - {"model"} <= told | {"cache_control"}
    assert {"metadata", "service_tier", "container", "inference_geo", "speed"} <= HARMLESS & told
    assert f"{MAX_STOPS} stop sequences" in DOC
