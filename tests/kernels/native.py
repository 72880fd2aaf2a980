"""What the tests of building and loading share: what can be compiled and run here, and small sources."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest

from rekindle.compute.cpu.kernels import build
from rekindle.compute.cpu.kernels.levels import LEVELS, Level
from rekindle.compute.cpu.kernels.library import CPUINFO, KernelChoice, instructions, load
from tests.programs import has_kernels

# A parallel region, so that the OpenMP of torch is needed, and a function that no header declares.
THREADS = """
#include "rekindle.h"
extern "C" int32_t rk_undeclared(void) { return 1; }
#pragma GCC visibility push(default)
extern "C" int32_t rk_count_threads(int32_t threads) {
  int32_t count = 0;
#pragma omp parallel num_threads(threads)
  {
#pragma omp atomic
    count++;
  }
  return count;
}
"""

# Shapes the tiles as kernels do, and gives back what the processor took of it.
TILES = """
#include "simd.hpp"
#pragma GCC visibility push(default)
extern "C" void rk_tiles(uint8_t* taken) {
#if defined(__AMX_TILE__)
  {
    struct { uint64_t first, second; uint16_t bytes[16]; uint8_t rows[16]; } config = {1, 0, {}, {}};
    for (int tile = 0; tile < 8; tile++) config.bytes[tile] = 48, config.rows[tile] = 5;
    simd::load_tile_config(&config);
  }
  asm volatile("sttilecfg %0\\n\\ttilerelease" : "=m"(*(uint8_t(*)[64])taken));
#else
  taken[0] = 0;
#endif
}
"""


def can_compile() -> bool:
    try:
        build.find_compiler()
    except build.BuildError:
        return False
    return True


needs_kernels = pytest.mark.skipif(
    not (can_compile() and has_kernels()), reason="no kernels: they take a C++ compiler, and make kernels"
)


def runnable() -> list[Level]:
    """The levels that this processor runs, the fastest first."""
    present = instructions(CPUINFO)
    return [level for level, needed in LEVELS.items() if present.issuperset(needed)]


@cache
def built() -> dict[Level, KernelChoice]:
    """The libraries of the tree for the levels that run here, the fastest first; compiled if they are not current."""
    build.build()
    return {level: load(level) for level in runnable()}


def sources(directory: Path, *, interface: int | None = None, tiles: bool = False) -> Path:
    """Small sources to compile: the interface with its number, a function that starts threads, `tiles` one of AMX."""
    directory.mkdir()
    for name in ("rekindle.h", "interface.cpp"):
        shutil.copy(build.NATIVE / name, directory)
    (directory / "threads.cpp").write_text(THREADS)
    if tiles:  # whose headers take a second to read
        shutil.copy(build.NATIVE / "simd.hpp", directory)
        (directory / "tiles.cpp").write_text(TILES)
    if interface is not None:
        (directory / "interface.cpp").write_text(
            f'extern "C" __attribute__((visibility("default"))) int rk_interface(void) {{ return {interface}; }}'
        )
    return directory


def script(path: Path, *lines: str) -> Path:
    """A program to be found as a compiler."""
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return path
