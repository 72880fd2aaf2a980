"""Where a store's files are: its directory, the one of user data, and the slots of replicas in them.

    DIR/slot-N      what one replica has to itself while it runs: blocks of each model, a copy of the secret, sessions

A slot is a store directory of its own; what replicas share is in DIR. Knows names and numbers, and no other content.
"""

from __future__ import annotations

import re
from pathlib import Path

from rekindle.config.setting import need, shortened

NUM_SLOTS = 1024
_NAME = re.compile(r"slot-(0|[1-9][0-9]{0,3})")


def store_directory(given: Path | None) -> Path:
    """Return the store's directory: the given one, or this system's directory for user caches."""
    if given is not None:
        return given.expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("rekindle")


def data_directory(given: Path | None) -> Path:
    """Return the directory of sessions: they are user data, and next to the KV only if a directory is given."""
    if given is not None:
        return store_directory(given)
    from platformdirs import user_data_path

    return user_data_path("rekindle")


def slot_directory(directory: Path, number: int) -> Path:
    """Return the path of a slot, which may be missing."""
    return directory / f"slot-{number}"


def is_slot(directory: Path) -> bool:
    """Return whether a path is that of a slot."""
    return _number(directory.name) is not None


def _number(name: str) -> int | None:
    match = _NAME.fullmatch(name)
    number = None if match is None else int(match[1])
    return number if number is not None and number < NUM_SLOTS else None


def slot_numbers(directory: Path) -> list[int]:
    """Return the numbers of the slots that exist in a directory, in order; it may be missing."""
    if not directory.is_dir():
        return []
    found = [_number(path.name) for path in directory.iterdir() if path.is_dir()]
    return sorted(number for number in found if number is not None)


def check_slot(slot: str) -> None:
    """Raise ConfigError unless it is `off`, `auto` or the number of a slot."""
    is_number = slot.isascii() and slot.isdecimal() and len(slot) <= 4 and int(slot) < NUM_SLOTS
    need(
        slot in ("off", "auto") or (is_number and str(int(slot)) == slot),
        f"slot: must be off, auto, or a number from 0 to {NUM_SLOTS - 1}, not {shortened(slot)}",
    )
