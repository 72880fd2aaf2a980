"""Where a model's files are and what they hold, read without loading a single weight.

Owns: the model's directory (bundled, local, or fetched from the hub), the list of weight files, their tensors' sizes
from the headers. Pickled weights are never read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle import pocket
from rekindle.errors import HubUnreachable, ModelRefused
from rekindle.model import gguf
from rekindle.model.gguf_header import GgufHeader
from rekindle.model.ollama import PREFIX, ollama_file
from rekindle.model.short_names import all_short_names, on_the_hub, short_name

SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model"]
ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
FLOATS = frozenset({"F64", "F32", "BF16", "F16"})
EXPERTS = re.compile(r"\bexperts\b|_exps\b")
QUANTISER_NUMBERS = re.compile(r"_(scales?|scale_inv|zero_point|shape|g_idx)$")  # not in the model once it is widened
HEADER_LIMIT_BYTES = 100_000_000  # the format's own bound
Header = Mapping[str, Any]  # of a safetensors file: tensor name -> {dtype, shape, data_offsets}


@dataclass(frozen=True, slots=True)
class Source:
    """A model as named by the user: a display name and where it is: a directory, a GGUF file, or else on the hub.

    `label`: the end of a GGUF file's name in that repository, as Q4_K_M, in any case.
    """

    name: str
    directory: Path | None
    revision: str | None = None
    file: Path | None = None
    label: str | None = None

    @classmethod
    def find(cls, model: str | None, revision: str | None) -> Source:
        """Resolve None to the bundled model, else an existing directory or GGUF file, else a short or a hub name.

        A short name is the file of its package where that is installed and no revision is asked for. A hub name is
        `owner/name`, or `owner/name:LABEL` for a GGUF file in that repository. `ollama:NAME` is a file of Ollama's.
        """
        if model is None or model == pocket.NAME:
            return cls(pocket.NAME, pocket.model_dir())
        path = Path(model).expanduser()
        if path.is_dir():
            file = None if (path / gguf.CONFIG).is_file() else gguf.gguf_in(path.absolute())
            return cls(path.absolute().name, path.absolute() if file is None else None, file=file)
        if path.is_file() and (gguf.is_gguf(path) or gguf.begins_as_gguf(path)):
            return cls(path.stem, None, file=path.absolute())
        if model.startswith(PREFIX):
            name = model.removeprefix(PREFIX)
            return cls(name, None, file=ollama_file(name))
        short = short_name(model)
        if short is not None:
            file = short.installed() if revision is None else None
            return cls(short.hub, None, revision) if file is None else cls(file.stem, None, file=file)
        if gguf.NAMED.fullmatch(model):
            name, label = model.split(":")
            return cls(name, None, revision, label=label)
        if model.casefold() == "bundled":
            raise ModelRefused(f"{model} is the name of no model: that of the bundled one is {pocket.NAME}")
        if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
            raise ModelRefused(f"{model}: there is no such directory, nor a GGUF file of this name")
        return cls(model, None, revision)

    @property
    def key(self) -> str:
        """Names the model among others in one cache: a path, or a hub name."""
        return str(self.directory or self.file or (f"{self.name}:{self.label}" if self.label else self.name))

    def fetch_description(self) -> Path:
        """The directory with the model's small files (config, tokenizer, template)."""
        return self.directory or self._of_gguf() or _snapshot(self, SMALL_FILES)

    def fetch_texts(self) -> Path:
        """The same for who only writes and reads texts: also of a GGUF file that another engine alone can load."""
        return self.directory or self._of_gguf(gguf.described) or _snapshot(self, SMALL_FILES)

    def fetch(self) -> Path:
        """The directory with everything, weights included; downloads what the local hub cache lacks."""
        return self.directory or self._of_gguf() or _snapshot(self, [*SMALL_FILES, "*.safetensors"])

    def _of_gguf(self, directory_of: Callable[[Path], Path] = gguf.opened) -> Path | None:
        """The model directory of a GGUF file; None if it is none."""
        if self.file is not None:
            return directory_of(self.file)
        if self.label is None:
            return None
        endings = [self.label + gguf.SUFFIX, f"{self.label}-00001-of-00001{gguf.SUFFIX}"]
        patterns = [f"*{_in_any_case(ending)}" for ending in endings]
        directory = _snapshot(self, patterns)
        found = sorted(file for pattern in patterns for file in directory.rglob(pattern))
        if len(found) != 1:
            names = ", ".join(file.name for file in found) or "none"
            raise ModelRefused(f"{self.name} has no single GGUF file whose name ends in {self.label}: {names}")
        return directory_of(found[0])


def _in_any_case(text: str) -> str:
    """A pattern of file names that matches the text in upper and lower case."""
    return "".join(f"[{char.lower()}{char.upper()}]" if char.isalpha() else char for char in text)


def _snapshot(source: Source, patterns: list[str]) -> Path:
    """Fetch files from the hub; every error says what to do."""
    from huggingface_hub import errors, snapshot_download

    name = source.name
    try:
        return Path(snapshot_download(name, revision=source.revision, allow_patterns=patterns))
    except errors.GatedRepoError as error:
        raise ModelRefused(
            f"{name} is gated: accept its terms at https://huggingface.co/{name}, "
            "then set HF_TOKEN or run `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelRefused(f"{name} has no revision {source.revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelRefused(
            f"{name} is neither a directory here nor a model on the hub (if it is private, set HF_TOKEN), nor one of "
            f"the short names {all_short_names()}"
        ) from error
    except errors.HFValidationError as error:
        raise ModelRefused(f"{name!r} is neither a directory nor a hub name of the form owner/name") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, OSError) as error:
        raise HubUnreachable(
            f"{name} is not in the local hub cache and the hub cannot be reached (offline?): {_elsewhere(name)}fetch "
            f"it where there is a network with `hf download {name}`, or name a local directory"
        ) from error


def _elsewhere(name: str) -> str:
    """Where else than on the hub a model is, to be put before what else may help."""
    short = on_the_hub(name)
    return "" if short is None else f"{short.without_the_hub} gets it from PyPI; or "


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of the model, sorted by name, or its GGUF file; ModelRefused if one is missing."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise ModelRefused(f"{directory} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}")
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    file = gguf.gguf_in(directory)
    if file is None:
        raise ModelRefused(f"{directory} has no model.safetensors and no GGUF file; pickles are not read")
    return [file]


def adapter_files(directory: Path) -> list[Path]:
    """The files of a PEFT adapter next to the weights, which `transformers` applies while loading."""
    found = sorted(directory.glob("adapter_*"))
    return found if directory / "adapter_config.json" in found else []


def read_headers(files: list[Path]) -> list[Header]:
    """The headers of all files; ModelRefused if one is damaged."""
    return [_read_header(path) for path in files]


def _read_header(path: Path) -> Header:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= min(HEADER_LIMIT_BYTES, path.stat().st_size):
            raise ModelRefused(f"{path} is not a safetensors file or is cut short (a Git LFS pointer?)")
        try:
            header: dict[str, Any] = json.loads(file.read(size))
        except ValueError as error:
            raise ModelRefused(f"{path}: damaged safetensors header") from error
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if path.stat().st_size != 8 + size + end:
        raise ModelRefused(f"{path} has {path.stat().st_size} bytes where its header promises {8 + size + end}")
    return header


def gguf_file(files: list[Path]) -> Path | None:
    """The GGUF file, if that is what the weights are in."""
    return files[0] if gguf.is_gguf(files[0]) else None


def widened_bytes(files: list[Path], packed_bits: int) -> int:
    """Bytes of all tensors once quantised values take 16 bits, those that are packed in integers from `packed_bits`."""
    factors = {"I8": 2.0, "U8": 16 / packed_bits, "I32": 16 / packed_bits}
    total = 0
    for header in read_headers(files):
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            factor = 2.0 if entry["dtype"].startswith("F8") else factors.get(entry["dtype"], 1.0)
            total += 0 if QUANTISER_NUMBERS.search(name) else int((end - start) * factor)
    return total


def expert_share(files: list[Path]) -> float:
    """The share of the files' bytes that belongs to experts of mixtures, by the names of tensors."""
    file = gguf_file(files)
    if file is not None:
        sizes = [(tensor.name, tensor.end - tensor.begin) for tensor in GgufHeader.read(file).tensors]
    else:
        entries = (item for header in read_headers(files) for item in header.items())
        sizes = [(name, entry["data_offsets"][1] - entry["data_offsets"][0]) for name, entry in entries]
    return sum(size for name, size in sizes if EXPERTS.search(name)) / max(1, sum(size for _, size in sizes))


def expected_bytes(files: list[Path], float_bytes: float | None) -> int:
    """Bytes of all tensors in the files, floats counted at `float_bytes` each if it is given; GGUF's at 2 otherwise."""
    file = gguf_file(files)
    if file is not None:
        return int(gguf.types_and_values(file)[1] * (float_bytes or 2))
    total = 0
    for header in read_headers(files):
        for entry in header.values():
            start, end = entry["data_offsets"]
            kind = entry["dtype"]
            scale = float_bytes / ITEM_BYTES[kind] if float_bytes and kind in FLOATS else 1.0
            total += int((end - start) * scale)
    return total
