"""How any thread has work done on the intake thread, which owns memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class OnMemory(Protocol):
    """Runs `work` on the thread that owns memory, and returns its result."""

    def __call__(self, work: Callable[[], T], /) -> T: ...
