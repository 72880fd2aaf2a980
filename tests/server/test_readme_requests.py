"""What the README sends is answered as it stands there."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from rekindle.config import ServerSettings
from tests.server.conftest import Served

BLOCKS = re.findall(
    r"^```sh\n(.*?)^```", (Path(__file__).parents[2] / "README.md").read_text(), re.MULTILINE | re.DOTALL
)


def test_its_curl_is_answered_and_remembered(served: Served) -> None:
    (command,) = (block for block in BLOCKS if block.startswith("curl "))
    address = f"http://127.0.0.1:{ServerSettings().port}"
    assert address in command, "it asks the default port"
    command = command.replace(address, f"-sSf {served.url}")
    answers = []
    for _ in range(2):
        done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, check=True)
        answers.append(json.loads(done.stdout))
    assert answers[0]["choices"][0]["message"]["content"]
    assert answers[1]["rekindle"]["outcome"] == "exact"
