"""What earlier starts left of a model's weights: the decision on their format, and the packed ones in a file.

Owns the key of that file and which modules its weights belong to. A model that gets them is not compared with torch
again, and what they replace is never read: all that was proved when they were packed, for the same model, versions,
code and kernels, on such a processor. Anything else has another key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rekindle.config import ModelSettings
from rekindle.kernels.library import KernelChoice
from rekindle.kernels.linear import LinearKernel, PackedWeights
from rekindle.model import experts, packed
from rekindle.model.packed_modules import PackedModule
from rekindle.model.proof import circumstances
from rekindle.model.weights import Linears, WeightsChoice
from rekindle.model.weights_file import Contents, DamagedFile, UnsavedWeights, WeightsFile, lacking_room

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
class SavedWeights:
    """What is in a directory of one model's weights (None: nothing); `source` is the model's name or path.

    `identify` gives the model's identity for a `dtype` and a `weight_format`.
    """

    directory: Path | None
    source: str
    settings: ModelSettings
    kernels: KernelChoice
    identify: Callable[..., bytes]

    def decision(self, dtype: torch.dtype) -> Path | None:
        """The file with the decision of the self-check; it may be missing."""
        return self.directory / f"weights-{self.identify(dtype=dtype).hex()[:32]}.json" if self.directory else None

    def place(self, model: Any) -> ReadyWeights:
        """Give a model as it was loaded the packed weights of an earlier start, if there are any that fit."""
        linears = Linears(model, set(), self.kernels)
        chosen, library = linears.decided(self.settings.weights, self.decision(model.dtype)), self.kernels.library
        file = None if chosen is None else self._file(model, chosen)
        if chosen is None or library is None or file is None:
            return ReadyWeights(None)
        try:
            contents = file.read()
            if contents is None:
                return ReadyWeights(None)
            place(model, LinearKernel(library), contents.weights)
        except DamagedFile as error:
            return ReadyWeights(None, (f"packed weights: {file.path} is not used, as {error}; they are packed anew",))
        packed.release_files(model)
        note = f"packed weights: {contents.num_bytes:,} bytes are mapped from {file.path}"
        return ReadyWeights(chosen, (*contents.notes, *linears.described(chosen), note))

    def pack(self, linears: Linears, chosen: WeightsChoice, notes: tuple[str, ...]) -> ReadyWeights:
        """Pack a model's weights now; what is to be written for the next start comes with them. `notes` go first."""
        made = linears.pack(chosen)
        described = linears.described(chosen)
        contents = Contents(named(linears.model), tuple(note for note in made if note not in described))
        unsaved, said = self._unsaved(self._file(linears.model, chosen), contents)
        return ReadyWeights(chosen, (*notes, *made, *said), unsaved)

    def _unsaved(self, file: WeightsFile | None, contents: Contents) -> tuple[UnsavedWeights | None, list[str]]:
        num_bytes = contents.num_bytes
        if file is None or num_bytes < (LEAST_BYTES if self.settings.map_weights == "auto" else 1):
            return None, []
        lacking = lacking_room(file.directory, num_bytes)
        if lacking is not None:
            return None, [f"packed weights: {num_bytes:,} bytes are not kept for the next start: {lacking}"]
        note = f"packed weights: {num_bytes:,} bytes are kept in {file.path} for the next start"
        return UnsavedWeights(file, contents), [note]

    def _file(self, model: Any, chosen: WeightsChoice) -> WeightsFile | None:
        if self.directory is None or self.settings.map_weights == "off":
            return None
        identity = self.identify(dtype=model.dtype, weight_format=chosen.weights)
        conditions = json.dumps(circumstances(self.settings.device, self.kernels), sort_keys=True)
        key = hashlib.blake2b(identity + conditions.encode(), digest_size=16).hexdigest()
        family = hashlib.blake2b(f"{chosen.weights} {self.source}".encode(), digest_size=8).hexdigest()
        return WeightsFile(self.directory, family, key)


def named(model: nn.Module) -> dict[str, PackedWeights]:
    """The packed weights of a model by the names of the modules that use them, experts with their number."""
    modules = {path: module.packed for path, module in model.named_modules() if isinstance(module, PackedModule)}
    return modules | dict(experts.named_weights(model))


def place(model: nn.Module, kernel: LinearKernel, found: Mapping[str, PackedWeights]) -> None:
    """Put modules over these weights, named as by `named`, in place of a model's own.

    DamagedFile, and nothing is changed, if the model has no such modules.
    """
    left = dict(found)
    projections = experts.fitting(model, left)
    modules = dict(model.named_modules())
    for path, weights in left.items():
        if path not in modules or not packed.fits(modules[path], weights):
            raise DamagedFile(f"the model has no such {path}")
    packed.replace(model, kernel, {modules[path]: weights for path, weights in left.items()})
    experts.replace(projections, kernel)
