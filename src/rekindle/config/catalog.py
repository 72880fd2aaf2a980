"""All settings by the flat names that flags, variables, files and documents use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin

from rekindle.config.parts import (
    CacheSettings,
    EngineSettings,
    ModelSettings,
    PromptSettings,
    ServerSettings,
    StoreSettings,
)
from rekindle.config.services import BackendSettings, TierSettings
from rekindle.config.setting import KEY, Setting, kinds

ENV_PREFIX = "REKINDLE_"
# What is not set any more, and what holds instead.
GONE: Mapping[str, str] = {
    "backend_silence_s": "a request is given up when the backend sends nothing for 600 seconds",
    "check_when_idle": "REKINDLE_DEBUG=1 does it",
    "map_weights": "packed weights are kept in the store's directory from 64 MiB on; with store=off they are not",
    "max_step_s": "it is four times max_stall_s",
    "min_reuse_ratio": "any share of a prompt is reused, from 16 tokens on",
    "min_reuse_tokens": "it is 16",
    "ping_s": "a stream without new output sends a ping every 5 seconds",
    "readers": "the store is read by two threads",
    "record_bytes": "a record of 1 GiB is set aside for a new one",
    "response_bytes": "it is an eighth of disk_bytes",
    "session_bytes": "it is an eighth of disk_bytes",
    "snapshot_bytes": "hot_bytes is divided between KV and snapshots as for conversations of 8,192 tokens",
    "staging_bytes": "it is 64 MiB",
    "stale_ttl_s": "it is 30 days; `rekindle cache gc` removes stores earlier",
    "text_index_bytes": "it is 256 MiB, or a quarter to a sixteenth of hot_bytes",
}
DAY_S = 86400
# Part of `Settings` -> its title, its class.
SECTIONS: dict[str, tuple[str, type]] = {
    "model": ("Model", ModelSettings),
    "cache": ("Memory", CacheSettings),
    "prompt": ("Prompts", PromptSettings),
    "store": ("Store", StoreSettings),
    "tier": ("Object tier", TierSettings),
    "engine": ("Requests", EngineSettings),
    "backend": ("Backend", BackendSettings),
    "server": ("Server", ServerSettings),
}


@dataclass(frozen=True, slots=True)
class KnownSetting:
    """One setting: `section` and `field` locate it in `Settings`, `kind` is its type without None."""

    name: str
    section: str
    field: str
    kind: Any
    default: Any
    about: Setting

    @property
    def group(self) -> str:
        """The title of its section."""
        return SECTIONS[self.section][0]

    @property
    def flag(self) -> str | None:
        """Its command line flag, or None."""
        return f"--{self.name.replace('_', '-')}" if self.about.given == "flag" else None

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return f"{ENV_PREFIX}{self.name.upper()}"

    @property
    def choices(self) -> tuple[str, ...]:
        """The values it may have; empty if they are not enumerated."""
        words = get_args(self.kind) if get_origin(self.kind) is Literal else self.about.bounds.choices
        return tuple(map(str, words))

    @property
    def unit(self) -> str:
        """What the user writes for it: `size`, `seconds`, `text`, `path`, `int`, ..."""
        if self.name.endswith("_bytes"):
            return "size"
        if self.name.endswith("_s"):
            return "seconds"
        names: dict[Any, str] = {str: "text", tuple: "name", Mapping: "table"}
        kind = get_origin(self.kind) or self.kind
        return names.get(kind) or str(kind.__name__).lower()

    @property
    def default_text(self) -> str:
        """The default as the user would write it, or the meaning of having no value."""
        value = self.default
        if value is None or value == () or value == {}:
            return self.about.unset
        if isinstance(value, bool):
            return "on" if value else "off"
        if self.unit == "size":
            return _size_text(value)
        if self.unit == "seconds" and value >= DAY_S:
            return f"{value / DAY_S:g} days"
        return f"{value:g}" if isinstance(value, float) else str(value)


def _size_text(count: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count % (1 << power) == 0:
            return f"{count >> power}{unit}"
    return str(count)


def _known() -> Iterator[KnownSetting]:
    for section, (_, part) in SECTIONS.items():
        defaults = part()
        for item in fields(part):
            about = item.metadata.get(KEY)
            if about is not None:
                kind, default = kinds(part)[item.name][0], getattr(defaults, item.name)
                yield KnownSetting(about.name or item.name, section, item.name, kind, default, about)


SETTINGS: dict[str, KnownSetting] = {known.name: known for known in _known()}
