"""All settings by their flat names, and one frozen `Settings` from flags, REKINDLE_* variables and a TOML file.

A flag wins over a variable, a variable over the file, the file over the default. All three use the same flat names
(`hot_bytes`, `REKINDLE_HOT_BYTES`, `--hot-bytes`); unknown ones are refused.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from rekindle.config.access import parse_api_keys
from rekindle.config.parts import (
    CacheSettings,
    EngineSettings,
    ModelSettings,
    PromptSettings,
    StoreSettings,
)
from rekindle.config.server import ServerSettings
from rekindle.config.services import BackendSettings, ModelsSettings, TierSettings
from rekindle.config.setting import KEY, Setting, check_kind, is_secret, kinds, parse_size, shortened
from rekindle.errors import ConfigError
from rekindle.keywords import did_you_mean

BOOLEANS: dict[int | str, bool] = {
    **dict.fromkeys((1, "1", "true", "on"), True),
    **dict.fromkeys((0, "0", "false", "off"), False),
}
ENV_PREFIX = "REKINDLE_"
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
    "models": ("Several models", ModelsSettings),
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
        if self.name.endswith(("_bytes", "_a_day")):
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


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, one part per component."""

    model: ModelSettings = field(default_factory=ModelSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    prompt: PromptSettings = field(default_factory=PromptSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    tier: TierSettings = field(default_factory=TierSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    backend: BackendSettings = field(default_factory=BackendSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    models: ModelsSettings = field(default_factory=ModelsSettings)

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        config_path: Path | None = None,
        *,
        defaults: Mapping[str, Any] | None = None,
    ) -> Settings:
        """Load settings from these flags (None: not given), REKINDLE_* variables (others are ignored) and file.

        `defaults` override the defaults of `parts`. A file of models has settings for all of them, which win over
        those of `config_path`.
        """
        variables = {
            name.removeprefix(ENV_PREFIX).lower(): value
            for name, value in (env or {}).items()
            if name.startswith(ENV_PREFIX)
        }
        named = variables.pop("config", None)
        debug = variables.pop("debug", "").lower()  # of the command line, too: see cli/border
        if config_path is None and named:
            config_path = Path(named)
        given = {name: value for name, value in (flags or {}).items() if value is not None}
        values: dict[str, dict[str, Any]] = {}
        config = {} if config_path is None else read_toml(config_path, "config file")
        sources = (
            ("default", defaults or {}),
            ("config file", config),
            ("models file", _for_all_models(given, variables, config)),
            ("environment", variables),
            ("", given),
        )
        for source, pairs in sources:
            for name, value in pairs.items():
                section, key, parsed = _parse(source, name, value)
                values.setdefault(section, {})[key] = parsed
                if name == "store":
                    values[section]["enabled"] = parsed is not None
        if BOOLEANS.get(debug, bool(debug)):
            values.setdefault("engine", {})["check_when_idle"] = True
        return cls(**{section: SECTIONS[section][1](**part) for section, part in values.items()})


def _for_all_models(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file of models that are not those of one model; the first source that names it counts.

    What it has of single models is not looked at here.
    """
    named = next((source["models"] for source in sources if "models" in source), None)
    if not isinstance(named, str | Path) or not (path := Path(named).expanduser()).is_file():
        return {}
    return {name: value for name, value in read_toml(path, "models file").items() if name != "models"}


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """Read a file of settings; ConfigError, which says what kind of file it is, if it is none."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{kind} {path}: {reason}") from error
    except RecursionError as error:
        raise ConfigError(f"{kind} {path}: lists or tables are nested too deeply") from error


def _parse(source: str, name: str, value: Any) -> tuple[str, str, Any]:
    if name not in SETTINGS:
        hint = did_you_mean(name, SETTINGS)
        if isinstance(value, Mapping):
            hint = "; settings have no sections: write their names at the top of the file"
        raise ConfigError(f"{_at(source)}unknown setting {name!r}{hint}")
    known = SETTINGS[name]
    section, key = known.section, known.field
    if name == "store" and isinstance(value, str) and value == "off":
        return section, key, None
    if name in ("slot", "keep_alive") and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if known.kind is str and is_secret(known.about) and not isinstance(value, str):
        raise ConfigError(f"{_at(source)}{name}: must be a text")  # not quoted
    try:
        return section, key, parse_size(value) if known.unit == "size" else _convert(known.kind, value)
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"{_at(source)}{name}: {error}") from error


def _at(source: str) -> str:
    """The prefix of an error that names a setting's source; empty for a flag or keyword."""
    return f"{source}: " if source else ""


def _convert(wanted: Any, value: Any) -> Any:
    """Convert `value` (a string, or a TOML or Python value) to the field's type; ValueError says what is valid."""
    if get_origin(wanted) is Mapping:
        return parse_api_keys(value)
    if get_origin(wanted) is tuple:
        return _several(value)
    if wanted is str or wanted is Path:
        return _text(wanted, value)
    if wanted is bool and isinstance(value, int | str):
        value = BOOLEANS.get(value, value)
    if wanted not in (int, float) or not isinstance(value, str):
        check_kind(wanted, value)
    try:
        return wanted(value) if wanted in (int, float) else value
    except (ValueError, OverflowError):
        raise ValueError(f"must be {wanted.__name__}, not {shortened(value)}") from None


def _text(wanted: type[str] | type[Path], value: Any) -> str | Path:
    if not isinstance(value, Path):  # in Python a model may be given as one
        check_kind(str, value)
    if wanted is Path and (not str(value) or "\0" in str(value)):
        raise ValueError("is empty" if not str(value) else "a path holds no NUL character")
    return wanted(value)


def _several(value: Any) -> tuple[str, ...]:
    """Parse names from a list, or from one text with commas between them."""
    if isinstance(value, str):
        return tuple(name for part in value.split(",") if (name := part.strip()))
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return tuple(name for each in value for name in _several(each))
    raise ValueError(f"must be a list of texts, or one with commas between them, not {value!r}")
