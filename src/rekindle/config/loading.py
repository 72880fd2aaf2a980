"""How flags, REKINDLE_* variables and a TOML file become one frozen `Settings`.

A flag wins over a variable, a variable over the file, the file over the default. All three use the same flat names
(`hot_bytes`, `REKINDLE_HOT_BYTES`, `--hot-bytes`); unknown ones are refused.
"""

from __future__ import annotations

import difflib
import tomllib
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rekindle.config.keys import parse_api_keys
from rekindle.config.parts import (
    CacheSettings,
    EngineSettings,
    ModelSettings,
    PromptSettings,
    ServerSettings,
    StoreSettings,
)
from rekindle.config.sizes import parse_size
from rekindle.errors import ConfigError

ENV_PREFIX = "REKINDLE_"


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, one part per component."""

    model: ModelSettings = field(default_factory=ModelSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    prompt: PromptSettings = field(default_factory=PromptSettings)
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
        variables.pop("debug", None)  # of the command line alone: see cli/border
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
    "prompt": PromptSettings,
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
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"config file {path}: {reason}") from error
    except RecursionError as error:
        raise ConfigError(f"config file {path}: lists or tables lie in each other too deep") from error


def _parse(source: str, name: str, value: Any) -> tuple[str, str, Any]:
    if name not in _NAMES:
        near = difflib.get_close_matches(name, _NAMES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        if isinstance(value, Mapping):
            hint = "; settings have no sections: write their names at the top of the file"
        raise ConfigError(f"{source}: unknown setting {name!r}{hint}")
    section, key, wanted = _NAMES[name]
    if name == "store" and isinstance(value, str) and value == "off":
        return section, key, None
    try:
        return section, key, parse_size(value) if name.endswith("_bytes") else _convert(wanted, value)
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"{source}: {name}: {error}") from error


def _convert(wanted: Any, value: Any) -> Any:
    """`value` (a string, or what TOML and Python bring) as the field's type; ValueError says what would do."""
    if get_origin(wanted) in (types.UnionType, Union):
        (wanted,) = (kind for kind in get_args(wanted) if kind is not type(None))
    if get_origin(wanted) is Mapping:
        return parse_api_keys(value)
    if get_origin(wanted) is tuple:
        return _several(value)
    if get_origin(wanted) is Literal:
        if not isinstance(value, str) or value not in get_args(wanted):
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
        if not isinstance(value, bool | int | str) or value not in known:
            raise ValueError(f"must be true or false, not {value!r}")
        return known[value]
    if wanted is str or wanted is Path:
        return _text(wanted, value)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float | str)
        or (wanted is int and isinstance(value, float))
    ):
        raise ValueError(f"must be {wanted.__name__}, not {value!r}")
    try:
        return wanted(value)
    except (ValueError, OverflowError):
        raise ValueError(f"must be {wanted.__name__}, not {_short(value)}") from None


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a number of many digits"
    return text if len(text) <= 100 else f"{text[:100]}…"


def _text(wanted: type[str] | type[Path], value: Any) -> str | Path:
    if not isinstance(value, str | Path):  # in Python a model may be named by its path
        kind = "a table" if isinstance(value, Mapping) else "a list" if isinstance(value, list) else repr(value)
        raise ValueError(f"must be a text, not {kind}")
    if wanted is Path and (not str(value) or "\0" in str(value)):
        raise ValueError("is empty" if not str(value) else "a path holds no NUL character")
    return wanted(value)


def _several(value: Any) -> tuple[str, ...]:
    """Names of a list, or of one text that separates them by commas."""
    if isinstance(value, str):
        return tuple(name for part in value.split(",") if (name := part.strip()))
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return tuple(name for each in value for name in _several(each))
    raise ValueError(f"must be a list of texts, or one with commas between them, not {value!r}")
