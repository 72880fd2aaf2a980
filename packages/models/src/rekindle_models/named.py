"""Which models there are: their names, the settings of the process that serves each, how long it stays loaded.

Owns the file of models and the reading of a folder. A table of the file has settings for its model; those at the top,
and those given to the server, are for all. What only the server in front does (where it listens, keys, limits) is in no
table. Each model has a store of its own, in the folder `models/NAME` of the store's directory: the file of sessions is
open in one process at a time, and one model's budget shall not push out another's memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rekindle.config import SETTINGS, KnownSetting, Settings, StoreSettings, read_toml
from rekindle.errors import ConfigError, ModelRefused
from rekindle.model.checkpoint import Source
from rekindle.model.gguf import CONFIG, is_gguf
from rekindle.server.border import Dialect
from rekindle.server.models import DEFAULT, forms, is_any, unserved
from rekindle_models.stored import holds

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
# Of the settings of servers, those that the process of a model has as well.
PASSED_ON = frozenset({"strict", "max_body_bytes", "stop_s", "traces", "log_format", "log_level"})
OF_TABLES = frozenset({"strict", "record"})
STORES = "models"  # folder of the store's directory


@dataclass(frozen=True, slots=True)
class Model:
    """A model: `given` are the settings of its process, by their flat names, where they are not the defaults.

    `aliases`: its other names, in lower case. `size`: bytes of its weights, 0 if that is not known;
    `store`: where its process keeps stored responses.
    """

    name: str
    aliases: frozenset[str]
    given: Mapping[str, Any]
    keep_alive_s: float
    size: int = 0
    store: StoreSettings | None = None


class Models:
    """All models, in the order of the file; the first is the default."""

    def __init__(self, models: Sequence[Model]) -> None:
        self.all = tuple(models)
        self._by_name = {alias: model for model in reversed(self.all) for alias in model.aliases}
        self._by_name |= {model.name.casefold(): model for model in self.all}

    @property
    def default(self) -> Model:
        """The model of requests that name none."""
        return self.all[0]

    @property
    def stores(self) -> list[StoreSettings]:
        """The settings of the stores of those that were read."""
        return [model.store for model in self.all if model.store is not None]

    def find(self, name: str | None, dialect: Dialect = "openai") -> Model:
        """Return the model that a request names; NotFound, which lists what there is."""
        if name is None:
            return self.default
        for form in forms(name):
            if form in self._by_name:
                return self._by_name[form]
        if DEFAULT in forms(name) or is_any(name, dialect):
            return self.default
        raise unserved(name, [model.name for model in self.all], dialect)

    def answered(self, namespace: str, answer: str) -> Model | None:
        """Return the model that a stored response, or a receipt, is from, by the files on disk; None if it is in
        none."""
        stores = ((model, model.store) for model in self.all)
        return next((model for model, store in stores if store and holds(store, namespace, answer)), None)

    @classmethod
    def read(cls, settings: Settings) -> Models:
        """Read what `models` names; ConfigError or ModelRefused, which name the model."""
        assert settings.models.path is not None, "this server has one model"
        path = settings.models.path.expanduser()
        for name in ("model", "served_model_name", "record"):
            if _value(settings, SETTINGS[name]) is not None:
                raise ConfigError(f"{name}: with models each has its own: write it in a table of their file")
        if path.is_dir():
            tables: Any = {_name_in(entry): {"model": str(entry)} for entry in _entries(path)}
            if not tables:
                raise ConfigError(f"models: {path} has no GGUF file and no folder with a {CONFIG}")
        elif path.is_file():
            tables = read_toml(path, "models file").get("models", {})
            if not isinstance(tables, Mapping) or not tables:
                raise ConfigError(f"models file {path}: it needs a table for each model, as [models.NAME]")
        else:
            raise ConfigError(f"models: {path} is no file and no folder")
        shared = _shared(settings)
        return cls(_distinct([_model(name, table, shared, settings) for name, table in tables.items()]))


def _model(name: str, table: Any, shared: Mapping[str, Any], settings: Settings) -> Model:
    where = f"models: {name}: "
    if NAME.fullmatch(name) is None or name.casefold() == DEFAULT:
        raise ConfigError(
            f"{where}a name has letters, digits and the signs '.', '_', '-' and ':', begins with a letter or "
            f"digit, and is not {DEFAULT!r}"
        )
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}write a table of settings, [models.{name}]")
    given = dict(table)
    keep_alive = given.pop("keep_alive", settings.models.keep_alive)
    for key in given:
        if key in SETTINGS and SETTINGS[key].section in ("server", "models") and key not in OF_TABLES:
            raise ConfigError(f"{where}{key} is for all models: write it at the top of the file")
    values = {**shared, "model": name, **given}
    if "store" not in given and shared.get("store") != "off":
        values["store"] = str(settings.store.directory() / STORES / name)
    try:
        read = Settings.load(values)
        keep_alive_s = replace(settings.models, keep_alive=str(keep_alive)).keep_alive_s
        source = Source.find(read.model.model, read.model.revision)
    except (ConfigError, ModelRefused) as error:
        raise type(error)(f"{where}{error}") from error
    aliases = frozenset({str(values["model"]).casefold(), source.name.casefold()})
    return Model(name, aliases, values, keep_alive_s, _size(source), read.store)


def _size(source: Source) -> int:
    """Return the bytes of a model's weights, if they are here and not in the hub's cache; else 0."""
    if source.file is not None:
        return source.file.stat().st_size
    return sum(file.stat().st_size for file in source.directory.glob("*.safetensors")) if source.directory else 0


def _shared(settings: Settings) -> dict[str, Any]:
    """Return the settings that all models have, by their flat names, where they are not the defaults."""
    found: dict[str, Any] = {}
    for name, known in SETTINGS.items():
        if known.section == "models" or (known.section == "server" and name not in PASSED_ON):
            continue
        value = _value(settings, known)
        if value != known.default:
            found[name] = value
    if not settings.store.enabled:
        found["store"] = "off"
    return found


def _value(settings: Settings, known: KnownSetting) -> Any:
    return getattr(getattr(settings, known.section), known.field)


def _distinct(models: list[Model]) -> list[Model]:
    seen: dict[str, str] = {}
    for model in models:
        other = seen.setdefault(model.name.casefold(), model.name)
        if other != model.name:
            raise ConfigError(f"models: {other} and {model.name} are one name: upper and lower case are alike")
    return models


def _entries(folder: Path) -> list[Path]:
    """Return the models in a folder by their names: GGUF files, and folders of checkpoints."""
    return [
        path.absolute()
        for path in sorted(folder.iterdir())
        if (path.is_file() and is_gguf(path)) or (path / CONFIG).is_file()
    ]


def _name_in(path: Path) -> str:
    """Return the name of a model in a folder: that of its file, where other signs are replaced by '-'."""
    name = re.sub(r"[^A-Za-z0-9._:-]+", "-", path.stem if path.is_file() else path.name).lstrip("._:-")
    return name or "model"


def text_of(value: Any) -> str:
    """Return the value of a setting as a variable has it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return ",".join(f"{name}={key}" for name, key in value.items())
    if isinstance(value, list | tuple):
        return ",".join(value)
    return str(value)


def expires_in(keep_s: float) -> float | None:
    """Return the seconds after which an idle model is left; None: never."""
    return None if math.isinf(keep_s) else keep_s
