"""Processes of their own for tests, forked where the imports of a server are done already: once for all tests.

Whoever sets what is imported first has set it for every later test of the same worker, so it is set here alone.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

IMPORTED = [
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
