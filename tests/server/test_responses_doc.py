"""docs/responses.md does what it says."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from rekindle.config import RESPONSES_FILE
from rekindle.server.responses import stored
from rekindle.server.responses.items import ITEM_TYPES
from rekindle.server.responses.tools import LEFT_OUT
from tests.server.conftest import Served

DOC = Path(__file__).parents[2].joinpath("docs", "responses.md").read_text("utf-8")
URL = "http://127.0.0.1:7354"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOC, re.DOTALL | re.MULTILINE)


def test_the_examples_run(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    program = "\n".join(blocks("python")).replace(URL, served.url)
    program = program.replace(
        "max_output_tokens=8", "max_output_tokens=8, temperature=0"
    )  # else a reply may have lines
    exec(compile(program, "docs/responses.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert int(said[0].split()[-1]) > 16, "the second response reuses the first"
    assert said[-1] in [f"{status} ['message', 'message', 'message']" for status in ("completed", "incomplete")]
    (command,) = blocks("bash")
    done = subprocess.run(["bash", "-c", command.replace(URL, served.url)], capture_output=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["object"] == "response"
    assert answer["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}


def test_its_figures_and_names_are_those_of_the_code() -> None:
    assert f"at most {stored.MAX_RESPONSES:,} of a namespace" in DOC
    assert f"never more than {stored.MAX_BYTES >> 30} GiB packed" in DOC
    assert f"{stored.RETENTION_S / 86400:.0f} days" in DOC
    assert RESPONSES_FILE in DOC
    for name in (*ITEM_TYPES, "web_search", "image_generation", "tool_search"):
        assert f"`{name}`" in DOC
    assert {"web_search", "image_generation", "tool_search"} <= LEFT_OUT
