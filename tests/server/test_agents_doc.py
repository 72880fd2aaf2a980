"""The examples of docs/agents.md, run as they stand there against a real server."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from rekindle.config import ServerSettings
from tests.server.conftest import Served

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
# Each example, and what the page says of its answer, if it does.
EXAMPLES = re.findall(r"^```bash\n(.*?)^```(?:\n\n```json\n(.*?)^```)?", PAGE, re.MULTILINE | re.DOTALL)
ROUTES = ("prefill", "load", "pin", "fork", "rewind", "offload", "why", "export", "import", "purge")


def shape(value: Any, told: Any) -> Any:
    """A value, as far as the page tells of it: its keys and types."""
    if isinstance(told, dict):
        return {key: shape(value[key], told[key]) for key in told}
    if isinstance(told, list):
        return [shape(value[0], told[0])] if told else []
    return type(value) if not isinstance(value, int | float) or isinstance(value, bool) else float


def run(example: str, served: Served) -> Any:
    command = example.replace(f"http://127.0.0.1:{ServerSettings().port}", served.url)
    assert served.url in command, "an example asks the default port"
    done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout)


def test_every_route_has_an_example() -> None:
    assert len(EXAMPLES) >= 12
    for route in ROUTES:
        assert any(f"/{route}" in example for example, _ in EXAMPLES), route


def test_the_examples_answer_as_the_page_says(served: Served) -> None:
    answers = []
    for example, told in EXAMPLES:
        answer = run(example, served)
        answers.append(answer)
        if told:
            expected = json.loads(told)
            assert shape(answer, expected) == shape(expected, expected), example
            assert answer["id"] == expected["id"]
    prefilled, asked = answers[0]["rekindle"], answers[1]["rekindle"]
    assert asked["reused_tokens"] >= prefilled["computed_tokens"] - 8, "what was prefilled is found"
    loaded = next(answer for (example, _), answer in zip(EXAMPLES, answers, strict=True) if "/load" in example)
    assert loaded["rekindle"]["warm_tokens"] > 0
    assert served.send("GET", "/v1/agents/crew%2Fada").status == 404
