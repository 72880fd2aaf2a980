"""How far a prompt is computed: told to whoever waits for its reply, and to the log where it takes long."""

from __future__ import annotations

import logging

from rekindle.engine.core.reporting import progress_of
from rekindle.engine.request import Request

logger = logging.getLogger(__name__)

LOG_EVERY_S = 10.0


def tell_progress(request: Request, *, now: float, min_reuse_tokens: int) -> None:
    """Set the progress of a request that has begun and has no token yet; every `LOG_EVERY_S` seconds log it, too."""
    marks = request.marks
    if marks.first_token is not None or marks.admitted is None:
        return
    request.generation.progress = progress_of(request, now=now, min_reuse_tokens=min_reuse_tokens)
    logged = marks.logged if marks.logged is not None else marks.admitted
    if now - logged >= LOG_EVERY_S:
        marks.logged = now
        _log(request, now - marks.admitted)


def _log(request: Request, elapsed_s: float) -> None:
    """One line: which request, whose, how far, how fast, how long it will still take at that rate."""
    computed = max(0, request.num_computed - request.hot_tokens - request.warm_tokens)
    left, rate = request.num_prompt - request.num_computed, computed / elapsed_s
    logger.info(
        "request %s of agent %s: %d of %d prompt tokens done, %.0f tokens/s, %s left",
        request.id,
        request.agent,
        request.num_computed,
        request.num_prompt,
        rate,
        f"about {left / rate:.0f} s" if rate > 0 else "it is not known how long is",
    )
