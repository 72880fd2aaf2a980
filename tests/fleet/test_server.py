"""vLLM's own server, whose worker is another process: what a response says, before and after a kill -9."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from tests.fleet.serving import until
from tests.fleet.vllm_server import saved_blocks, server


def asked(port: int, ids: list[int]) -> tuple[str, dict[str, int]]:
    """The reply to a prompt of token ids, and what the response says was reused."""
    body: dict[str, Any] = {"model": "pocket", "prompt": ids, "max_tokens": 4, "temperature": 0}
    body["kv_transfer_params"] = {"agent": "ada"}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.load(response)
    return answer["choices"][0]["text"], answer["kv_transfer_params"]["rekindle"]


def figure(port: int, name: str) -> float:
    """What /metrics says; AssertionError if it has no such figure."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith(f"rekindle_connector_{name}{{")]
    assert 'model_name="pocket"' in line
    return float(line.rsplit(" ", 1)[1])


def test_a_killed_server_continues_from_disk(tmp_path: Path) -> None:
    ids = list(range(300, 700))
    with server(tmp_path) as port:
        cold, reuse = asked(port, ids)
        assert reuse["reused_tokens"] == 0 and reuse["prompt_tokens"] == 400
        assert asked(port, ids)[1]["hot_tokens"] == 384
        until(lambda: saved_blocks(tmp_path / "kv") == 6, "the records, which are written after the answer")
    with server(tmp_path) as port:
        warm, reuse = asked(port, ids)
        assert warm == cold and reuse["loaded_tokens"] == reuse["reused_tokens"] == 384
        until(lambda: figure(port, "loaded_tokens_total") == 384, "the figures of the last step")
        assert figure(port, "requests_total") == 1 and figure(port, "records") == 6
