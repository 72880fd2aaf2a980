"""Settings for tests, which also give the fields of parts that users cannot set."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from rekindle.config import Settings
from rekindle.config.loading import SECTIONS
from rekindle.config.setting import KEY

UNSET = {
    item.name: section for section, (_, part) in SECTIONS.items() for item in fields(part) if KEY not in item.metadata
}


def settings_of(**given: Any) -> Settings:
    """Return settings by their flat names; fields that are no settings by their own."""
    settings = Settings.load({name: value for name, value in given.items() if name not in UNSET})
    for name in given.keys() & UNSET.keys():
        part = replace(getattr(settings, UNSET[name]), **{name: given[name]})
        settings = replace(settings, **{UNSET[name]: part})
    return settings
