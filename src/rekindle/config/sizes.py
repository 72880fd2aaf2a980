"""Sizes as people write them."""

from __future__ import annotations

import re

from rekindle.errors import ConfigError

UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


def parse_size(value: int | str) -> int:
    """Bytes of `4096`, `"512MB"` (powers of 1000) or `"1.5GiB"` (powers of 1024)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(value).lower())
    if match is None or match[2] not in UNITS:
        raise ConfigError(f"{value!r} is not a size: write a number of bytes, 512MB or 4GiB")
    return int(float(match[1]) * UNITS[match[2]])
