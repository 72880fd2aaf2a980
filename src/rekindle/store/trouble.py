"""Whether saving works, and how it is told: loudly when it begins to fail, once, and again when it fails anew.

Owns the first and the last error. Read by any thread; only the writer's changes it.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class SaveTrouble:
    """`last_error` is None while saving works; `first_error` began the last trouble, at `first_error_at`."""

    def __init__(self) -> None:
        self.first_error: str | None = None
        self.first_error_at: float | None = None
        self.last_error: str | None = None

    def failed(self, error: BaseException, now: float) -> None:
        """A save has failed at wall time `now`."""
        said = f"{type(error).__name__}: {error}"
        if self.last_error is None:
            self.first_error, self.first_error_at = said, now
            logger.error(
                "SAVING FAILED, answers go on but will not survive a restart until this is mended: %s. "
                "Check free space, permissions and the disk of the store's directory.",
                error,
                exc_info=error,
            )
        self.last_error = said

    def mended(self) -> None:
        """A save has written blocks or moved turns."""
        if self.last_error is not None:
            logger.warning("saving works again; what could not be saved meanwhile is saved with its agent's next turn")
        self.last_error = None
