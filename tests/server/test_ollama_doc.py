"""docs/ollama.md does what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from rekindle.model.sampling_defaults import HABITS
from rekindle.server.border import OLLAMA, UNMANAGED
from rekindle.server.ollama.bodies import OFF, OllamaChatBody, OllamaGenerateBody, OllamaOptions
from rekindle.server.ollama.models import VERSION, OllamaChatAnswer
from tests.server.conftest import Served

DOC = Path(__file__).parents[2].joinpath("docs", "ollama.md").read_text("utf-8")


def test_the_examples_run(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", DOC, re.DOTALL | re.MULTILINE)
    program = "\n".join(blocks).replace("http://127.0.0.1:7354", served.url)
    exec(compile(program, "docs/ollama.md", "exec"), {})
    said, figures, shown = capsys.readouterr().out.splitlines()[-3:]
    num_prompt, num_reply, reason = figures.split()
    assert said.strip() and int(num_prompt) > 40 and int(num_reply) > 0 and reason in ("stop", "length")
    assert shown == "['completion', 'tools'] pocket:latest"


def test_its_names_are_those_of_the_code() -> None:
    told = set(re.findall(r"`\"?([a-z_]+)", DOC)) | set(re.findall(r"/api/([a-z]+)", DOC))
    assert {*OLLAMA, *UNMANAGED, "embed", "embeddings"} <= told
    common = {"model", "stream", "rekindle", "options", "messages", "prompt", "system"}  # said in words
    assert {*OllamaChatBody.model_fields, *OllamaGenerateBody.model_fields} - common <= told
    plain = {"min_p", "seed", "stop", "presence_penalty", "frequency_penalty"}
    assert set(OllamaOptions.model_fields) - plain <= told and set(OFF) - {"embedding_only"} <= told
    assert {name for name in OllamaChatAnswer.model_fields if name.endswith(("_count", "_duration"))} <= told
    for reason in get_args(get_args(OllamaChatAnswer.model_fields["done_reason"].annotation)[0]):
        assert f"`{reason}`" in DOC
    for name, value in HABITS["ollama"].items():
        assert f"`{name}` {value}" in DOC
    assert f"answers {VERSION}," in DOC
