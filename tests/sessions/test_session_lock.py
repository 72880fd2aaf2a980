"""One process at a time has the file of sessions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.errors import StoreLocked
from rekindle_sessions.log.records import SessionRecords


def test_second_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    records = SessionRecords.open(path)
    script = (
        "import sys; from pathlib import Path; from rekindle_sessions.log.records import SessionRecords\n"
        "SessionRecords.open(Path(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "StoreLocked" in done.stderr and "another process" in done.stderr
    with pytest.raises(StoreLocked):
        SessionRecords.open(path)
    records.close()
