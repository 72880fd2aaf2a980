"""Whether saving works: an error is logged when it starts to fail, once, and again after a recovery.

Owns the first and the last error. Any thread may read; only the writer thread changes it.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class SaveTrouble:
    """`last_error` is None while saving works; `first_error` started the latest failure, at `first_error_at`."""

    def __init__(self) -> None:
        self.first_error: str | None = None
        self.first_error_at: float | None = None
        self.last_error: str | None = None

    def failed(self, error: BaseException, now: float) -> None:
        """Report a save that failed at wall time `now`."""
        message = f"{type(error).__name__}: {error}"
        if self.last_error is None:
            self.first_error, self.first_error_at = message, now
            logger.error(
                "SAVING FAILED, answers continue but will not survive a restart until this is fixed: %s. "
                "Check free space, permissions and the disk of the store's directory.",
                error,
                exc_info=error,
            )
        self.last_error = message

    def recovered(self) -> None:
        """Report a save that has written blocks or moved turns."""
        if self.last_error is not None:
            logger.warning("saving works again; turns not saved meanwhile are saved with their agent's next turn")
        self.last_error = None
