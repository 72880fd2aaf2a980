"""The C library's allocator, which keeps freed chunks of up to 32 MiB for the next ones of their sizes."""

from __future__ import annotations

import ctypes
import sys

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def trim() -> None:
    """Return free memory to the operating system, where the allocator can; it is scanned, which takes milliseconds."""
    if _trim is not None:
        _trim(0)
