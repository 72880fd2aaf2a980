"""A GGUF file as a model directory: its config, tokenizer and templates next to a link to the file.

Owns where these directories are, what is in them, and when one is made anew: each is named by the file's path, the
digest of its header and `CONVERTER`, the version of what makes it. An index says which belongs to a file that has not
changed, so that a later start does not read the header. Weights are widened while they are loaded (`gguf_weights`), and
what was quantised is packed again afterwards, as the same codes where the kernels have such a form (`gguf_grids`), in 8
bits otherwise. A directory of the user's that has these small files and one
GGUF file is such a directory, too: the original's tokenizer is the better one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rekindle.errors import ModelRefused
from rekindle.model.fingerprint import write_json
from rekindle.model.gguf_config import config_files, description_files
from rekindle.model.gguf_header import MAGIC, GgufHeader
from rekindle.model.gguf_tokenizer import tokenizer_files

CONVERTER = 2  # increase it whenever another config or tokenizer is made of the same header
NAMED = re.compile(r"[\w.-]+/[\w.-]+:[\w.-]+")  # owner/name:Q4_K_M
SUFFIX = ".gguf"  # in any case
PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)
PLAIN = frozenset({"F32", "F16", "BF16", "F64"})  # types of values that are not quantised
CONFIG = "config.json"
SMALL_FILES = (CONFIG, "tokenizer.json")
TENSORS = "gguf.json"  # of a directory that was made: what its tensors are
INDEX = "index.json"
LAYERS = "blk."  # tensors of layers have names that begin so
MISSING = "GGUF files are read with the package gguf, which is missing: pip install gguf"


def is_gguf(file: Path) -> bool:
    """Whether a file is named as one."""
    return file.suffix.lower() == SUFFIX


def begins_as_gguf(file: Path) -> bool:
    """Whether a file begins as one: of Ollama's, the name is a digest. OSError if it cannot be read."""
    with file.open("rb") as opened:
        return opened.read(len(MAGIC)) == MAGIC


def gguf_in(directory: Path) -> Path | None:
    """The GGUF file of a model directory without safetensors; ModelRefused if there are several, or parts of one."""
    files = _candidates(directory)
    for file in files:
        _refuse_part(file)
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelRefused(f"{directory} holds several GGUF files ({names}): name the one to serve")
    return files[0] if files else None


def _candidates(directory: Path) -> list[Path]:
    if any(directory.glob("*.safetensors")):
        return []
    return sorted(file for file in directory.iterdir() if is_gguf(file))


def _refuse_part(file: Path) -> None:
    found = PART.search(file.name)
    if found and int(found[1]) != 1:
        raise ModelRefused(f"{file} is a part of a GGUF file: join its parts with llama.cpp's llama-gguf-split")


def opened(file: Path) -> Path:
    """The model directory of a GGUF file: its own, if it is alone there with a config and a tokenizer, else a made one.

    Made ones are in the user's cache directory, and found there again.
    """
    _refuse_part(file)
    if _candidates(file.parent) == [file] and all((file.parent / name).is_file() for name in SMALL_FILES):
        return file.parent
    return _Cache("gguf", config_files).directory(file)


def described(file: Path) -> Path:
    """As `opened`, for texts: of a file that another engine alone can load, its config says little more than sizes."""
    try:
        return opened(file)
    except ModelRefused:
        return _Cache("gguf-texts", description_files).directory(file)  # refuses what no tokenizer can be made of


class _Cache:
    """The directory of made directories, of this name in the user's cache; `config`: the files that say what it is."""

    def __init__(self, name: str, config: Callable[[GgufHeader], dict[str, dict[str, Any]]]) -> None:
        from platformdirs import user_cache_path

        self._root = user_cache_path("rekindle") / name
        self._config = config

    def directory(self, file: Path) -> Path:
        """The model directory of a file, made if it is not there."""
        target, status = file.resolve(), file.stat()
        seen = {
            "converter": CONVERTER,
            "size": status.st_size,
            "mtime_ns": status.st_mtime_ns,
            "ctime_ns": status.st_ctime_ns,  # changes even where length and times are preserved
            "inode": status.st_ino,
        }
        index = self._index()
        known = index.get(str(target))
        if isinstance(known, dict) and {**seen, "directory": known.get("directory")} == known:
            made = self._root / str(known["directory"])
            if made.is_dir():
                return made
        header = GgufHeader.read(file)
        described = f"{CONVERTER} {target} {header.digest}".encode()
        made = self._root / f"{file.stem}-{hashlib.blake2b(described, digest_size=6).hexdigest()}"
        if not made.is_dir():
            _write(header, made, self._config(header))
        write_json(self._root / INDEX, {**index, str(target): {**seen, "directory": made.name}})
        return made

    def _index(self) -> dict[str, Any]:
        """Which directory belongs to which file; empty if it is not there or damaged: headers are read again then."""
        try:
            found = json.loads((self._root / INDEX).read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _write(header: GgufHeader, target: Path, config: dict[str, dict[str, Any]]) -> None:
    """Write the small files, these configs among them, and a link to a temporary directory, then move it to `target`,
    unless that is there."""
    files = {**config, **tokenizer_files(header), TENSORS: _summary(header)}
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=target.parent, prefix=".making-"))
    try:
        for name, content in files.items():
            (made / name).write_text(json.dumps(content, ensure_ascii=False), "utf-8")
        (made / f"{header.path.stem}{SUFFIX}").symlink_to(header.path.resolve())
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # another process was faster
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def check_package() -> None:
    """Refuse to read tensors without the package that knows how."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelRefused(MISSING)


def reading(file: Path) -> dict[str, Any]:
    """Arguments with which transformers reads the weights from a file, and widens all of them."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)  # versions without it widen all weights
    widened = {} if config is None else {"quantization_config": config(dequantize=True)}
    return {"gguf_file": file.name, **widened}


def types_and_values(file: Path) -> tuple[frozenset[str], int]:
    """The types in which a file's tensors are stored, by their GGUF names, and the number of all their values."""
    found = _described(file)
    return frozenset(found["types"]), int(found["values"])


def main_type(file: Path) -> str:
    """The type in which most linear layers' values are: of the tensors inside layers."""
    return str(_described(file)["main"])


def _described(file: Path) -> dict[str, Any]:
    summary = file.parent / TENSORS
    if file.is_symlink() and summary.is_file():
        return dict(json.loads(summary.read_text("utf-8")))
    return _summary(GgufHeader.read(file))


def _summary(header: GgufHeader) -> dict[str, Any]:
    types = sorted({tensor.type.name for tensor in header.tensors})
    values = Counter[str]()
    for tensor in header.tensors:
        values[tensor.type.name] += tensor.num_values if tensor.name.startswith(LAYERS) else 0
    return {
        "types": types,
        "values": sum(tensor.num_values for tensor in header.tensors),
        "main": values.most_common(1)[0][0] if values else "F32",
    }
