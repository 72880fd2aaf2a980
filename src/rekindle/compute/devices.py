"""Which device computes a model, and by what: `choose_device`.

`auto` takes the first card if kernels of ours run there, and the processor otherwise; a card that is there and not
taken is said in one line. A card that is named computes in any case, by torch alone if it must.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

import torch

from rekindle.compute.cpu.compute import KernelCompute
from rekindle.compute.cpu.kernels import library
from rekindle.compute.cpu.packer import Packer
from rekindle.compute.cpu.weights import Weights
from rekindle.config import ModelSettings
from rekindle.errors import ConfigError, first_line
from rekindle.extensions import extensions, load
from rekindle.model.device import Memory
from rekindle.model.loaded import Compute

DEVICE_NAME = re.compile(r"cpu|mps|cuda(:\d+)?")
CARD = "cuda"  # the first one; ROCm has this name, too
DRIVER = Path("/proc/driver/nvidia")
SLOW = "device=cuda computes there by torch alone, which is slow"


class PackingCompute(Compute, Protocol):
    """What computes, and what packs weights for it."""

    def packer(self, device: str) -> Packer | None:
        """What packs weights for the device; None where nothing of ours does."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A device by its name, what computes there, and what speaks against a better choice, or "".

    `kernels`: those for the processor. `weights`: what `auto` means of weights there, "auto" if that is to be found
    out, and why they are rounded, or "".
    """

    device: str
    compute: PackingCompute
    kernels: library.KernelChoice
    why_not: str = ""
    weights: Weights | Literal["auto"] = "auto"
    why_rounded: str = ""

    def __str__(self) -> str:
        return ", ".join((self.device, f"by {self.compute.level}", *filter(None, [self.why_not])))

    @property
    def notes(self) -> tuple[str, ...]:
        """For the banner: of the device, nothing where the processor computes and there is no other."""
        of_device = None if self.device == "cpu" and not self.why_not else f"device: {self}"
        lacks_kernels = self.device == "cpu" and self.kernels.library is None and self.kernels.why_not
        of_kernels = f"kernels: {self.kernels}" if lacks_kernels else None
        of_weights = f"weights: {self.why_rounded}" if self.why_rounded else None
        return tuple(note for note in (of_device, of_kernels, of_weights) if note is not None)

    def named(self, settings: ModelSettings) -> ModelSettings:
        """Settings that name this device, and the form of weights."""
        weights = self.weights if settings.weights == "auto" else settings.weights
        if (self.device, weights) == (settings.device, settings.weights):
            return settings
        return replace(settings, device=self.device, weights=weights)

    @property
    def packer(self) -> Packer | None:
        """What packs weights for the device."""
        return self.compute.packer(self.device)

    @property
    def memory(self) -> Memory:
        """The memory of the device now."""
        return self.compute.memory(self.device)


def choose_device(settings: ModelSettings) -> Chosen:
    """Choose what computes; ConfigError if the device or the kernels that are named cannot be used."""
    if settings.device != "auto":
        check_device(settings.device)
        return named_device(settings)
    found = look_for_card()
    return processor(settings) if found is None else choose(settings, found)


def choose(settings: ModelSettings, found: PackingCompute | str) -> Chosen:
    """What `auto` chooses where there is a card, by what computes there, or why nothing of ours does."""
    if settings.kernels != "auto":
        found = f"kernels={settings.kernels} is for the processor"
    return processor(settings, found) if isinstance(found, str) else Chosen(CARD, found, library.KernelChoice(None))


def processor(settings: ModelSettings, why: str = "") -> Chosen:
    """The processor, and why no card, if there is one."""
    kernels = choose_kernels(settings, "cpu")
    return Chosen("cpu", KernelCompute(kernels.library), kernels, why and f"not on the card: {why}")


def named_device(settings: ModelSettings) -> Chosen:
    """What computes on the device that is named."""
    kernels, device = choose_kernels(settings, settings.device), torch.device(settings.device)
    found: PackingCompute | str = kernels_on(device) if device.type == CARD and settings.kernels == "auto" else ""
    if not isinstance(found, str):
        use(device)
        return Chosen(settings.device, found, kernels)
    if device.type != "cpu" and settings.weights in ("int8", "int4"):
        why = found or f"what computes on {settings.device} is torch"
        raise ConfigError(f"weights={settings.weights} needs kernels of ours, and {why}")
    return Chosen(settings.device, KernelCompute(kernels.library), kernels, found and f"which is slow: {found}")


def look_for_card() -> PackingCompute | str | None:
    """What computes on the first card, why nothing of ours does, or None: there is none."""
    if torch.cuda.is_available():
        found = kernels_on(torch.device(CARD))
        return f"{torch.cuda.get_device_name(CARD)}: {found}; {SLOW}" if isinstance(found, str) else found
    if not is_card_seen():
        return None
    if torch.backends.cuda.is_built():
        return f"torch {torch.__version__} cannot use it: its driver is missing or too old"
    return f"torch {torch.__version__} was built without CUDA: install one that has it, and Triton (docs/gpu.md)"


def is_card_seen(driver: Path = DRIVER, path: str | None = None) -> bool:
    """Whether a driver for NVIDIA's cards lists one, or its tool can be found in these directories (None: PATH)."""
    cards = driver / "gpus"
    return (cards.is_dir() and any(cards.iterdir())) or shutil.which("nvidia-smi", path=path) is not None


@cache
def kernels_on(device: torch.device) -> PackingCompute | str:
    """What computes on a card by kernels of ours; a reason where there is nothing."""
    found = extensions("rekindle.cards")
    if not found:
        return "the package rekindle-cuda is missing: pip install 'rekindle[serve]'"
    compute: Callable[[torch.device], PackingCompute | str] = load(found[0])
    return compute(device)


def use(device: torch.device) -> None:
    """Let the calling thread launch on this device: Triton launches on the thread's card, whatever it is given.

    A card without a number is the first one, and then what torch takes it for, too.
    """
    if device.type == CARD:
        torch.cuda.set_device(device.index or 0)


def choose_kernels(settings: ModelSettings, device: str) -> library.KernelChoice:
    """Load the kernels that the settings name; ConfigError if those cannot be used, or not on this device."""
    if torch.device(device).type != "cpu":
        if settings.kernels in ("auto", "torch"):
            return library.KernelChoice(None)
        raise ConfigError(f"kernels={settings.kernels} is for the CPU, not for {device}: leave it at auto")
    chosen = library.load(settings.kernels)
    if settings.weights in ("int8", "int4") and chosen.library is None:
        raise ConfigError(f"weights={settings.weights} needs the kernels for the CPU, and what computes is {chosen}")
    return chosen


def check_device(name: str) -> None:
    """Raise ConfigError unless torch can put a tensor on the device."""
    refused = f"device={name} cannot be used: "
    if DEVICE_NAME.fullmatch(name) is None:
        raise ConfigError(f"{refused}write auto, cpu, cuda, or cuda:1 for the second of several")
    kind, _, index = name.partition(":")
    if kind != "cpu" and not (torch.cuda if kind == CARD else torch.backends.mps).is_available():
        built = torch.backends.cuda.is_built() if kind == CARD else torch.backends.mps.is_built()
        why = "finds no such device" if built else "was built without it"
        raise ConfigError(f"{refused}torch {torch.__version__} {why}; device=cpu works everywhere")
    if index and int(index) >= (count := torch.cuda.device_count()):
        raise ConfigError(f"{refused}there are {count} of them, and cuda:{count - 1} is the last")
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"{refused}{first_line(error)}; device=cpu works everywhere") from error
