"""vLLM's own server, whose worker is another process: what a response says, before and after a kill -9."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.vllm.engine import ALONE, MODEL, ROOT
from rekindle.store.admin import list_stores
from tests.fleet.serving import until

START_S = 300.0


@contextmanager
def server(directory: Path) -> Iterator[int]:
    """A server over this store, killed with its processes at the end; its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    transfer = {
        "kv_connector": "RekindleConnector",
        "kv_connector_module_path": "rekindle.bridge.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"dir": str(directory / "kv")},
    }
    flags = ["--model", str(MODEL), "--served-model-name", "pocket", "--host", "127.0.0.1", "--port", str(port)]
    flags += ["--kv-transfer-config", json.dumps(transfer)]
    flags += ["--dtype", "bfloat16", "--max-model-len", "2048", "--enforce-eager", "--block-size", "64"]
    env = os.environ | ALONE | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags],
            env=env,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_for(port, process, directory / "log")
        yield port
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
        else:
            return
    raise AssertionError(log.read_text()[-4000:])


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


def saved_blocks(directory: Path) -> int:
    """Blocks of a named agent that a start would find now."""
    return sum(store.num_blocks for store in list_stores(directory) if store.num_agents)


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
