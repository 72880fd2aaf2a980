"""vLLM's own server with our connector, as a process that can be killed."""

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

from benchmarks.vllm.engine import ALONE, CODE, MODEL
from rekindle.store.admin import list_stores

START_S = 300.0
ENVIRONMENT = os.environ | ALONE | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": ":".join(map(str, CODE))}


@contextmanager
def server(directory: Path, *more: str) -> Iterator[int]:
    """A server over this store with more flags, killed with its processes at the end; its port."""
    port = free_port()
    transfer = {
        "kv_connector": "RekindleConnector",
        "kv_connector_module_path": "rekindle_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"dir": str(directory / "kv")},
    }
    flags = ["--model", str(MODEL), "--served-model-name", "pocket", "--host", "127.0.0.1", "--port", str(port)]
    flags += ["--kv-transfer-config", json.dumps(transfer)]
    flags += ["--dtype", "bfloat16", "--max-model-len", "2048", "--enforce-eager", "--block-size", "64", *more]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags],
            env=ENVIRONMENT,
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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def saved_blocks(directory: Path) -> int:
    """Blocks of a named agent that a start would find now."""
    return sum(store.num_blocks for store in list_stores(directory) if store.num_agents)


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
