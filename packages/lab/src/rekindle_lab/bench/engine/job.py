"""Jobs for measuring processes: every arm runs in its own process.

A job is passed as JSON on the command line; measurements come back as JSON lines on standard output. So no arm
inherits another's memory, threads or warm caches, and a restart is a real one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rekindle.config import Settings
from rekindle.errors import RekindleError
from rekindle_lab.bench.engine.gguf_file import GgufType
from rekindle_lab.record import Measurement

MARK = "measured "
# Groups of measures. A new prompt is always measured: what a model's context allows, and the rest, follow from it.
ROWS = ("cold", "saving", "hot", "diverge", "decode", "warm", "memory", "reuse", "capacity")


@dataclass(frozen=True, slots=True)
class Job:
    """One arm with its sizes in tokens; `flags` are settings by flat name, `variant` is interpreted by the arm.

    A peer gets its `file` with `weights`, and the first tokens that transformers finds fitting (`expected`).
    """

    arm: str
    flags: Mapping[str, Any]
    context: int
    repeats: int
    seed: int
    extension: int = 64
    decode_tokens: int = 32
    streams: Sequence[int] = field(default_factory=lambda: [1, 4, 8])  # that decode at once, one after the other
    rows: Sequence[str] = field(default_factory=lambda: [*ROWS])  # to measure
    num_cold: int = 1  # new prompts
    variant: str = ""
    number: int = 0
    file: str = ""
    weights: GgufType = "f16"
    expected: Sequence[Sequence[int]] = field(default_factory=list)  # as JSON returns it

    def settings(self, **changes: Any) -> Settings:
        """Return the settings of `flags` with changes."""
        return Settings.load({**self.flags, **changes})


def run_job(job: Job) -> Iterator[Measurement]:
    """Run a job in its own process and yield its measurements as they arrive; RekindleError if it fails."""
    command = [sys.executable, "-m", "rekindle_lab.bench.engine.child", json.dumps(asdict(job))]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(MARK):
                    yield Measurement.from_dict(json.loads(line.removeprefix(MARK)))
        if process.returncode:
            errors.seek(0)
            raise RekindleError(f"the arm {f'{job.arm} {job.variant}'.strip()} failed:\n{errors.read()[-2000:]}")
