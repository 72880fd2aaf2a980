"""Metadata of a setting, stored with its field: its meaning and its bounds; sizes such as `4GiB`.

Help texts, docs/settings.md and the checks of a part are all derived from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rekindle.errors import ConfigError

T = TypeVar("T")
KEY = "setting"
MOST = (1 << 63) - 1  # for every integer setting: what files, counters and SQLite hold
MOST_DIGITS = 40
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
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


def parse_duration(text: str) -> float:
    """Return the seconds of `90`, `90s`, `15m`, `8h`, `1.5d` or `2w`; ConfigError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw]?)\s*", text.lower())
    if match is None:
        raise ConfigError(f"{text!r} is not a duration: write 90s, 15m, 8h or 30d")
    return float(match[1]) * SECONDS[match[2] or "s"]


def show_bytes(count: float) -> str:
    """`3.4 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Which numbers a setting takes; `least` and `most` are inclusive, `above` is exclusive."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: tuple[int, ...] = ()

    def __str__(self) -> str:
        """The bounds as documents show them; empty if there are none."""
        if self.choices:
            return listed([str(choice) for choice in self.choices])
        if self.least is not None and self.most is not None:
            return f"{self.least} to {self.most}"
        named = (("at least", self.least), ("above", self.above), ("at most", self.most))
        return ", ".join(f"{word} {bound}" for word, bound in named if bound is not None)

    def check(self, name: str, value: float) -> None:
        """Raise ConfigError, with both ends, if `value` is out of bounds."""
        holds = (
            (not self.choices or value in self.choices)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
        )
        wanted = f"from {self}" if self.least is not None and self.most is not None else str(self)
        need(holds, f"{name} must be {wanted}, not {shortened(value)}")


@dataclass(frozen=True, slots=True)
class Setting:
    """`help` is one line, without the default; `detail` holds sentences that documents add to it.

    `unset` describes having no value. `name` is the flat name if it differs from the field's. A `given` of "secret"
    is not printed and has no flag, as every user of the machine could read it.
    """

    help: str
    detail: str = ""
    unset: str = ""
    bounds: Bounds = Bounds()
    name: str | None = None
    given: Literal["flag", "secret"] = "flag"
    computing: bool = False


def setting(
    default: T,
    help: str,
    *,
    detail: str = "",
    unset: str = "",
    bounds: Bounds = Bounds(),
    name: str | None = None,
    given: Literal["flag", "secret"] = "flag",
) -> T:
    """Return a field of a part with its `Setting`."""
    known = {KEY: Setting(help, detail, unset, bounds, name, given)}
    options: Any = {"default_factory": default.copy} if isinstance(default, dict) else {"default": default}
    made: T = field(**options, repr=given != "secret", metadata=known)
    return made


def computing(default: T, help: str, **about: Any) -> T:
    """Return a field for a setting of what computes, which a server refuses where another one computes."""
    made: T = field(default=default, metadata={KEY: Setting(help, computing=True, **about)})
    return made


def at_least(least: float, most: float | None = None) -> Bounds:
    """From `least` up, to `most` if given."""
    return Bounds(least=least, most=most)


def above(bound: float, most: float | None = None) -> Bounds:
    """More than `bound`, and no more than `most` if given."""
    return Bounds(above=bound, most=most)


def listed(words: list[str]) -> str:
    """`a, b or c`."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def shortened(value: Any) -> str:
    """Return what an error says of a value: `repr(value)`, or what it is, however long that would be."""
    if isinstance(value, list | Mapping):
        return "a list" if isinstance(value, list) else "a table"
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a number of many digits"
    return text if len(text) <= 100 else f"{text[:100]}…"


def need(holds: bool, message: str) -> None:
    """Raise ConfigError with this message unless `holds`."""
    if not holds:
        raise ConfigError(message)


@cache
def kinds(part: type) -> dict[str, tuple[Any, ...]]:
    """Field of a part -> its types: one, and NoneType where it may have no value."""
    hints = get_type_hints(part)
    return {name: get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,) for name, kind in hints.items()}


def check_kind(kind: Any, value: Any, where: str = "") -> None:
    """Refuse a value that is not of this type; nothing is converted, but an integer is a float, too."""
    origin, words = get_origin(kind), get_args(kind)
    if origin is Literal:
        holds, wanted = isinstance(value, str) and value in words, f"one of {', '.join(words)}"
    elif origin is tuple:
        holds = isinstance(value, tuple) and all(isinstance(each, str) for each in value)
        wanted = "a tuple of texts"
    elif origin is Mapping:
        holds = isinstance(value, Mapping) and all(isinstance(each, str) for each in (*value, *value.values()))
        need(holds, f"{where}must be a table of texts")  # keys are not quoted
        return
    else:
        holds = isinstance(value, int | float if kind is float else kind) and isinstance(value, bool) == (kind is bool)
        wanted = {bool: "true or false", str: "a text", Path: "a path"}.get(kind, kind.__name__)
    need(holds, f"{where}must be {wanted}, not {shortened(value)}")


def is_secret(about: Setting | None) -> bool:
    """Whether errors may not quote the value."""
    return about is not None and about.given == "secret"


def check_fields(part: Any) -> None:
    """Refuse values of other types than a part's fields have, and numbers out of bounds, not finite, or too large.

    Too large is what files cannot hold. None means "decided later" and passes where it is one of the types.
    """
    for item in fields(part):
        name, value = item.name, getattr(part, item.name)
        kind, *others = kinds(part.__class__)[name]
        if value is None and others:
            continue
        if kind is str and is_secret(item.metadata.get(KEY)):
            need(isinstance(value, str), f"{name}: must be a text")  # not quoted
            continue
        check_kind(kind, value, f"{name}: ")
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        is_float = isinstance(value, float)
        need(not is_float or math.isfinite(value), f"{name} must be a finite number, not {shortened(value)}")
        if KEY in item.metadata:
            item.metadata[KEY].bounds.check(name, value)
        need(is_float or abs(value) <= MOST, f"{name} must be at most {MOST}, not {shortened(value)}")
