"""Human-readable sizes of simulated memories: blocks, tokens, or shares of what the whole trace would fill."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from rekindle.errors import ConfigError
from rekindle_lab.simulate.trace import Trace

UNLIMITED = "unlimited"
DEFAULT = ("2%", "5%", "10%", "25%", "50%", UNLIMITED)
SCALES = {"k": 10**3, "m": 10**6, "g": 10**9}


def parse_capacity(text: str, trace: Trace) -> int:
    """Return the blocks of `1000` (blocks), `10M` (tokens: as many blocks as hold them), `25%` or `unlimited`.

    100 % and unlimited are what the whole trace would fill. A share above 0 is at least one block. ConfigError for
    less than one block, and for anything else.
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)([kmg%]?)", text.strip().lower().replace("_", ""))
    if text.strip().lower() == UNLIMITED:
        blocks = len(trace.blocks)
    elif match is None or (not match[2] and "." in match[1]):
        raise ConfigError(f"{text[:40]!r} is no capacity: write 30000 (blocks), 10M (tokens), 25% or {UNLIMITED}")
    elif match[2] == "%":
        share = float(match[1]) / 100
        blocks = max(1, round(len(trace.blocks) * share)) if share else 0
    elif match[2]:
        blocks = math.ceil(float(match[1]) * SCALES[match[2]] / trace.block_tokens)
    else:
        blocks = int(match[1])
    if blocks < 1:
        raise ConfigError(f"a capacity of {text!r} is less than one block of {trace.block_tokens} tokens")
    return blocks


def parse_capacities(texts: Iterable[str], trace: Trace) -> list[int]:
    """Return the distinct capacities in ascending order."""
    return sorted({parse_capacity(text, trace) for text in texts})


def show_capacity(blocks: int, trace: Trace) -> str:
    """Format blocks as `1,000`, or as `unlimited` if the whole trace fits."""
    return UNLIMITED if blocks >= len(trace.blocks) else f"{blocks:,}"


def show_tokens(count: int) -> str:
    """Format tokens with three significant digits: `512k`, `5.12M`."""
    for scale, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= scale:
            return f"{count / scale:.3g}{letter}" if count < 1000 * scale else f"{count / scale:,.0f}{letter}"
    return str(count)
