"""An engine that stands still at the moment a test chooses, however late the test is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rekindle.engine.api import Engine
from rekindle.engine.request import Request


@contextmanager
def held(engine: Engine, stops: Callable[[Request], bool]) -> Iterator[None]:
    """Meanwhile no step is taken once `stops` holds of a running request, unless that is cancelled.

    Questions are answered all the same, and what waits to be saved is.
    """
    core = engine.components.core
    step = core.step

    def paced() -> None:
        if any(stops(request) and not request.cancelled.is_set() for request in core.scheduler.running):
            core.cache.saving.pump()
            time.sleep(0.001)
        else:
            step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "step", paced)
        yield
