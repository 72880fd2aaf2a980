"""Processes of their own for tests, forked where the imports of a server are done already: once for all tests.

A server that is forked has the proofs of its model that earlier tests made: see tests/proofs.py.

Whoever sets what is imported first has set it for every later test of the same worker, so it is set here alone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import BinaryIO

from rekindle.cli import main
from rekindle.harness.client import ServerProcess
from tests.proofs import keep, lend

IMPORTED = [
    "rekindle.cli.commands",
    "rekindle.engine.api",
    "rekindle.server.serve",
    "rekindle_sessions.service.coordinator",
    "tests.store.killed",
]


def forking() -> ForkServerContext:
    """What makes processes, and pipes to them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


class Forked:
    """A command of `python -m rekindle.cli` with this environment, which writes to a log."""

    def __init__(self, command: Sequence[str], log: BinaryIO, environment: Mapping[str, str]) -> None:
        assert command[:3] == [sys.executable, "-m", "rekindle.cli"], command
        self._process = forking().Process(target=_command, args=(command[3:], log.name, dict(environment)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("rekindle", timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _command(arguments: Sequence[str], log: str, environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sink = os.open(log, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(sink, descriptor)
    sys.argv = ["rekindle", *arguments]
    store = arguments[arguments.index("--store") + 1]
    if store == "off":
        main()
        return
    lend(Path(store))
    try:
        main()
    finally:
        keep(Path(store))


# Without the seconds of imports that a process of its own takes. tests/server/test_process.py starts such a one.
ForkedServer = partial(ServerProcess, run=Forked)
