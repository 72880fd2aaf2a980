"""Probes of `rekindle doctor` for processor and cards: what is there, what is chosen and why, and memory for hot KV."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from rekindle.cli.findings import Finding
from rekindle.compute.cpu.memory import memory_of
from rekindle.compute.devices import DRIVER, Chosen, choose_device
from rekindle.config import CacheSettings, ModelSettings, show_bytes
from rekindle.errors import ConfigError
from rekindle.model.device import Memory

SMALL_HOT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Card:
    """A card, and the versions of what runs on it; None where they are not known or not there."""

    name: str
    memory: Memory
    capability: tuple[int, int]
    driver: str | None
    cuda: str | None
    triton: str | None

    def __str__(self) -> str:
        major, minor = self.capability
        return (
            f"{self.name}, {show_bytes(self.memory.free)} of {show_bytes(self.memory.total)} free, compute capability "
            f"{major}.{minor}; driver {self.driver or 'of unknown version'}, torch {torch.__version__} for CUDA "
            f"{self.cuda or 'no'}, {'no Triton' if self.triton is None else f'triton {self.triton}'}"
        )


def probe_devices() -> Iterator[Finding]:
    """Report the processor and every accelerator torch finds."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    capability = torch.backends.cpu.get_cpu_capability()
    yield Finding("cpu", "ok", f"{cores} cores, {capability}, {torch.get_num_threads()} threads")
    for index in range(torch.cuda.device_count()):
        yield Finding(f"cuda:{index}", "ok", str(card(f"cuda:{index}")))
    if torch.backends.mps.is_available():
        yield Finding("mps", "ok", "found; an experiment, trust it when the self-test below passes")


def card(device: str) -> Card:
    """Read what is known of a card."""
    return Card(
        name=torch.cuda.get_device_name(device),
        memory=memory_of(device),
        capability=torch.cuda.get_device_capability(device),
        driver=driver_version(DRIVER / "version"),
        cuda=torch.version.cuda,
        triton=_version("triton"),
    )


def driver_version(path: Path) -> str | None:
    """The version in the driver's file; None if there is none."""
    found = re.search(r"\b\d{3,}\.[\d.]*\d", path.read_text("utf-8", "replace")) if path.is_file() else None
    return None if found is None else found[0]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def probe_choice(settings: ModelSettings) -> tuple[Finding, Chosen | None]:
    """Report which device computes and by what, and why not another; the second value is None if nothing can."""
    try:
        chosen = choose_device(settings)
    except ConfigError as error:
        advice = "choose others with --device and --kernels, or repair the driver"
        return Finding("device", "fail", str(error), advice), None
    return finding_of(chosen), chosen


def finding_of(chosen: Chosen) -> Finding:
    """What computes, and why nothing else."""
    advice = "docs/gpu.md says what a card needs; --device cpu leaves it out" if chosen.why_not else ""
    return Finding("device", "warn" if advice else "ok", str(chosen), advice)


def probe_kernel_library(chosen: Chosen) -> Finding:
    """Report which kernels compute, and whether the processor could run faster ones."""
    kernels = chosen.kernels
    if chosen.device != "cpu":
        return Finding("kernels", "ok", ", ".join(filter(None, (chosen.compute.level, chosen.compute.digest))))
    place = f"from {kernels.library.path}" if kernels.library is not None else ""
    said = ", ".join(filter(None, (kernels.level, place, kernels.why_not)))
    return Finding("kernels", "warn" if kernels.advice else "ok", said, kernels.advice)


def probe_memory(settings: CacheSettings, memory: Memory) -> Finding:
    """Check whether there is memory for hot KV."""
    free = memory.free
    if memory.on_card and settings.hot_bytes is None:
        said = f"weights may take {show_bytes(memory.weight_bytes)} of {show_bytes(free)} free; hot KV what they leave"
        return Finding("memory", "ok", said)
    wanted = settings.hot_bytes or memory.hot_bytes(memory.chunk_tokens)
    text = f"hot KV takes {show_bytes(wanted)} of {show_bytes(free)} free"
    if wanted > free:
        return Finding("memory", "fail", text, f"give less: --hot-bytes {free // 2 >> 20}MiB")
    if settings.hot_bytes is None and wanted < SMALL_HOT_BYTES:
        return Finding("memory", "warn", text, "few agents stay hot: free memory, or set --hot-bytes")
    if wanted > 0.8 * free:
        return Finding("memory", "warn", text, "little is left for the weights and the rest: lower --hot-bytes")
    return Finding("memory", "ok", text)
