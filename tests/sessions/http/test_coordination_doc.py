"""The examples of docs/coordination.md, run as they stand there against a real server."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from rekindle.config import ServerSettings
from rekindle.model.params import BODIES
from rekindle_sessions.http.bodies import SamplingOptions, SessionBody
from tests.server.conftest import Served
from tests.sessions.http.coordinating import SESSIONS

PAGE = (Path(__file__).parents[3] / "docs" / "coordination.md").read_text()
# Each example, and what the page says of its answer, if it does.
EXAMPLES = re.findall(r"^```bash\n(.*?)^```(?:\n\n```json\n(.*?)^```)?", PAGE, re.MULTILINE | re.DOTALL)
ROUTES = (
    "turn",
    "round",
    "turn/stream",
    "vote",
    "messages",
    "whisper",
    "interrupt",
    "compare",
    "fork",
    "rewind",
    "merge",
)


def shape(value: Any, told: Any) -> Any:
    """A value, as far as the page tells of it: its keys and types; null may stand for anything."""
    if value is None and told is not None:
        return shape(told, told)
    if isinstance(told, dict):
        return {key: shape(value[key], told[key]) for key in told}
    if isinstance(told, list):
        return [shape(value[0], told[0])] if told else []
    return type(value) if not isinstance(value, int | float) or isinstance(value, bool) else float


def run(example: str, served: Served, session: str) -> str:
    command = example.replace(f"http://127.0.0.1:{ServerSettings().port}", served.url)
    assert served.url in command, "an example asks the default port"
    done = subprocess.run(
        ["bash", "-euc", command],
        env={**os.environ, "SESSION": session},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_route_has_an_example() -> None:
    for route in ROUTES:
        assert any(re.search(rf"/{route}['\"?\s]", example) for example, _ in EXAMPLES), route
    assert any("-X DELETE" in example for example, _ in EXAMPLES)


def test_every_field_of_a_session_is_told_of() -> None:
    for name in [*SessionBody.model_fields, *(SamplingOptions.model_fields.keys() - set(BODIES["sessions"]))]:
        assert f"`{name}`" in PAGE, name


def test_the_examples_answer_as_the_page_says(served: Served) -> None:
    answers_as_the_page_says(served)


def answers_as_the_page_says(served: Served) -> None:
    """Every example, in the page's order."""
    session, answers = "", []
    for example, told in EXAMPLES:
        text = run(example, served, session)
        if "/stream" in example:
            events = re.findall(r"^event: (\w+)$", text, re.MULTILINE)
            assert (events[0], events[-1]) == ("turn_start", "round_complete")
            continue
        answer = json.loads(text)
        answers.append(answer)
        session = session or answer["id"]
        if told:
            expected = json.loads(told)
            assert shape(answer, expected) == shape(expected, expected), f"{example}\n{text}"
    numbers = [answer["number"] for answer in answers if "number" in answer]
    expected_numbers = [json.loads(told)["number"] for _, told in EXAMPLES if told and '"number"' in told[:12]]
    assert numbers[: len(expected_numbers)] == expected_numbers, "messages are counted as the page says"
    assert served.send("GET", f"{SESSIONS}/{session}").status == 404
