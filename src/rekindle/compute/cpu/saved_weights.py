"""What earlier starts left of a model's weights: the decision on their format, and the packed ones in a file.

Owns the key of that file and which modules its weights belong to. A model that gets them is not compared with torch
again, and what they replace is never read: all that was proved when they were packed, for the same model, versions,
code and kernels, on such a processor. Anything else has another key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rekindle.compute.cpu import experts, packed
from rekindle.compute.cpu.kernels.linear import PackedWeights
from rekindle.compute.cpu.packed_modules import PackedModule
from rekindle.compute.cpu.packer import KernelPacker, Packed, Packer
from rekindle.compute.cpu.weights import NO_GRIDS, Linears, Setting, WeightsChoice
from rekindle.compute.cpu.weights_file import Contents, DamagedFile, UnsavedWeights, WeightsFile, lacking_room
from rekindle.config import ModelSettings
from rekindle.model.fingerprint import model_identity
from rekindle.model.gguf_grids import FileGrid
from rekindle.model.kept_tensors import kept_tensors
from rekindle.model.loaded import Compute
from rekindle.model.proof import circumstances

LEAST_BYTES = 64 << 20  # packing as much takes a tenth of a second


@dataclass(frozen=True, slots=True)
class ReadyWeights:
    """The format in which a model's weights are packed now, None if they are not; and notes for the banner."""

    chosen: WeightsChoice | None
    notes: tuple[str, ...] = ()
    unsaved: UnsavedWeights | None = None

    @property
    def weights(self) -> str:
        """The name of the format in the model's identity."""
        return "native" if self.chosen is None else self.chosen.weights


@dataclass(frozen=True, slots=True, eq=False)
class FoundWeights:
    """What is in a file of packed weights, and their format; all None if there is no such file, or no whole one."""

    chosen: WeightsChoice | None = None
    contents: Contents | None = None
    path: Path | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SavedWeights:
    """What is in a directory of one model's weights (None: nothing); `source` is the model's name or path.

    The file is of weights for the processor: those for a card are packed there at every start. `inputs` gives those of
    the model's identity for a `dtype` and a `weight_format`. `keeps_codes`: `native` means the codes of quantised
    files, where some are on grids.
    """

    directory: Path | None
    source: str
    settings: ModelSettings
    compute: Compute
    packer: Packer | None
    inputs: Callable[..., Mapping[str, Any]]
    keeps_codes: bool = False

    @property
    def setting(self) -> Setting:
        """The format that is asked for."""
        return "codes" if self.keeps_codes and self.settings.weights == "native" else self.settings.weights

    def decision(self, dtype: torch.dtype) -> Path | None:
        """The file with the decision of the self-check; it may be missing."""
        name = f"weights-{model_identity(self.inputs(dtype=dtype)).hex()[:32]}.json"
        return self.directory / name if self.directory else None

    def find(self, dtype: torch.dtype) -> FoundWeights:
        """What an earlier start left for a model of this dtype; why not is in the notes if it should have."""
        chosen = Linears(None, set(), self.packer).decided(self.setting, self.decision(dtype))
        file = None if chosen is None else self._file(dtype, chosen)
        if file is None:
            return FoundWeights()
        try:
            return FoundWeights(chosen, file.read(), file.path)
        except DamagedFile as error:
            return FoundWeights(notes=(_not_used(file.path, error),))

    def place(self, model: Any, found: FoundWeights) -> ReadyWeights:
        """Give a model as it was loaded the packed weights that were found, if there are any that fit."""
        contents, packer = found.contents, self.packer
        if contents is None or found.chosen is None or found.path is None or packer is None:
            return ReadyWeights(None, found.notes)
        try:
            place(model, packer, contents.weights)
        except DamagedFile as error:
            return ReadyWeights(None, (_not_used(found.path, error),))
        packed.release_files(model)
        described = Linears(model, set(), packer).described(found.chosen)
        note = f"packed weights: {contents.num_bytes:,} bytes are mapped from {found.path}"
        return ReadyWeights(found.chosen, (*contents.notes, *described, note))

    def pack(
        self,
        linears: Linears,
        chosen: WeightsChoice,
        notes: tuple[str, ...],
        names: Iterable[str] = (),
        grids: Mapping[str, FileGrid] = NO_GRIDS,
    ) -> ReadyWeights:
        """Pack a model's weights now; what is to be written for the next start comes with them.

        `notes` go first. `names`: of all weights that were read, if the next start is not to read them again; `grids`:
        the codes of some.
        """
        made = linears.pack(chosen, grids)
        described = linears.described(chosen)
        left = tuple(note for note in made if note not in described)
        file = self._file(linears.model.dtype, chosen)
        if file is None:
            return ReadyWeights(chosen, (*notes, *made))
        contents = Contents(named(linears.model), left, kept_tensors(linears.model, names))
        unsaved, said = self._unsaved(file, contents)
        return ReadyWeights(chosen, (*notes, *made, *said), unsaved)

    def _unsaved(self, file: WeightsFile, contents: Contents) -> tuple[UnsavedWeights | None, list[str]]:
        num_bytes = contents.num_bytes
        if num_bytes < (LEAST_BYTES if self.settings.map_weights == "auto" else 1):
            return None, []
        lacking = lacking_room(file.directory, num_bytes)
        if lacking is not None:
            return None, [f"packed weights: {num_bytes:,} bytes are not kept for the next start: {lacking}"]
        note = f"packed weights: {num_bytes:,} bytes are kept in {file.path} for the next start"
        return UnsavedWeights(file, contents), [note]

    def _file(self, dtype: torch.dtype, chosen: WeightsChoice) -> WeightsFile | None:
        if self.directory is None or self.settings.map_weights == "off" or not isinstance(self.packer, KernelPacker):
            return None
        identity = model_identity(self.inputs(dtype=dtype, weight_format=chosen.weights))
        found = circumstances(self.settings.device, self.compute)
        conditions = json.dumps(found, sort_keys=True)
        key = hashlib.blake2b(identity + conditions.encode(), digest_size=16).hexdigest()
        family = hashlib.blake2b(f"{chosen.weights} {self.source}".encode(), digest_size=8).hexdigest()
        return WeightsFile(self.directory, family, key)


def _not_used(path: Path, why: DamagedFile) -> str:
    return f"packed weights: {path} is not used, as {why}; they are packed anew"


def named(model: nn.Module) -> dict[str, PackedWeights]:
    """The packed weights of a model by the names of the modules that use them, experts with their number."""
    modules = {path: module.packed for path, module in model.named_modules() if isinstance(module, PackedModule)}
    both = modules | dict(experts.named_weights(model))
    return {path: weights for path, weights in both.items() if isinstance(weights, PackedWeights)}


def place(model: nn.Module, packer: Packer, found: Mapping[str, PackedWeights]) -> None:
    """Put modules over these weights, named as by `named`, in place of a model's own.

    DamagedFile, and nothing is changed, if the model has no such modules.
    """
    left = dict[str, Packed](found)
    projections = experts.fitting(model, left)
    modules = dict(model.named_modules())
    for path, weights in left.items():
        if path not in modules or not packed.fits(modules[path], weights):
            raise DamagedFile(f"the model has no such {path}")
    packed.replace(model, packer, {modules[path]: weights for path, weights in left.items()})
    experts.replace(projections, packer)
