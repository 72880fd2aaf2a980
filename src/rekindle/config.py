"""Every setting: its name, its default, written once, and what it may be.

Owns how flags, REKINDLE_* variables and a TOML file become one frozen `Settings`: a flag wins over a variable, a
variable over the file, the file over the default. All three use the same flat names (`hot_bytes`, `REKINDLE_HOT_BYTES`,
`--hot-bytes`); unknown ones are refused. Each component is handed only its own part. Knows no torch and no HTTP.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
import tomllib
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rekindle.errors import ConfigError

MiB = 1 << 20
ENV_PREFIX = "REKINDLE_"
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


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _need_at_least(settings: object, **least: float) -> None:
    """Refuse fields below their least value; None means "decided later" and passes."""
    for name, low in least.items():
        value = getattr(settings, name)
        _need(value is None or value >= low, f"{name} must be at least {low}, not {value}")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model (None: the bundled one), in which precision, on which device. Remote code is never trusted."""

    model: str | None = None
    revision: str | None = None
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    device: str = "cpu"
    kv: Literal["auto", "q4h", "bf16", "fp32"] = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        _need(self.model is None or bool(self.model.strip()), "model is empty: name a directory or a hub model")
        _need(bool(self.device), "device is empty: write cpu or cuda")
        _need_at_least(self, threads=1)


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Hot memory and matching. `hot_bytes` None: the engine sizes it by the memory at hand."""

    block_tokens: int = 64
    hot_bytes: int | None = None
    min_reuse_tokens: int = 16
    reuse: Literal["on", "off"] = "on"
    text_index_bytes: int = 256 * MiB
    max_branches: int = 8

    def __post_init__(self) -> None:
        size = self.block_tokens
        _need(16 <= size <= 256 and size & (size - 1) == 0, f"block_tokens must be 16, 32, 64, 128 or 256, not {size}")
        _need_at_least(self, hot_bytes=1, min_reuse_tokens=1, text_index_bytes=1, max_branches=1)


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The warm tier. `dir` None: the user's cache directory; `disk_bytes` None: decided by the free space."""

    dir: Path | None = None
    enabled: bool = True
    disk_bytes: int | None = None
    staging_bytes: int = 64 * MiB
    readers: int = 2

    def __post_init__(self) -> None:
        _need_at_least(self, disk_bytes=1, staging_bytes=1, readers=1)

    def directory(self) -> Path:
        """`dir`, or where this system keeps a user's caches."""
        if self.dir is not None:
            return self.dir.expanduser().absolute()
        from platformdirs import user_cache_path

        return user_cache_path("rekindle")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Scheduling. `max_context` None: what the model was made for; `max_chunk_tokens` None: only time bounds it.

    `check_when_idle` re-derives every invariant of the engine whenever it runs out of work, for finding defects.
    """

    max_context: int | None = None
    max_stall_s: float = 0.25
    max_step_s: float = 1.0
    max_running: int = 32
    max_chunk_tokens: int | None = None
    check_when_idle: bool = False

    def __post_init__(self) -> None:
        _need_at_least(self, max_context=2, max_running=1, max_chunk_tokens=1)
        _need(self.max_stall_s > 0, f"max_stall_s must be above 0, not {self.max_stall_s}")
        _need(
            self.max_step_s >= self.max_stall_s,
            f"max_step_s ({self.max_step_s}) must not be below max_stall_s ({self.max_stall_s})",
        )


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where to listen (port 0: any free one) and who may come in."""

    host: str = "127.0.0.1"
    port: int = 7354
    served_model_name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    open: bool = False

    def __post_init__(self) -> None:
        _need(bool(self.host), "host is empty: write 127.0.0.1 for this machine only")
        _need(0 <= self.port <= 65535, f"port must be from 0 to 65535, not {self.port}")
        _need(self.served_model_name != "", "served_model_name is empty")
        _need(self.api_key != "", "api_key is empty")
        _need(
            self.open or self.api_key is not None or is_loopback(self.host),
            f"{self.host} can be reached from other machines: set REKINDLE_API_KEY, or say --open to do without a key",
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, one part per component."""

    model: ModelSettings = field(default_factory=ModelSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    server: ServerSettings = field(default_factory=ServerSettings)

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        config_path: Path | None = None,
        *,
        defaults: Mapping[str, Any] | None = None,
    ) -> Settings:
        """Settings of these flags (None: not given), variables (others than REKINDLE_* are not looked at) and file.

        `defaults` are those of the caller, where they differ from the ones written here.
        """
        variables = {
            name.removeprefix(ENV_PREFIX).lower(): value
            for name, value in (env or {}).items()
            if name.startswith(ENV_PREFIX)
        }
        named = variables.pop("config", None)
        if config_path is None and named:
            config_path = Path(named)
        given = {name: value for name, value in (flags or {}).items() if value is not None}
        values: dict[str, dict[str, Any]] = {}
        sources = (
            ("default", defaults or {}),
            ("config file", _read_toml(config_path)),
            ("environment", variables),
            ("flag", given),
        )
        for source, pairs in sources:
            for name, value in pairs.items():
                section, key, parsed = _parse(source, name, value)
                values.setdefault(section, {})[key] = parsed
                if name == "store":
                    values[section]["enabled"] = parsed is not None
        return cls(**{section: _SECTIONS[section](**part) for section, part in values.items()})


_SECTIONS: dict[str, type] = {
    "model": ModelSettings,
    "cache": CacheSettings,
    "store": StoreSettings,
    "engine": EngineSettings,
    "server": ServerSettings,
}


def _flat_names() -> dict[str, tuple[str, str, Any]]:
    """Flat name -> (section, field, type). `store` is the directory, or `off`."""
    names = {}
    for section, part in _SECTIONS.items():
        hints = get_type_hints(part)
        for item in fields(part):
            names[item.name] = (section, item.name, hints[item.name])
    names["store"] = names.pop("dir")
    del names["enabled"]
    return names


_NAMES = _flat_names()


def _read_toml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"config file {path}: {error}") from error


def _parse(source: str, name: str, value: Any) -> tuple[str, str, Any]:
    if name not in _NAMES:
        near = difflib.get_close_matches(name, _NAMES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{source}: unknown setting {name!r}{hint}")
    section, key, wanted = _NAMES[name]
    if name == "store" and value == "off":
        return section, key, None
    try:
        return section, key, parse_size(value) if name.endswith("_bytes") else _convert(wanted, value)
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"{source}: {name}: {error}") from error


def _convert(wanted: Any, value: Any) -> Any:
    """`value` (a string, or what TOML and Python bring) as the field's type; ValueError says what would do."""
    if get_origin(wanted) in (types.UnionType, Union):
        (wanted,) = (kind for kind in get_args(wanted) if kind is not type(None))
    if get_origin(wanted) is Literal:
        if value not in get_args(wanted):
            raise ValueError(f"must be one of {', '.join(get_args(wanted))}, not {value!r}")
        return value
    if wanted is bool:
        known = {
            True: True,
            False: False,
            "1": True,
            "true": True,
            "on": True,
            "0": False,
            "false": False,
            "off": False,
        }
        if value not in known:
            raise ValueError(f"must be true or false, not {value!r}")
        return known[value]
    if isinstance(value, bool) or (wanted is int and isinstance(value, float)):
        raise ValueError(f"must be {wanted.__name__}, not {value!r}")
    if wanted is Path and not str(value):
        raise ValueError("is empty")
    try:
        return wanted(value)
    except (TypeError, ValueError):
        raise ValueError(f"must be {wanted.__name__}, not {value!r}") from None
