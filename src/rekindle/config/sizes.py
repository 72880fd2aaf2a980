"""Parses sizes such as `4GiB`, and shows them."""

from __future__ import annotations

import re
from fractions import Fraction

from rekindle.errors import ConfigError

MOST = (1 << 63) - 1  # for every integer setting: what files, counters and SQLite hold
MOST_DIGITS = 40
UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


def parse_size(value: int | str) -> int:
    """Return the bytes of `4096`, `"512MB"` (powers of 1000) or `"1.5GiB"` (powers of 1024)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", value.lower()) if isinstance(value, str) else None
    if match is None or match[2] not in UNITS or len(match[1]) > MOST_DIGITS:
        raise ConfigError(f"{value!r} is not a size: write a number of bytes, 512MB or 4GiB")
    return int(Fraction(match[1]) * UNITS[match[2]])


def show_bytes(count: float) -> str:
    """`3.4 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
