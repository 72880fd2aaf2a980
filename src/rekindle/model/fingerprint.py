"""The fingerprint: a digest of everything that must agree before stored KV may be reused.

Included: weight files and adapters, the config that reaches the forward pass, `quantization_config`, compute dtype,
weights in int8 or int4, RoPE regime, tokenizer file, KV layout, format version. Excluded: template, device, threads,
kernels, names.

Weight files are read once; their digests are cached by path, size, times and inode. A file of the hub cache is named by
its SHA-256 and is not read at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.errors import ModelRefused
from rekindle.spec import FORMAT_VERSION, KVLayout

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 22
BLOB_NAME = re.compile(r"[0-9a-f]{64}")
# Keys that do not affect K and V: names, versions, the choice of kernels, training, generation.
CONFIG_NOISE = frozenset(
    "_name_or_path name_or_path transformers_version architectures dtype torch_dtype use_cache attn_implementation "
    "_attn_implementation _attn_implementation_internal _experts_implementation experts_implementation "
    "initializer_range bos_token_id eos_token_id pad_token_id sep_token_id id2label label2id problem_type "
    "output_attentions output_hidden_states return_dict chunk_size_feed_forward task_specific_params pretraining_tp "
    "router_aux_loss_coef attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop".split()
)

CHANGING_ROPE = frozenset({"dynamic", "longrope", "su"})  # types whose K depends on the length that is served


class DigestCache:
    """SHA-256 of files, cached in one small JSON file (`path` None: not at all)."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, dict[str, Any]] = {}
        if path is not None and path.is_file():
            try:
                self._known = _remembered(json.loads(path.read_text("utf-8")))
            except (OSError, ValueError):
                self._known = {}  # damaged: everything is read again and the file rewritten

    def digest(self, file: Path) -> str:
        """The hex SHA-256 of a file; reads it (about 2 GB/s) only when it changed since it was last seen."""
        target = file.resolve()
        if target.parent.name == "blobs" and BLOB_NAME.fullmatch(target.name):
            return target.name
        stat = target.stat()
        seen = {
            "size": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "ctime_ns": stat.st_ctime_ns,  # overwriting a file with times and length preserved changes only this
            "inode": stat.st_ino,
        }
        known = self._known.get(str(target), {})
        if {name: known.get(name) for name in seen} != seen:
            known = {**seen, "sha256": _sha256(target)}
            self._known[str(target)] = known
            self._save()
        return str(known["sha256"])

    def _save(self) -> None:
        if self._path is None:
            return
        write_json(self._path, self._known)

    def check(self) -> None:
        """Assert that every cached digest is well-formed."""
        for path, known in self._known.items():
            assert BLOB_NAME.fullmatch(str(known.get("sha256"))), f"{path}: {known}"


def _remembered(found: Any) -> dict[str, dict[str, Any]]:
    """Return the valid entries of a file of digests; the files of all others are read again."""
    entries = found.items() if isinstance(found, dict) else ()
    return {
        path: known
        for path, known in entries
        if isinstance(known, dict) and BLOB_NAME.fullmatch(str(known.get("sha256")))
    }


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically, readable by its owner only.

    Its content can be recomputed: if the disk refuses the write, the next start takes longer, which is logged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.touch(mode=0o600)
        temporary.write_text(json.dumps(value, indent=1, sort_keys=True), "utf-8")
        temporary.replace(path)
    except OSError as error:
        logger.warning("%s cannot be written, so the next start takes longer: %s", path, error)
        with contextlib.suppress(OSError):
            temporary.unlink()


def _sha256(path: Path) -> str:
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


def tokenizer_digest(directory: Path, cache: DigestCache) -> str:
    """The digest of tokenizer.json, the only tokenizer file that is read."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelRefused(f"{directory} has no tokenizer.json (AutoTokenizer can convert and save one)")
    return cache.digest(path)


def forward_config(config: Any) -> dict[str, Any]:
    """The config without keys that do not affect K and V, sub-configs included."""
    return _without_noise(json.loads(json.dumps(config.to_dict(), default=str)))


def _without_noise(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_noise(item) for name, item in value.items() if name not in CONFIG_NOISE}
    return [_without_noise(item) for item in value] if isinstance(value, list) else value


def model_inputs(
    *,
    weights: Iterable[str],
    config: Any,
    dtype: torch.dtype,
    rope: str,
    tokenizer: str,
    weight_format: str = "native",
) -> dict[str, Any]:
    """All that what computes the KV is identified by, independent of how it is stored."""
    return {
        "weights": sorted(weights),
        "config": forward_config(config),
        "dtype": str(dtype),
        "rope": rope,
        "tokenizer": tokenizer,
        "format": FORMAT_VERSION,
        **({} if weight_format == "native" else {"weight_format": weight_format}),
    }


def model_identity(inputs: Mapping[str, Any]) -> bytes:
    """32 bytes that identify a model by its `model_inputs`."""
    return hashlib.blake2b(json.dumps(inputs, sort_keys=True).encode(), digest_size=32).digest()


def shown_inputs(inputs: Mapping[str, Any]) -> dict[str, str]:
    """The same `model_inputs` in few bytes, to say which of them differ: digests of those that are long."""
    shown = {"weight_format": "native", **inputs}
    digests = {name: model_identity({name: shown[name]}).hex()[:16] for name in ("weights", "config", "tokenizer")}
    return {name: digests.get(name, str(value)) for name, value in shown.items()}


def fingerprint(identity: bytes, layout: KVLayout) -> bytes:
    """32 bytes that identify the model and how its KV is stored."""
    return hashlib.blake2b(identity + layout.digest, digest_size=32, person=b"rekindle.model").digest()
