"""A GGUF file as a model directory: its config, tokenizer and template next to a link to the file.

Owns where these directories are and what is in them. transformers reads the file, and widens its weights while it loads
them; what was quantised is packed again afterwards, in 8 bits. A directory of the user's that has these small files and
one GGUF file is such a directory, too: the original's tokenizer is the better one.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from rekindle.errors import ModelRefused
from rekindle.model.refusals import refusing

NAMED = re.compile(r"[\w.-]+/[\w.-]+:[\w.-]+")  # owner/name:Q4_K_M
SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
PLAIN = frozenset({"F32", "F16", "BF16", "F64"})  # types of values that are not quantised
CONFIG = "config.json"
SMALL_FILES = (CONFIG, "tokenizer.json")
MISSING = "GGUF files are read by transformers with the package gguf, which is missing: pip install gguf"


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
    return [] if any(directory.glob("*.safetensors")) else sorted(directory.glob("*.gguf"))


def _refuse_part(file: Path) -> None:
    if SPLIT.search(file.name):
        raise ModelRefused(f"{file} is a part of a GGUF file: join its parts with llama.cpp's llama-gguf-split")


def opened(file: Path) -> Path:
    """The model directory of a GGUF file: its own, if it is alone there with a config and a tokenizer, else a new one.

    New ones are in the user's cache directory, and found there again.
    """
    _refuse_part(file)
    if _candidates(file.parent) == [file] and all((file.parent / name).is_file() for name in SMALL_FILES):
        return file.parent
    from platformdirs import user_cache_path

    status = file.stat()
    described = f"{file.resolve()} {status.st_size} {status.st_mtime_ns}".encode()
    digest = hashlib.blake2b(described, digest_size=6).hexdigest()
    target = user_cache_path("rekindle") / "gguf" / f"{file.stem}-{digest}"
    if not target.is_dir():
        _write(file, target)
    return target


def _write(file: Path, target: Path) -> None:
    """Write the small files and a link to a temporary directory, then move it to `target`, unless that is there."""
    from transformers import AutoConfig, AutoTokenizer

    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=target.parent, prefix=".making-"))
    try:
        with refusing(f"{file} cannot be read", "; name the original model, from which it was made"):
            described: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
            AutoConfig.from_pretrained(**described).save_pretrained(made)
            AutoTokenizer.from_pretrained(**described).save_pretrained(made)
        (made / file.name).symlink_to(file.resolve())
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # another process was faster
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def reading(file: Path) -> dict[str, Any]:
    """Arguments with which transformers reads the weights from a file, and widens all of them."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)  # versions without it widen all weights
    widened = {} if config is None else {"quantization_config": config(dequantize=True)}
    return {"gguf_file": file.name, **widened}


def types_and_values(file: Path) -> tuple[frozenset[str], int]:
    """The types in which a file's tensors are stored, by their GGUF names, and the number of all their values."""
    return _types_and_values(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _types_and_values(file: Path, changed_ns: int) -> tuple[frozenset[str], int]:
    """As `types_and_values`: parsing the vocabulary on the way takes a second."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelRefused(MISSING) from error
    with refusing(f"{file} cannot be read"):
        tensors = GGUFReader(file).tensors
    return frozenset(tensor.tensor_type.name for tensor in tensors), sum(int(tensor.n_elements) for tensor in tensors)
