"""The levels of the kernels: for which instructions they are compiled, and in which file each of them is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

Level = Literal["amx", "avx512", "avxvnni", "avx2"]
PLATFORM = "linux-x86_64"  # as sysconfig writes it
HERE = Path(__file__).parent
_AVX2 = ("avx2", "fma", "f16c", "pclmulqdq")
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni")
# Level, the fastest first -> the instructions it may use, by their names in /proc/cpuinfo.
LEVELS: Mapping[Level, tuple[str, ...]] = {
    "amx": (*_AVX2, *_AVX512, "amx_tile", "amx_bf16", "amx_int8"),
    "avx512": (*_AVX2, *_AVX512),
    "avxvnni": (*_AVX2, "avx_vnni"),
    "avx2": _AVX2,
}


def library_name(level: Level) -> str:
    """The file of a level, next to this one."""
    return f"librekindle-{level}.so"
