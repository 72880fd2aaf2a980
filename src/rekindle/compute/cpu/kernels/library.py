"""The library that runs the kernels: which one this processor, this installation and the setting allow.

Owns the number of the interface and the order in which levels are tried. A library is used if the processor has every
instruction that it was compiled for and its interface is ours. torch's OpenMP is made visible before it is loaded, so
both compute on one pool of threads; torch itself is not imported.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rekindle.compute.cpu.kernels.levels import HERE, LEVELS, PLATFORM, Level, library_name
from rekindle.errors import ConfigError

Choice = Literal["auto", "torch"] | Level
INTERFACE = 8  # RK_INTERFACE of native/rekindle.h
CPUINFO = Path("/proc/cpuinfo")
OPENMP, SYSTEMS_OPENMP = ("libgomp*.so*", "libiomp5*.so*"), "libgomp.so.1"
BUILD = "python -m rekindle.compute.cpu.kernels.build"


@dataclass(frozen=True, slots=True)
class KernelLibrary:
    """A loaded library: its level, its file and a digest of that, and its functions."""

    level: str
    path: Path
    digest: str
    handle: ctypes.CDLL = field(repr=False, compare=False)

    def function(
        self, name: str, argument_types: Sequence[type[Any]], result_type: type[Any] | None = None
    ) -> Callable[..., Any]:
        """Return a function of the C interface; AttributeError if there is none.

        Calls convert their arguments to these types of ctypes, and release Python's lock.
        """
        found = self.handle[name]
        found.argtypes = list(argument_types)
        found.restype = result_type
        return found


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """What computes on the CPU: a library, or torch where it is None.

    `why_not`: why it is not the fastest that the processor can run, or "". `advice`: what to do about that, or "".
    """

    library: KernelLibrary | None
    why_not: str = ""
    advice: str = ""

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.level, self.why_not, self.advice)))

    @property
    def level(self) -> str:
        """The name of what computes."""
        return self.library.level if self.library is not None else "torch"


def load(choice: Choice, *, directory: Path = HERE, cpuinfo: Path = CPUINFO) -> KernelChoice:
    """Load the library of this level, or with `auto` the fastest that can be used, if any.

    ConfigError if a level is named that cannot be used. The processor's instructions are read from `cpuinfo`.
    """
    if choice == "torch":
        return KernelChoice(None)
    present = instructions(cpuinfo)
    if choice == "auto":
        return _fastest(directory, present)
    found = _loaded(choice, directory, present)
    if found.library is None:
        raise ConfigError(f"kernels={choice}: {found.why_not}: {found.advice or 'leave it at auto'}")
    return found


def instructions(cpuinfo: Path) -> frozenset[str]:
    """The instruction sets of the processor; empty where Linux does not list them."""
    if not cpuinfo.is_file():
        return frozenset()
    lines = (line.partition(":") for line in cpuinfo.read_text("utf-8", "replace").splitlines())
    return next((frozenset(names.split()) for key, _, names in lines if key.strip() == "flags"), frozenset())


def _fastest(directory: Path, present: frozenset[str]) -> KernelChoice:
    runnable = [level for level, needed in LEVELS.items() if present.issuperset(needed)]
    tried = []
    for level in runnable or list(LEVELS)[-1:]:
        tried.append(_loaded(level, directory, present))
        if tried[-1].library is not None:
            break
    return replace(tried[0], library=tried[-1].library)


def _loaded(level: Level, directory: Path, present: frozenset[str]) -> KernelChoice:
    """Load a level's library if platform, processor, file and interface are right."""
    if sysconfig.get_platform() != PLATFORM:
        return KernelChoice(None, f"there are kernels for {PLATFORM} only")
    lacking = [name for name in LEVELS[level] if name not in present]
    if lacking:
        return KernelChoice(None, f"this processor has no {', '.join(lacking)}")
    path = directory / library_name(level)
    if not path.is_file():
        return KernelChoice(None, f"the kernels for {level} are not built", f"install g++, then run {BUILD}")
    try:
        ctypes.CDLL(openmp_file(), ctypes.RTLD_GLOBAL)
        handle = ctypes.CDLL(str(path))
        interface = handle.rk_interface()
        allowed = interface != INTERFACE or handle.rk_start()
    except (OSError, AttributeError) as error:
        return KernelChoice(None, f"{path.name} cannot be loaded: {error}", f"run {BUILD}")
    if interface != INTERFACE:
        return KernelChoice(None, f"{path.name} has interface {interface} instead of {INTERFACE}", f"run {BUILD}")
    if not allowed:
        return KernelChoice(None, f"the system does not let this process use the registers of {level}")
    digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    return KernelChoice(KernelLibrary(level, path, digest, handle))


def openmp_file() -> str:
    """The OpenMP library that torch brings along; if it brings none, the system's."""
    spec = importlib.util.find_spec("torch")
    places = spec.submodule_search_locations if spec is not None else None
    folders = [folder for place in places or () for folder in (Path(place, "lib"), Path(place).parent / "torch.libs")]
    found = [path for pattern in OPENMP for folder in folders for path in sorted(folder.glob(pattern))]
    return str(found[0]) if found else SYSTEMS_OPENMP
