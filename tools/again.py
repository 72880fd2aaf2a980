"""Stop the server named by PIDFILE, if any, and start COMMAND in its place; output goes to PIDFILE.log.

python tools/again.py KILL server.pid rekindle serve --store /var/tmp/day   # kill -9, then start
python tools/again.py TERM server.pid rekindle serve --store /var/tmp/day   # ask it to stop, wait, then start

For `rekindle bench replay --kill-cmd ... --restart-cmd ...`: returns once the old server is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def runs(process: int) -> bool:
    """Whether a process runs; a zombie does not count."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{process}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def main() -> None:
    """Stop the old server, wait for its end, and start the new one."""
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    name, file, *command = sys.argv[1:]
    place = Path(file).absolute()
    if place.exists():
        old = int(place.read_text())
        with contextlib.suppress(ProcessLookupError):
            os.kill(old, signal.Signals[f"SIG{name}"])
        while runs(old):
            time.sleep(0.02)
    with Path(f"{place}.log").open("ab") as log:
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    place.write_text(f"{started.pid}\n")


if __name__ == "__main__":
    main()
