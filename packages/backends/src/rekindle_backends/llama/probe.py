"""What a llama-server's slots keep of a token, learned from the state of a few, and whether that can be blocks.

An identity names everything that stored rows depend on: the model's file, ggml's types, the format of the file, the
flags that change what is computed with the files that they name, and which of its rotations a model takes for contexts
of this length. Another identity is another store.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rekindle.errors import BackendFailed
from rekindle.model.fingerprint import DigestCache
from rekindle.model.gguf_header import GgufHeader
from rekindle.spec import KVLayout
from rekindle_backends.client import Backend
from rekindle_backends.llama.layout import layout_of
from rekindle_backends.llama.shapes import FileShape
from rekindle_backends.llama.slot_file import SlotFile
from rekindle_backends.llama.slot_folder import SlotFolder
from rekindle_backends.wire import error_text

NUM_PROBED = 8
# Flags that place or speed up a computation without changing what its rows mean; each with a value.
PLACING = frozenset(
    "-t --threads -tb --threads-batch -ngl --gpu-layers --n-gpu-layers -np --parallel -c --ctx-size -b --batch-size "
    "-ub --ubatch-size -dev --device -mg --main-gpu -ts --tensor-split -sm --split-mode --log-file -lv --prio --poll "
    "--cache-ram -cram --timeout -to --threads-http --numa --alias -a -fit --fit".split()
)


@dataclass(frozen=True, slots=True)
class ProbedSlots:
    """The shape of slot files, the layout of blocks for them, and what stored blocks depend on, by name."""

    shape: FileShape
    layout: KVLayout
    identity: dict[str, str]


def described(shape: FileShape, *, file: Path, max_context: int, depends_on: Mapping[str, str]) -> ProbedSlots:
    """Say what slots of `max_context` tokens keep whose files have this shape, of the model in a GGUF `file`;
    `depends_on` is what else the rows depend on, by name. Unsupported for what cannot be blocks.
    """
    header = GgufHeader.read(file)
    architecture = header.values.get("general.architecture")
    window = header.values.get(f"{architecture}.attention.sliding_window")
    layout = layout_of(shape, window if isinstance(window, int) and window > 0 else None)
    identity = {"engine": "llama.cpp", "rows": shape.identity.decode(), **depends_on}
    # LongRoPE: llama.cpp takes other factors for all positions of a longer context (llama-model.cpp, get_rope_factors).
    usual = header.values.get(f"{architecture}.rope.scaling.original_context_length")
    if isinstance(usual, int) and max_context > usual:
        identity["rotation"] = "long"
    return ProbedSlots(shape, layout, identity)


async def probe(backend: Backend, folder: SlotFolder) -> SlotFile:
    """Compute a few tokens in slot 0, read its state, and empty it; BackendFailed or SlotFileError if that fails."""
    body = {
        "prompt": list(range(1, 1 + NUM_PROBED)),
        "n_predict": 1,
        "id_slot": 0,
        "cache_prompt": False,
        "return_tokens": True,
    }
    await _asked(backend, "/completion", body)
    name = folder.new_name(0)
    try:
        await _asked(backend, "/slots/0?action=save", {"filename": name})
        try:
            return SlotFile.open(folder.path / name)
        except OSError as error:
            raise BackendFailed(f"it saved no file in {folder.path} that can be read here: {error.strerror}") from error
    finally:
        folder.remove(name)
        await _asked(backend, "/slots/0?action=erase", {})


async def _asked(backend: Backend, path: str, body: dict[str, object]) -> None:
    status, answer = await backend.fetch("POST", path, body)
    if status != 200:
        raise BackendFailed(f"it answers {path.partition('?')[0]} with status {status}: {error_text(answer)}")


def flags_and_files(flags: Sequence[str], digests: DigestCache) -> dict[str, str]:
    """What the rows of a server with these flags depend on, by name."""
    changed = changing(flags)
    return {"flags": " ".join(changed), "files": " ".join(digests.digest(each) for each in files_of(changed))}


def changing(flags: Sequence[str]) -> list[str]:
    """The flags that may change rows: all but those that are known not to, with their values."""
    found, is_value = list[str](), False
    for flag in flags:
        name, _, value = flag.partition("=")
        if is_value:
            is_value = False
        elif name in PLACING:
            is_value = not value
        else:
            found.append(flag)
    return found


def files_of(flags: Sequence[str]) -> list[Path]:
    """The files that flags name, also in a list and before a scale, such as those of adapters."""
    parts = [part for flag in flags for part in re.split("[,=]", flag)]
    named = {Path(piece) for part in parts for piece in [part, part.rpartition(":")[0]] if piece}
    return sorted(each for each in named if each.is_file())
