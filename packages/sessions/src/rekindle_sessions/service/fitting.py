"""Whether a text fits into the context at all: one that does not is refused when it comes, not by every later turn.

A text that fits alone may be too long next to what was said before; that is known when a prompt is made of both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from rekindle.engine.api import Engine
from rekindle.worker import contained


async def check_fits(engine: Engine, texts: Iterable[str]) -> None:
    """Raise PromptTooLong for a text of more tokens than the context holds, without counting all of them."""
    for text in texts:
        if len(text.encode()) >= engine.max_context:  # a token has at least one byte
            await asyncio.to_thread(contained(_encode), engine, text)


def _encode(engine: Engine, text: str) -> None:
    encoder = engine.encoder
    encoder.encode(encoder.render_text(text, add_leading=False), most=engine.max_context)
