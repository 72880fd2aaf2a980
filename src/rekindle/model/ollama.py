"""Models that Ollama has downloaded: which file holds the weights of a name.

Owns what a name stands for, and the form of the folder. Nothing is asked of a running Ollama, and nothing is changed.
What is there may have come from anybody: a manifest is a small file, or refused.

    manifests/registry.ollama.ai/library/NAME/TAG    JSON: the digests of the model's layers, each with what it is
    blobs/sha256-DIGEST                              a layer; that of the weights is a GGUF file
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from rekindle.errors import ModelRefused
from rekindle.model.gguf_header import shown

PREFIX = "ollama:"
VARIABLE = "OLLAMA_MODELS"
PLACES = (Path("~/.ollama/models"), Path("/usr/share/ollama/.ollama/models"))  # of a user; of Linux' service
HOST, NAMESPACE, TAG = "registry.ollama.ai", "library", "latest"
LAYER = "application/vnd.ollama.image."
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
PART = re.compile(r"\w[\w.-]*")  # of a name: no folder above
MOST_MANIFEST_BYTES = 1 << 20  # one has a kilobyte
MOST_NAMES = 20  # in an error


def ollama_file(name: str) -> Path:
    """The GGUF file of a model as Ollama names it, `[HOST/][NAMESPACE/]MODEL[:TAG]`; ModelRefused if it has none.

    Ollama's own template and parameters are left out; a model with an adapter is refused.
    """
    place = _place(name)
    try:
        folder = _folder()
        try:
            layers = _layers(folder / "manifests" / place)
        except FileNotFoundError as error:
            names = list(islice(_names(folder), MOST_NAMES + 1))
            listed = ", ".join([*names[:MOST_NAMES], *(["more"] if len(names) > MOST_NAMES else [])]) or "no models"
            raise ModelRefused(f"Ollama has no {name!r} in {folder}; it has {listed}") from error
        file = folder / "blobs" / _digest(name, layers).replace(":", "-")
        if not file.is_file():
            raise ModelRefused(f"Ollama's {name!r} lacks its weights, {file}: pull it again")
        return file
    except (OSError, ValueError, RecursionError) as error:
        raise ModelRefused(f"Ollama's {name!r} cannot be read: {error}") from error


def _folder() -> Path:
    named = os.environ.get(VARIABLE)
    places = [Path(named)] if named else list(PLACES)
    for place in places:
        if (place.expanduser() / "manifests").is_dir():
            return place.expanduser()
    searched = ", ".join(map(str, places))
    raise ModelRefused(f"there is no folder of Ollama's models ({searched}): set {VARIABLE} to it, or name a GGUF file")


def _place(name: str) -> PurePosixPath:
    """The path of a manifest; ModelRefused if this is no name."""
    path, _, tag = name.partition(":")
    parts = [*path.split("/"), tag or TAG]
    if len(parts) > 4 or not all(PART.fullmatch(part) for part in parts):
        raise ModelRefused(
            f"{name!r} is no name of Ollama's: write {PREFIX}MODEL or {PREFIX}MODEL:TAG, as `ollama list`"
        )
    return PurePosixPath(*[HOST, NAMESPACE][: 4 - len(parts)], *parts)


def _layers(manifest: Path) -> dict[str, str]:
    """What there is of a model, each with a digest; ValueError if this is no manifest."""
    if manifest.exists() and not manifest.is_file():  # a pipe would wait for who writes
        raise ValueError(f"{manifest} is no file")
    with manifest.open("rb") as file:
        data = file.read(MOST_MANIFEST_BYTES + 1)
    if len(data) > MOST_MANIFEST_BYTES:
        raise ValueError(f"{manifest} has more than {MOST_MANIFEST_BYTES >> 20} MiB")
    found: Any = json.loads(data)
    match found:
        case {"layers": [*layers]} if all(isinstance(layer, dict) for layer in layers):
            return {str(layer.get("mediaType")).removeprefix(LAYER): str(layer.get("digest")) for layer in layers}
        case _:
            raise ValueError("it lists no layers")


def _digest(name: str, layers: dict[str, str]) -> str:
    """The digest of the weights; ModelRefused if they are no single file."""
    if "adapter" in layers:
        raise ModelRefused(f"Ollama's {name!r} has an adapter next to its weights, which would be left out")
    if "model" not in layers:
        raise ModelRefused(f"Ollama's {name!r} is no GGUF file, but {shown(', '.join(sorted(layers))) or 'nothing'}")
    if not DIGEST.fullmatch(layers["model"]):
        raise ValueError(f"{layers['model']!r} is no digest")
    return layers["model"]


def _names(folder: Path) -> Iterator[str]:
    """What can be written for the models that are there, sorted."""
    root = folder / "manifests"
    for path in sorted(root.glob("*/*/*/*")):
        *place, model, tag = path.relative_to(root).parts
        shown = [part for part, usual in zip(place, (HOST, NAMESPACE), strict=True) if part != usual]
        yield "/".join([*shown, model]) + f":{tag}"
