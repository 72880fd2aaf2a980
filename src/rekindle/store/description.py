"""`layout.json`: what a store's directory says of itself, so that tools open it without the model.

Owns the file and its format. It is written whole beside its place and renamed, only when something in it has changed;
nothing in it is needed to open a store with its model.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from rekindle.errors import StoreError
from rekindle.spec import KVLayout, LayerSpec
from rekindle.store.sync import FileSystem

logger = logging.getLogger(__name__)

FILE = "layout.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Description:
    """The model's name, the geometry of its blocks, and the namespaces that were ever opened."""

    model: str
    layout: KVLayout
    namespaces: tuple[str, ...]


def describe(directory: Path, description: Description, fs: FileSystem) -> Description:
    """Write the description, with the namespaces that stood there before; return it with these.

    A store that cannot say what it is serves its model as well: that is logged, and no error.
    """
    try:
        return _described(directory, description, fs)
    except OSError as error:
        logger.warning("%s could not be described for tools: %s", directory, error)
        return description


def _described(directory: Path, description: Description, fs: FileSystem) -> Description:
    before = b""
    namespaces, model = set(description.namespaces), description.model
    if (directory / FILE).exists():
        before = _content(directory / FILE, fs)
        try:
            old = _parsed(before)
        except ValueError:
            old = description
        namespaces |= set(old.namespaces)
        model = model or old.model
    now = Description(model, description.layout, tuple(sorted(namespaces)))
    content = json.dumps({"format": FORMAT, **asdict(now)}, indent=1).encode()
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


def read_description(directory: Path, fs: FileSystem) -> Description:
    """What the directory says of itself; StoreError where it says nothing that can be read."""
    path = directory / FILE
    try:
        return _parsed(_content(path, fs))
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{path} cannot be read ({error}), so the blocks beside it cannot be understood: "
            "start the server once with this store and its model, which writes it again"
        ) from error


def _content(path: Path, fs: FileSystem) -> bytes:
    fd = fs.open_file(path, "existing")
    try:
        content = np.zeros(fs.size(fd), dtype=np.uint8)
        return content[: fs.read(fd, 0, content)].tobytes()
    finally:
        fs.close_file(fd)


def _parsed(content: bytes) -> Description:
    """ValueError unless all of it is as `describe` wrote it."""
    try:
        said = json.loads(content)
        if said["format"] != FORMAT:
            raise ValueError(f"format {said['format']}, this Rekindle knows {FORMAT}")
        layout = KVLayout(said["layout"]["block_tokens"], tuple(LayerSpec(**x) for x in said["layout"]["layers"]))
        return Description(str(said["model"]), layout, tuple(str(name) for name in said["namespaces"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"damaged: {error!r}") from error
