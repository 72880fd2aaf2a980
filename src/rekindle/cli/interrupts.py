"""Ctrl-C that counts, whatever the interrupted code makes of it.

Not every KeyboardInterrupt arrives where it should: Python 3.11 turns one raised within `__set_name__` into a
RuntimeError, of which the lazy imports of transformers make a ModuleNotFoundError. Needs nothing but Python. The
signal's handler stays Python's own: asyncio replaces no other one by its own, which ends a running task in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt in place of an error that was made of one."""
    try:
        yield
    except Exception as error:
        if _was_interrupted(error):
            raise KeyboardInterrupt from error
        raise


def _was_interrupted(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, KeyboardInterrupt):
        seen = seen.__cause__ or seen.__context__
    return seen is not None
