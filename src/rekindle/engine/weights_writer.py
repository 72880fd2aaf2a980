"""A thread that writes the packed weights of a model to their file, once the model is served.

Owns when that happens: after the start, which takes no longer for it, and for a few seconds of a stop at most.
"""

from __future__ import annotations

import threading

from rekindle.model.loaded import Unsaved
from rekindle.worker import Worker

STOP_S = 5.0


class WeightsWriter:
    """Writes once. An unfinished file is removed, at the latest by the next writer."""

    def __init__(self, unsaved: Unsaved) -> None:
        stopped = self._stopped = threading.Event()
        self._worker = Worker(
            "packed-weights", lambda: unsaved.save(is_stopped=stopped.is_set), on_death=lambda death: None
        )

    def start(self) -> None:
        """Start writing; call once."""
        self._worker.start()

    def stop(self) -> None:
        """Let it finish within five seconds, then give it up, even if the disk does not answer; safe before `start`."""
        self._worker.join(STOP_S)
        self._stopped.set()
        self._worker.join(STOP_S)
