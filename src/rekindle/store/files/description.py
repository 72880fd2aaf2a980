"""`layout.json`: a store directory's self-description, so that tools can open it without the model.

Owns the file and its format. It is written to a temporary file and renamed, only when its content has changed. Opening
a store with its model needs nothing from it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from rekindle.errors import StoreError
from rekindle.spec import Change, KVLayout, LayerSpec
from rekindle.store.files.keys import StoreKeys
from rekindle.store.files.sync import FileSystem
from rekindle.store.files.veil import Veil

logger = logging.getLogger(__name__)

FILE = "layout.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Description:
    """The model's name, its block layout, all namespaces ever opened, and what the fingerprint was made from.

    `made_from` is that of its `ModelSpec`; empty if an earlier version wrote the file.
    """

    model: str
    layout: KVLayout
    namespaces: tuple[str, ...]
    made_from: Mapping[str, str] = field(default_factory=dict)

    def changes(self, before: Description) -> tuple[Change, ...]:
        """What differs from another store, as far as both say it; without what follows from other weights."""
        then, now = before._inputs(), self._inputs()
        names = [name for name in now if name in then and then[name] != now[name]]
        if "weights" in names:
            names = [name for name in names if name in ("model", "weights")]
        elif "weights" in then and "weights" in now:
            names = [name for name in names if name != "model"]  # the same one, by another name
        return tuple(Change(name, then[name], now[name]) for name in names)

    def _inputs(self) -> dict[str, str]:
        layers = ", ".join(f"{name} on {count} layers" for name, count in self.layout.formats().items())
        own = {"model": self.model, "kv": layers, "block_tokens": str(self.layout.block_tokens)}
        return {**own, **self.made_from}


def describe(directory: Path, description: Description, fs: FileSystem, keys: StoreKeys) -> Description:
    """Write the description merged with the namespaces already in the file; return the merged one.

    A store without a description still serves its model, so a failure is only logged.
    """
    try:
        return _described(directory, description, fs, Veil.of(keys, FILE))
    except OSError as error:
        logger.warning("%s could not be described for tools: %s", directory, error)
        return description


def _described(directory: Path, description: Description, fs: FileSystem, veil: Veil | None) -> Description:
    before = b""
    namespaces, model, made_from = set(description.namespaces), description.model, description.made_from
    if (directory / FILE).exists():
        before = _content(directory / FILE, fs)
        try:
            old = _parsed(before, veil)
        except ValueError:
            old = description
        namespaces |= set(old.namespaces)
        model, made_from = model or old.model, made_from or old.made_from
    now = Description(model, description.layout, tuple(sorted(namespaces)), dict(made_from))
    fields = {"format": FORMAT, **asdict(now)}
    if veil is not None:
        named = json.dumps(now.namespaces).encode()
        fields |= {"namespaces": [], "sealed_namespaces": veil.match(named).hex()}  # the same names, the same file
    content = json.dumps(fields, indent=1).encode()
    if content != before:
        aside = directory / f"{FILE}.new"
        fd = fs.open_file(aside, "create")
        try:
            fs.resize(fd, 0)
            fs.write(fd, 0, content)
            fs.sync_data(fd)
        finally:
            fs.close_file(fd)
        fs.rename(aside, directory / FILE)
    return now


def read_description(directory: Path, fs: FileSystem, keys: StoreKeys | None = None) -> Description:
    """Read the directory's description; StoreError if it is missing or unreadable.

    Without its keys, that of an encrypted store has no namespaces.
    """
    path = directory / FILE
    try:
        return _parsed(_content(path, fs), None if keys is None else Veil.of(keys, FILE))
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{path} cannot be read ({error}), so the blocks next to it cannot be understood: "
            "start the server once with this store and its model, which writes it again"
        ) from error


def _content(path: Path, fs: FileSystem) -> bytes:
    fd = fs.open_file(path, "existing")
    try:
        content = np.zeros(fs.size(fd), dtype=np.uint8)
        return content[: fs.read(fd, 0, content)].tobytes()
    finally:
        fs.close_file(fd)


def _parsed(content: bytes, veil: Veil | None) -> Description:
    """Parse what `describe` wrote; ValueError if any of it differs in shape."""
    try:
        fields = json.loads(content)
        if fields["format"] != FORMAT:
            raise ValueError(f"format {fields['format']}, this Rekindle knows {FORMAT}")
        layout = KVLayout(fields["layout"]["block_tokens"], tuple(LayerSpec(**x) for x in fields["layout"]["layers"]))
        made_from = {str(name): str(value) for name, value in fields.get("made_from", {}).items()}
        namespaces = fields["namespaces"]
        if veil is not None:
            namespaces = json.loads(veil.open_matched(bytes.fromhex(fields["sealed_namespaces"])))
        return Description(str(fields["model"]), layout, tuple(map(str, namespaces)), made_from)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"damaged: {error!r}") from error
