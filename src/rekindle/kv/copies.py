"""Parts of hot blocks on their way to or from memory of the host, many at a time; knows neither tensors nor devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Wait = Callable[[], object]  # until what was begun is done


@dataclass(frozen=True, slots=True, eq=False)
class BlockPart:
    """A part of a hot block that holds `num_tokens` tokens, and its payload uint8 [payload_bytes] at the host."""

    block: int
    part: int
    num_tokens: int
    payload: np.ndarray


def at_once() -> None:
    """Wait for nothing: it is done."""
