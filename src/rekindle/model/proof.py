"""What was proved of a model at load, and when it need not be proved again.

The trial forward and the self-test take seconds on larger models, and a server that was killed should be warm at once.
A proof holds for the same model and formats, on the same processor with as many threads, under the same versions of
torch, transformers and what reads quantised layers, and for the same code of rekindle, kernels included; anything else
is proved again.
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers

from rekindle.config import ModelSettings
from rekindle.model.fingerprint import write_json
from rekindle.model.loaded import Compute, Promise

QUANTISERS = ("bitsandbytes", "compressed-tensors", "torchao")  # compute quantised layers, or widen them
CORE = Path(__file__).parents[1]
PROVING_CODE = ("compute", "kv", "layer_forms.py", "model", "spec.py")


@dataclass(frozen=True, slots=True)
class Proof:
    """The promise for the same ids on different paths, and the finding in words.

    `is_steady`: the bits of a row that decodes do not depend on what else is in its step.
    """

    promise: Promise
    finding: str
    is_steady: bool


class ProofCache:
    """Proofs in one directory, a small file each (`directory` None: nothing is stored)."""

    def __init__(
        self,
        directory: Path | None,
        identity: bytes,
        settings: ModelSettings,
        block_tokens: int,
        compute: Compute,
    ) -> None:
        self._path: Path | None = None
        if directory is not None:
            where = {
                **circumstances(settings.device, compute),
                "threads": torch.get_num_threads(),
                "device": settings.device,
                "kv": settings.kv,
                "block_tokens": block_tokens,
            }
            digest = hashlib.blake2b(identity + json.dumps(where, sort_keys=True).encode(), digest_size=16)
            self._path = directory / f"proof-{digest.hexdigest()}.json"

    def read(self) -> Proof | None:
        """Return the stored proof, None if there is none (or it cannot be read)."""
        if self._path is None or not self._path.is_file():
            return None
        try:
            return Proof(**json.loads(self._path.read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, proof: Proof) -> None:
        """Store a proof for the next start."""
        if self._path is not None:
            write_json(self._path, asdict(proof))


def circumstances(device: str, compute: Compute) -> dict[str, Any]:
    """What any proof depends on in addition to the model: code, versions, processor, kernels."""
    on_gpu = torch.device(device).type == "cuda"
    return {
        "code": code_digest(*(CORE / name for name in PROVING_CODE)),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "quantisers": {name: _version(name) for name in QUANTISERS},
        "machine": platform.machine(),
        "processor": torch.cuda.get_device_name(device) if on_gpu else torch.backends.cpu.get_cpu_capability(),
        "kernels": [compute.level, compute.digest],
    }


def computed_by(device: str, compute: Compute) -> int:
    """Return a number from 1 up for what computes blocks here: with another one, equal ids may give other bits."""
    where = json.dumps({**circumstances(device, compute), "threads": torch.get_num_threads()}, sort_keys=True)
    return 1 + int.from_bytes(hashlib.blake2b(where.encode(), digest_size=7).digest(), "little")


@cache
def _version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def code_digest(*places: Path) -> str:
    """A digest of Python code, files or folders of them; under a millisecond."""
    hasher = hashlib.blake2b(digest_size=16)
    for place in places:
        for path in sorted(place.rglob("*.py")) or [place]:
            hasher.update(path.read_bytes())
    return hasher.hexdigest()
