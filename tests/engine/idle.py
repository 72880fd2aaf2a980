"""Waiting until an engine has nothing to do."""

from __future__ import annotations

import time

from rekindle.engine.api import Engine
from rekindle.engine.types import EngineStats


def until_idle(engine: Engine) -> EngineStats:
    """Wait as a user would, who looks at the figures, for what is anticipated of next prompts too."""
    while (stats := engine.stats()).num_background or stats.num_running or stats.num_waiting:
        time.sleep(0.002)
    return stats
