"""Settings by their flat names, for passing to another process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rekindle.config import SETTINGS, Settings


def flags_of(settings: Settings) -> dict[str, Any]:
    """Return names and values of the settings that affect measurements, none of them secret; `Settings.load` reads
    them back."""
    left_out = ("store", "secret")
    mine = (known for known in SETTINGS.values() if known.section != "server" and known.name not in left_out)
    flat = {known.name: getattr(getattr(settings, known.section), known.field) for known in mine}
    given = {name: value for name, value in flat.items() if value is not None and value != ()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


def variables(settings: Settings, store: Path) -> dict[str, str]:
    """Return all settings except the server's, with this store, as values of environment variables."""
    secret = {} if settings.store.secret is None else {"secret": settings.store.secret}
    given = {**flags_of(settings), **secret, "store": store}
    return {name: _text(value) for name, value in given.items()}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
