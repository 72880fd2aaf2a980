"""What one measuring process is asked to do, and how it is started: every arm runs in a process of its own.

A job travels as JSON on the command line; measurements come back as JSON lines on standard output. So no arm inherits
another one's memory, threads or warm caches, and a restart is a real one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rekindle.config import Settings
from rekindle.errors import RekindleError
from rekindle.harness.record import Measurement

MARK = "measured "


@dataclass(frozen=True, slots=True)
class Job:
    """One arm with its sizes in tokens; `flags` are settings by their flat names, `variant` is for the arm to read."""

    arm: str
    flags: Mapping[str, Any]
    context: int
    repeats: int
    seed: int
    extension: int = 64
    decode_tokens: int = 32
    variant: str = ""
    number: int = 0

    def settings(self, **changes: Any) -> Settings:
        """The settings of `flags`, some of them changed."""
        return Settings.load({**self.flags, **changes})


def run_job(job: Job) -> Iterator[Measurement]:
    """Run a job in a process of its own and give what it measures as it comes; RekindleError if it fails."""
    command = [sys.executable, "-m", "rekindle.bench.child", json.dumps(asdict(job))]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(MARK):
                    yield Measurement.from_dict(json.loads(line.removeprefix(MARK)))
        if process.returncode:
            errors.seek(0)
            raise RekindleError(f"the arm {job.arm} {job.variant} failed:\n{errors.read()[-2000:]}")
