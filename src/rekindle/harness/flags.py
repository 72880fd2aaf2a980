"""Settings by their flat names, to be given to another process."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from rekindle.config import Settings


def flags_of(settings: Settings) -> dict[str, Any]:
    """Flat names and values of the settings that decide what is measured; `Settings.load` takes them back."""
    parts = (settings.model, settings.cache, settings.store, settings.engine)
    flat = {item.name: getattr(part, item.name) for part in parts for item in fields(part)}
    del flat["dir"], flat["enabled"]
    return {name: value for name, value in flat.items() if value is not None}


def variables(settings: Settings, store: Path) -> dict[str, str]:
    """All settings but the server's own, on this store, by their flat names."""
    given = {**flags_of(settings), "store": store}
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()}
